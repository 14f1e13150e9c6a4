"""How commands read their options: groups, configuration files, and checks for all of them."""

import copy
import dataclasses
import inspect
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from moe_runtime.cli.console import num_launched
from moe_runtime.config import nearest
from moe_runtime.files import (
    at_home,
    check_not_in_progress,
    check_output_path,
    read_toml,
    require_apart,
    require_file_name,
    require_not_read,
)

OUTPUTS = frozenset({"--csv", "--markdown", "--output", "--plot", "--png", "--timeline", "--trace"})
"""Options that name a file or folder to write; other options with paths name inputs."""
_WITH_OTHERS = frozenset({"run", "serve", "generate", "chat", "train", "finetune", "dispatch"})
"""Commands that the processes of `torchrun` run together."""
_MAY_BE_INFINITE = frozenset({"--max-slowdown"})
FOLDER = "DIR"
"""The metavar of an output that is a folder."""
_DEBUG = Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")]


def option(help: str, *names: str, **settings: Any) -> Any:
    """An option of typer's, by default named like its parameter."""
    return typer.Option(*names, help=help, **settings)


def argument(help: str, **settings: Any) -> Any:
    """An argument of typer's."""
    return typer.Argument(help=help, **settings)


def expanded(function: Callable[..., None]) -> Callable[..., None]:
    """A command with an option for each field of its parameters that are dataclasses.

    The `Args:` of the docstrings of the command and its groups are the help. A flag that is off by
    default has no `--no-` form. `--debug` is added. A group's method `check` gets the context.
    """
    hints = get_type_hints(function, include_extras=True)
    by_name = inspect.Parameter.KEYWORD_ONLY
    groups: dict[str, Any] = {
        n: kind for n, kind in hints.items() if dataclasses.is_dataclass(kind)
    }
    about, helps = _helps(function)
    parameters: list[inspect.Parameter] = []
    for param in inspect.signature(function).parameters.values():
        fields = groups.get(param.name)
        if fields is None:
            parameters.append(_with_help(param, hints[param.name], helps))
            continue
        kinds = get_type_hints(fields, include_extras=True)
        helps_of_group = {n: text for kind in fields.__mro__ for n, text in _helps(kind)[1].items()}
        for field in dataclasses.fields(fields):
            is_needed = field.default is dataclasses.MISSING
            default = inspect.Parameter.empty if is_needed else field.default
            own = param.replace(name=field.name, default=default)
            parameters.append(_with_help(own, kinds[field.name], helps_of_group))
    if "ctx" not in hints:
        parameters.append(inspect.Parameter("ctx", by_name, annotation=typer.Context))
    debug = inspect.Parameter("debug", by_name, default=False, annotation=_DEBUG)
    signature = inspect.Signature([*(p.replace(kind=by_name) for p in parameters), debug])

    def command(**given: Any) -> None:
        del given["debug"]  # `StrictCommand` reads it
        ctx = given["ctx"] if "ctx" in hints else given.pop("ctx")
        for name, kind in groups.items():
            fields = {field.name for field in dataclasses.fields(kind)}
            given[name] = group = kind(**{field: given.pop(field) for field in fields})
            if hasattr(group, "check"):
                group.check(ctx)
        function(**given)

    annotations = {p.name: p.annotation for p in signature.parameters.values()}
    for name, value in (
        *(("__name__", function.__name__), ("__doc__", about)),
        *(("__signature__", signature), ("__annotations__", annotations), ("function", function)),
    ):
        setattr(command, name, value)
    return command


def _helps(documented: Any) -> tuple[str, dict[str, str]]:
    """A docstring without its `Args:`, and the help of each parameter in them."""
    about, _, args = inspect.cleandoc(documented.__doc__ or "").partition("\n\nArgs:\n")
    helps: dict[str, str] = {}
    name = ""
    for line in args.splitlines():
        if match := re.match(r" {4}(\w+): (.*)", line):
            name, helps[match[1]] = match.groups()
        else:
            helps[name] += f" {line.strip()}"
    return about, helps


def _with_help(param: inspect.Parameter, kind: Any, helps: Mapping[str, str]) -> inspect.Parameter:
    """A parameter for typer: its annotation with help and limits encloses a union with None."""
    if param.name not in helps:
        return param.replace(annotation=kind)
    info = typer.Option()
    marked = next((one for one in get_args(kind) if get_origin(one) is Annotated), None)
    if get_origin(kind) is Annotated:
        kind, info = get_args(kind)
    elif marked is not None:
        kind, info = get_args(marked)
        kind = kind | None
    info = copy.copy(info)
    info.help = helps[param.name]
    if kind is bool and param.default is False and info.default is ...:
        info.param_decls = (f"--{param.name.replace('_', '-')}",)
    return param.replace(annotation=Annotated[kind, info])


def apply_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Makes the values of `--config FILE.toml` the defaults of the command's options.

    Keys are written as the options are, with `-` or `_`. The command line wins.
    """
    if path is None:
        return None
    path = Path(at_home(str(path)))
    known = {
        param.opts[0].removeprefix("--").replace("-", "_"): param
        for param in ctx.command.params
        if param.opts[0].startswith("--") and param.name not in ("config", "help")
    }
    defaults = {}
    for written, value in read_toml(path).items():
        key = written.replace("-", "_")
        if key not in known:
            raise ValueError(f"{path}: unknown key {key!r}; {nearest(key, known)}")
        defaults[known[key].name] = _as_given(known[key], value, f"{path}: {key}")
    ctx.default_map = defaults
    return path


def _as_given(option: Any, value: object, name: str) -> bool | str | list[str]:
    """A value of the file as the words of a command line would give it."""
    if getattr(option, "is_flag", False):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        return value
    is_multiple = getattr(option, "multiple", False)
    values = value if isinstance(value, list) and is_multiple else [value]
    if any(isinstance(one, dict | list | bool) for one in values):
        raise ValueError(f"{name} must be a single value, got {value!r}")
    # as text: 3.5 must be refused as a whole number
    words = [str(one) for one in values]
    return words if is_multiple else words[0]


def refuse_given(ctx: typer.Context, names: Container[str], why: str) -> None:
    """Refuses given options, on the command line or in a file, that have no effect."""
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name or "")
        is_given = source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")
        if param.name in names and is_given:
            raise ValueError(f"{param.opts[0]} {why}")


class StrictCommand(TyperCommand):
    """A command that refuses repeated options, and outputs that replace inputs.

    Its help is wrapped at the terminal's width only.
    """

    def __init__(self, *args: Any, help: str | None = None, **options: Any) -> None:
        paragraphs = inspect.cleandoc(help or "").split("\n\n")
        joined = "\n\n".join(" ".join(one.split()) for one in paragraphs)
        super().__init__(*args, help=joined, **options)

    def invoke(self, ctx: Any) -> Any:
        if num_launched() > 1 and self.name not in _WITH_OTHERS:
            raise ValueError(
                f"{self.name} works in one process; start it without torchrun "
                "(run, serve, generate, chat, train, finetune and bench dispatch take several)"
            )
        as_json = ctx.params.get("as_json", False)
        ctx.obj.begin(debug=ctx.params.get("debug", False), as_json=as_json)
        if as_json and ctx.params.get("verbose"):
            raise ValueError(
                "--verbose is for the table, which --json leaves out; give one of them"
            )
        return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the words of the command line."""
        words, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for option, times in Counter(given).items():
            takes_many = getattr(option, "multiple", True) or getattr(option, "is_flag", False)
            if times > 1 and option.param_type_name == "option" and not takes_many:
                raise typer.BadParameter(
                    f"expected once, got {times} times; give it once, with commas between values "
                    "where it takes several",
                    param_hint=option.opts[0],
                )
        rest = super().parse_args(ctx, args)
        written = {**(ctx.default_map or {}), **words}
        for param in self.params:
            value, word = ctx.params.get(param.name), written.get(param.name)
            for text in value if isinstance(value, list | tuple) else [value]:
                _require_utf8(text, param)
            is_limit = value == math.inf and param.opts[0] in _MAY_BE_INFINITE
            if isinstance(value, float) and not (math.isfinite(value) or is_limit):
                raise typer.BadParameter(
                    f"expected a finite number, got {value}", param_hint=param.opts[0]
                )
            if isinstance(value, Path) and word == "":
                raise ValueError(f"{_shown(param)}: is empty, expected the name of a file")
            # from the word: a Path has lost the dot of ./~
            if isinstance(value, Path) and isinstance(word, str):
                ctx.params[param.name] = Path(at_home(word))
            elif isinstance(value, list | tuple) and any(isinstance(one, Path) for one in value):
                ctx.params[param.name] = [Path(at_home(one)) for one in word or value]
        self._check_outputs(ctx, written)
        return rest

    def _check_outputs(self, ctx: Any, words: Mapping[str, Any]) -> None:
        """Refuses outputs that are inputs, or one another, or cannot be written."""
        inputs = [path for param in self.params for path in _inputs_of(param, ctx)]
        files: dict[str, Path] = {}
        folders: list[str] = []
        for param in self.params:
            value = ctx.params.get(param.name)
            if value is None or not OUTPUTS.intersection(param.opts):
                continue
            option = param.opts[0]
            is_file = param.metavar != FOLDER
            given = words.get(param.name, value)
            if is_file:
                require_file_name(given, option)
                files[option] = value
            elif str(given) == "-":
                raise ValueError(f"{option} -: expected the name of a folder")
            else:
                folders.append(os.path.realpath(value))
            for path in [value] if is_file or option != "--png" else value.glob("*.png"):
                require_not_read(path, option.removeprefix("--"), inputs)
        for one, other in itertools.combinations(files, 2):
            require_apart(files[one], files[other], (one, other))
        for option, path in files.items():
            place = Path(os.path.realpath(path))
            if not any(map(place.is_relative_to, folders)):  # the command makes them first
                check_output_path(path, option.removeprefix("--"))
                check_not_in_progress(path, option.removeprefix("--"))


def _require_utf8(text: Any, param: Any) -> None:
    """Refuses a text that is not UTF-8; names of files may have any bytes."""
    if isinstance(text, str) and not os.path.exists(text):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # no stream could write the text
            raise typer.BadParameter(
                f"expected text in UTF-8, got other bytes from character {error.start + 1} on",
                param_hint=_shown(param),
            ) from None


def _shown(param: Any) -> str:
    """A parameter as the help calls it."""
    is_option = param.param_type_name == "option"
    return param.opts[0] if is_option else param.metavar or param.name.upper()


def _inputs_of(param: Any, ctx: Any) -> Iterator[Path]:
    """The files that a parameter's values name; of a folder the files of its checkpoint."""
    value = ctx.params.get(param.name)
    if OUTPUTS.intersection(param.opts):
        return
    # other texts that may be repeated are prompts, peers and the like
    is_text = param.param_type_name == "option" and param.multiple and param.metavar != "FILE"
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, Path if is_text else str | Path) and one:
            path = Path(at_home(one)) if isinstance(one, str) else one
            if os.path.isdir(path):
                from moe_runtime.checkpoints.opening import files_of

                yield from files_of(path)
            else:
                yield path
