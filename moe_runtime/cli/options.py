"""The options of the commands: name, meaning and limits, each written once."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_runtime.cli.config_file import apply_config
from moe_runtime.cli.console import TRANSFORMERS_BYTES, require_address_space
from moe_runtime.config import (
    ACTIVATIONS,
    CACHE_CODES,
    MISSES,
    SHARES,
    PrefetchMode,
    parse_bytes,
    require_known,
)
from moe_runtime.files import at_home


def named(what: str, known: Callable[[], Iterable[str]]) -> Callable[[Any], Any]:
    """Refuses other names while the command line is read, before a model's library is imported.

    Args:
        what: has such names.
        known: gives all of them.
    """

    def check(name: str | None) -> str | None:
        # bytes that are no text are refused with the option's name
        if name is not None and name.isprintable():
            require_known(what, name, known())
        return name

    return check


def _policies() -> tuple[str, ...]:
    require_address_space()  # for numpy
    from moe_runtime.policies.eviction import LIVE_POLICIES

    return ("auto", *LIVE_POLICIES)


def _shaped(option: str, expected: str, pattern: str) -> Callable[[str], str]:
    """Refuses what torch has no device or type of, before torch is imported."""

    def check(text: str) -> str:
        if text.isprintable() and not re.fullmatch(pattern, text):
            raise ValueError(f"{option} must be {expected}, got {text!r}")
        return text

    return check


def _device(name: str) -> str:
    """Refuses a GPU that is not here, before a model is opened; torch is imported for it."""
    pattern = r"auto|cpu|cuda(:(0|[1-9]\d?))?"
    _shaped("--device", "auto, cpu, cuda or cuda:N", pattern)(name)
    if name.isprintable() and name.startswith("cuda"):
        require_address_space(TRANSFORMERS_BYTES)
        from moe_runtime.kernels.operands import find_device

        find_device(name, "--device")
    return name


def bytes_of(text: str, option: str, *, needs_unit: bool = False) -> int:
    """Reads what an option says as a number of bytes, at least one.

    Args:
        text: what it says.
        option: its name.
        needs_unit: if it is small, as in `parse_bytes`.

    Raises:
        ValueError: it is none; the message names the option.
    """
    try:
        num_bytes = parse_bytes(text, needs_unit=needs_unit)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
    if num_bytes < 1:
        raise ValueError(f"{option} must be positive and at least one byte, got {text!r}")
    return num_bytes


def _predictor(name: str) -> str:
    require_address_space()
    from moe_runtime.inference.prediction.predictors import check_predictor

    name = at_home(name)
    if name != "auto" and name.isprintable():
        check_predictor(name)
    return name


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder of a safetensors checkpoint, a GGUF file, or a name on the hub: OWNER/NAME, "
        "with :QUANTISATION, /FILE.gguf or @REVISION.",
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the last checkpoint, if there is one.")
]
Reschedule = Annotated[
    bool,
    typer.Option(
        "--reschedule",
        help="With --resume: number of steps and the rate's course may differ from before.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Say in the table why policy and prefetch were chosen."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")]
Config = Annotated[
    Path | None,
    typer.Option(
        help="TOML file with defaults for these options.", callback=apply_config, is_eager=True
    ),
]

Prompt = Annotated[
    list[str] | None,
    typer.Option("--prompt", "-p", help="Text to continue; several times for several prompts."),
]
PromptFile = Annotated[
    Path | None, typer.Option(help="File with the prompt; - reads standard input.")
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        help="File with a prompt in each line; of a .jsonl file a JSON string, or an object with a "
        "prompt. - reads standard input."
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens to generate.")
]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Randomness. 0 always picks the most likely token. When omitted, the checkpoint's "
        "generation_config.json decides.",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample among the most likely tokens of this total probability. When omitted, as the "
        "checkpoint says."
    ),
]
Seed = Annotated[int | None, typer.Option(min=0, help="Makes sampling repeatable.")]

HostMemory = Annotated[str, typer.Option(help="RAM to use: 7GiB, a share such as 0.5, or auto.")]
DeviceMemory = Annotated[str, typer.Option(help="GPU memory to use, written the same way.")]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Room for prompt and new tokens; just enough when omitted."),
]
PlacementFile = Annotated[
    Path | None,
    typer.Option(
        "--placement",
        help="Map made by `moe-runtime place`: which process has which experts, under torchrun.",
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        callback=named("policy", _policies),
        help="Which expert leaves memory first: a policy's name, or auto, which replays what this "
        "model did lately and takes the policy that misses least.",
    ),
]
Shares = Annotated[
    str,
    typer.Option(
        callback=named("shares", lambda: SHARES),
        help="Memory of each layer: even, adaptive (to where misses cost most), auto.",
    ),
]
CacheCode = Annotated[
    str,
    typer.Option(
        callback=named("cache_code", lambda: CACHE_CODES),
        help="How bf16 experts and linear layers lie in memory: none (as in the files), or planes, "
        "a code that loses nothing: a budget holds 1.4 times as many experts; on a CPU.",
    ),
]
Activations = Annotated[
    str,
    typer.Option(
        callback=named("activations", lambda: ACTIVATIONS),
        help="What is multiplied by quantised weights: exact, or int8, rounded to 8 bits, which is "
        "faster and loses digits; on a CPU.",
    ),
]
Misses = Annotated[
    str,
    typer.Option(
        callback=named("misses", lambda: MISSES),
        help="Who computes experts that a GPU lacks: device (once they are copied); cpu (where "
        "they lie in RAM, for a few tokens) or auto (what is faster), with which the last bits of "
        "a result depend on the experts that were there.",
    ),
]
Prefetch = Annotated[
    str,
    typer.Option(
        callback=named("prefetch mode", lambda: list(PrefetchMode)),
        help="Read experts before they are asked for: off, observe (only count), enforce, or auto "
        "(as long as it is faster).",
    ),
]
Predictor = Annotated[
    str,
    typer.Option(
        callback=_predictor,
        help="Who guesses them: a predictor's name, the .npz file of a trained one, or auto.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        callback=_device,
        help="auto, cpu, cuda or cuda:N.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        callback=_shaped(
            "--dtype",
            "auto, float32, bfloat16 or float16",
            "auto|float|half|float32|bfloat16|float16",
        ),
        help="auto (as the checkpoint says), bfloat16, float16 or float32.",
    ),
]
Trace = Annotated[
    Path | None, typer.Option(help="Record every routing decision into this .npz file.")
]

Timeline = Annotated[
    Path | None,
    typer.Option(help="Write the times of layers, waits and reads as a Chrome trace (.json)."),
]

Budget = Annotated[
    str | None,
    typer.Option("--host-memory", help="Also show what this budget buys, such as 7GiB."),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        min=1,
        help="Tokens to set memory aside for; as many as the model knows when omitted, at most "
        "4096.",
    ),
]

MeasuredPath = Annotated[
    Path, typer.Argument(metavar="[PATH]", help="File or folder whose disk is measured.")
]
ReadSize = Annotated[str, typer.Option(help="Size of one read: that of an expert.")]
