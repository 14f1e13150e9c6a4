"""Entry point of ``moe-runtime``: commands, and errors as one line with an exit code.

Exit codes: 0 done, 1 a bug of ours, 2 something that the user or the machine can change,
130 interrupted by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP.
"""

import contextlib
import errno
import functools
import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import typer
from typer.completion import completion_init, get_completion_script  # pyright: ignore
from typer.core import TyperGroup
from typer.main import get_command

import moe_runtime
from moe_runtime.cli.commands.chat import chat
from moe_runtime.cli.commands.doctor import doctor
from moe_runtime.cli.commands.finetune import finetune
from moe_runtime.cli.commands.generate import generate
from moe_runtime.cli.commands.inspect import inspect
from moe_runtime.cli.commands.models import models_app
from moe_runtime.cli.commands.pack import pack
from moe_runtime.cli.commands.place import place
from moe_runtime.cli.commands.predictor import predictor_app
from moe_runtime.cli.commands.replay import replay
from moe_runtime.cli.commands.report import report
from moe_runtime.cli.commands.run import run
from moe_runtime.cli.commands.serve import serve
from moe_runtime.cli.commands.simulate import simulate_app
from moe_runtime.cli.commands.train import train
from moe_runtime.cli.console import Session, one_line, print_json, require_address_space
from moe_runtime.cli.stopping import (
    StopRequest,
    release_broken_streams,
    streams_on_full_disks,
    terminable,
)
from moe_runtime.cli.strict import StrictCommand, expanded, option
from moe_runtime.errors import MoERuntimeError, text_of
from moe_runtime.lazy import own_code_files, place_in_own_code

_FIRST_SCREEN = """\
moe-runtime runs Mixture-of-Experts models whose experts do not fit in memory.

  moe-runtime run MODEL --prompt "..."    generate text; experts stream from disk
  moe-runtime serve MODEL                 answer requests over HTTP as OpenAI's API does
  moe-runtime chat MODEL                  a conversation in the terminal
  moe-runtime generate MODEL --prompts IN.jsonl -o OUT.jsonl    answer a file of prompts
  moe-runtime inspect MODEL               what a model needs, and what a budget buys
  moe-runtime models list                 models of the hub that are on this disk
  moe-runtime pack MODEL OUT              the same model with smaller experts, bit for bit
  moe-runtime doctor                      what this machine offers, and what it lacks
  moe-runtime replay TRACE                hits and time of a recorded trace with other policies
  moe-runtime report TRACE                the same and more as a page to look at
  moe-runtime train CONFIG.toml           train a model with experts on text files
  moe-runtime finetune MODEL DATA         train a checkpoint further, its experts off memory

MODEL is a folder with a safetensors checkpoint, or a model's name on the Hugging Face hub.
For example, with at most 7 GiB of memory:

  moe-runtime run ./OLMoE-1B-7B --host-memory 7GiB --prompt "The sea is"

`moe-runtime COMMAND --help` lists the options of a command."""

_NAME = "moe-runtime"
_INTERRUPTED, _READER_LEFT = 130, 141
_OUTSIDE_PACKAGES = frozenset({"huggingface_hub", "httpx", "httpx2", "safetensors", "torch"})
"""Packages whose errors are about files, networks and memory, not about our code."""

_NO_MEMORY = (
    "can't allocate memory",
    "annot allocate memory",
    "failed to map segment",
    "can't start new thread",
    "std::bad_alloc",
)
"""Messages of torch, the dynamic linker, Python's threads and C++ when memory is short."""
_COMMANDS = (run, serve, generate, chat, inspect, pack, doctor, replay, report, place)
_VERSIONS_SHOWN = ("python", "torch", "transformers", "triton")


def main(
    args: Sequence[str] | None = None,
    *,
    on_loaded: Callable[[Sequence[Any]], None] | None = None,
) -> int:
    """Runs one command line (of the process when omitted) and returns the exit code.
    ``on_loaded``: see `Session`."""
    session = Session(on_loaded=on_loaded)
    with terminable() as request:
        code = _run_words(args, request, session)
    return request.exit_code if code == _INTERRUPTED and request.is_set else code


def _run_words(args: Sequence[str] | None, request: StopRequest, session: Session) -> int:
    words = sys.argv[1:] if args is None else list(args)
    completion_init()  # if the environment asks for completions, the command prints them
    # errors in the words come before a command has read its options
    session.words, session.as_json = words, "--json" in words
    try:
        code = _command()(args=words, prog_name=_NAME, standalone_mode=False, obj=session)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except SystemExit:
        code = _READER_LEFT  # of rich, when the reader of our output is gone, as with `| head`
    except Exception as error:
        # libraries in C, also while they are imported, turn an interrupt into other errors
        code = _INTERRUPTED if request.is_set else _report(error, session)
    release_broken_streams()
    return code if isinstance(code, int) else 0


@functools.cache
def _command() -> Any:
    """The command line; building it takes as long as many a command."""
    return get_command(build_app())


def build_app() -> typer.Typer:
    """The command line with all its commands."""
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode="rich",
    )
    app.callback(invoke_without_command=True)(_first_screen)
    for function in (*_COMMANDS, train, finetune):
        app.command(cls=StrictCommand)(expanded(function))
    app.add_typer(simulate_app(), name="simulate")
    app.add_typer(models_app(), name="models")
    app.add_typer(predictor_app(), name="predictor")
    app.add_typer(
        typer.Typer(
            help="Measure a model, kernels on this machine, or a server.",
            cls=_BenchGroup,
            no_args_is_help=True,
        ),
        name="bench",
    )
    return app


class _BenchGroup(TyperGroup):
    """The commands of ``bench``, imported on demand."""

    @property
    def commands(self) -> Any:
        return _bench_commands()

    @commands.setter
    def commands(self, value: Any) -> None:
        """typer sets the commands that it knows: none."""


@functools.cache
def _bench_commands() -> Any:
    module = importlib.import_module("moe_runtime.benchmarks.commands.bench")
    bench: Any = get_command(module.bench_app())
    return bench.commands


def _first_screen(
    ctx: typer.Context,
    version: Annotated[bool, option("Print version and build.", "--version")] = False,
    as_json: Annotated[bool, option("With --version: print one JSON object.", "--json")] = False,
    completion: Annotated[
        Literal["bash", "zsh", "fish"] | None,
        option("Print a completion script for bash, zsh or fish.", metavar="SHELL"),
    ] = None,
) -> None:
    """Run Mixture-of-Experts models whose experts do not fit in memory."""
    if as_json and not version:
        raise ValueError("--json comes after the command's name, or with --version")
    if version:
        _show_version(as_json=as_json)
        raise typer.Exit
    if completion is not None:
        variable = "_MOE_RUNTIME_COMPLETE"
        print(get_completion_script(prog_name=_NAME, complete_var=variable, shell=completion))
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(_FIRST_SCREEN)


def _show_version(*, as_json: bool) -> None:
    """Prints the version and commit at once, and the rest when torch is imported."""
    from moe_runtime.lab.this_machine import package_commit, versions

    version, commit = moe_runtime.__version__, package_commit()
    if not as_json:
        known = "" if commit == "unknown" else f" (commit {commit})"
        print(f"moe-runtime {version}{known}", flush=True)
    found = versions()
    installed = {name: found.get(name) for name in _VERSIONS_SHOWN}
    require_address_space()
    from moe_runtime.kernels.native import describe

    native = describe()
    if as_json:
        print_json(
            {
                "version": version,
                "commit": commit,
                "native": {
                    "built": list(native.built),
                    "usable": list(native.isas),
                    "isa": native.isa,
                    "problem": native.problem,
                },
                "versions": installed,
            }
        )
        return
    built = f"built for {', '.join(native.built)}; this machine runs {native.isa}"
    print(f"native library: {native.problem or built}")
    print(", ".join(f"{name} {number or 'not installed'}" for name, number in installed.items()))


def _report(error: Exception, session: Session) -> int:
    """Prints an error in one line and returns its exit code."""
    broken = release_broken_streams()
    if isinstance(error, BrokenPipeError) and broken:
        return _READER_LEFT
    code, message = describe(error, broken)
    if not message:
        return code  # the help of a group without a command is printed already
    with contextlib.suppress(OSError):
        if session.debug:
            traceback.print_exception(error)
        session.fail(error, message)
    return code


def describe(error: Exception, broken: Sequence[str] = ()) -> tuple[int, str]:
    """An error as exit code and one line of text; `broken` names streams that cannot be written."""
    if isinstance(error, typer.TyperException):
        return 2, one_line(error.format_message())
    is_ours = isinstance(error, MoERuntimeError | ValueError)
    if isinstance(error, MemoryError) or (
        not is_ours and any(words in str(error) for words in _NO_MEMORY)
    ):
        return 2, (
            "memory could not be allocated; ask for less (a smaller budget, smaller sizes), or "
            "raise the ulimit"
        )
    if isinstance(error, OSError) and error.strerror:
        if error.errno == errno.ENOSPC:
            broken = broken or streams_on_full_disks()
        is_stream = broken and error.filename is None
        where = f"{' and '.join(broken)} cannot be written: " if is_stream else ""
        return 2, one_line(f"{where}{text_of(error)}")
    package = type(error).__module__.partition(".")[0]
    if is_ours or isinstance(error, OSError) or package in _OUTSIDE_PACKAGES:
        return 2, one_line(str(error)) or type(error).__name__
    message = f"{type(error).__name__}: {error}"
    if (place := place_in_own_code(error)) is not None:
        return 2, one_line(f"{place}: {message}")
    whose = " or ".join(["moe-runtime", *own_code_files()])
    return 1, one_line(f"{message} (a bug of {whose}; --debug shows where)")


if __name__ == "__main__":
    sys.exit(main())
