"""A command that takes an option once, finite numbers, and outputs that lie apart from inputs."""

import inspect
import itertools
import math
import os
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from moe_runtime.checkpoints.model_files import files_of
from moe_runtime.cli.console import launched_rank
from moe_runtime.files import at_home, require_apart, require_file_name, require_not_read

OUTPUTS = frozenset(
    {"--csv", "--markdown", "--output", "--plot", "--png", "--table", "--timeline", "--trace"}
)
"""Options that name a file or folder to write; what else names a file names one to read."""
_WITH_OTHERS = frozenset({"run", "train", "dispatch"})
"""Commands that the processes of `torchrun` run together."""
FOLDER = "DIR"
"""How the help shows an output that is a folder."""


class StrictCommand(TyperCommand):
    """Refuses what would be dropped without a word: of an option given twice, the first value.

    Its help is wrapped where the terminal ends, not where lines of the docstring do as well.
    """

    def __init__(self, *args: Any, help: str | None = None, **options: Any) -> None:
        paragraphs = inspect.cleandoc(help or "").split("\n\n")
        joined = "\n\n".join(" ".join(one.split()) for one in paragraphs)
        super().__init__(*args, help=joined, **options)

    def invoke(self, ctx: Any) -> Any:
        """Runs the command.

        Raises:
            ValueError: `torchrun` started several processes of a command that works in one.
        """
        several = launched_rank() is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1
        if several and self.name not in _WITH_OTHERS:
            raise ValueError(
                f"{self.name} works in one process; start it without torchrun "
                "(run, train and bench dispatch take several)"
            )
        return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the words of the command line.

        Raises:
            typer.BadParameter: an option that takes one value has two, a number is infinite or
                none, or a text is not UTF-8.
            ValueError: a file's or folder's name is empty or none for an output, or an output would
                replace one of the inputs, or another output.
        """
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
        for param in self.params:
            value = ctx.params.get(param.name)
            for text in value if isinstance(value, list | tuple) else [value]:
                _require_utf8(text, param)
            if isinstance(value, float) and not math.isfinite(value):
                raise typer.BadParameter(
                    f"expected a finite number, got {value}", param_hint=param.opts[0]
                )
        written = {**(ctx.default_map or {}), **words}
        for param in self.params:
            value, word = ctx.params.get(param.name), written.get(param.name)
            if isinstance(value, Path) and word == "":
                raise ValueError(f"{_shown(param)}: is empty, expected the name of a file")
            # From what was written: a Path has lost the dot of ./~ already.
            if isinstance(value, Path) and isinstance(word, str):
                ctx.params[param.name] = Path(at_home(word))
            elif isinstance(value, list | tuple) and any(isinstance(one, Path) for one in value):
                ctx.params[param.name] = [Path(at_home(one)) for one in word or value]
        self._check_outputs(ctx, written)
        return rest

    def _check_outputs(self, ctx: Any, words: Mapping[str, Any]) -> None:
        """Refuses outputs that are inputs, or one another; a folder of inputs is a checkpoint."""
        inputs = [path for param in self.params for path in _inputs_of(param, ctx)]
        files: dict[str, Path] = {}
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
            for path in [value] if is_file or option != "--png" else value.glob("*.png"):
                require_not_read(path, option.removeprefix("--"), inputs)
        for one, other in itertools.combinations(files, 2):
            require_apart(files[one], files[other], (one, other))


def _require_utf8(text: Any, param: Any) -> None:
    """Refuses a text with bytes that are not UTF-8; names of files may have any bytes."""
    if isinstance(text, str) and not os.path.exists(text):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # The rest of the message may not show the text: no stream could write it.
            raise typer.BadParameter(
                f"expected text in UTF-8, got other bytes from character {error.start + 1} on",
                param_hint=_shown(param),
            ) from None


def _shown(param: Any) -> str:
    """A parameter as the help calls it."""
    is_option = param.param_type_name == "option"
    return param.opts[0] if is_option else param.metavar or param.name.upper()


def _inputs_of(param: Any, ctx: Any) -> Iterator[Path]:
    """The files that the values of a parameter name, if they name any."""
    value = ctx.params.get(param.name)
    is_text = param.param_type_name == "option" and param.multiple
    if OUTPUTS.intersection(param.opts) or is_text:
        return
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, str | Path) and one:
            path = Path(at_home(one)) if isinstance(one, str) else one
            yield from files_of(path) if os.path.isdir(path) else [path]


def refuse_given(ctx: typer.Context, names: Container[str], why: str) -> None:
    """Refuses options that would have no effect.

    Args:
        ctx: of the command.
        names: the command's parameters.
        why: goes on after the option's name.

    Raises:
        ValueError: one was given, on the command line or in a configuration file.
    """
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name or "")
        is_given = source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")
        if param.name in names and is_given:
            raise ValueError(f"{param.opts[0]} {why}")


def refuse_idle_predictor(ctx: typer.Context, policy: str, prefetch: str, predictor: str) -> None:
    """Refuses a predictor that nothing would ask: no prefetching, and a policy that cannot.

    Raises:
        ValueError: one was given.
    """
    if prefetch != "off":
        return
    why = "has nobody to guess for: give --prefetch"
    if policy not in ("auto", "predicted"):
        refuse_given(ctx, {"predictor"}, f"{why}, or --policy predicted or auto")
    from moe_runtime.policies.prediction import PREDICTORS

    if predictor in PREDICTORS and PREDICTORS[predictor].needs_hidden:
        why = f"{why}; policies take predictors of routing alone, and {predictor} is none"
        refuse_given(ctx, {"predictor"}, why)
