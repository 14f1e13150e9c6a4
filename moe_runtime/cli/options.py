"""The options that several commands take: name, meaning and limits, each written once."""

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_runtime.cli.console import TRANSFORMERS_BYTES, require_address_space
from moe_runtime.cli.strict import apply_config, refuse_given
from moe_runtime.config import (
    ACTIVATIONS,
    CACHE_CODES,
    MISSES,
    SHARES,
    PrefetchMode,
    parse_budget,
    parse_bytes,
    require_known,
)
from moe_runtime.files import at_home


def named(what: str, known: Callable[[], Iterable[str]]) -> Callable[[Any], Any]:
    """Refuses names other than `known()` while the command line is read, before slow imports."""

    def check(name: str | None) -> str | None:
        # bytes that are no text are refused with the option's name
        if name is not None and name.isprintable():
            require_known(what, name, known())
        return name

    return check


def _policy(name: str) -> str:
    require_address_space()  # for numpy
    from moe_runtime.policies.eviction import require_live

    name = at_home(name)
    if name.isprintable():
        require_live(name)
    return name


def _shaped(expected: str, pattern: str) -> Callable[..., str]:
    """Refuses a device or type that torch cannot have, before torch is imported."""

    def check(param: typer.CallbackParam, text: str) -> str:
        if text.isprintable() and not re.fullmatch(pattern, text):
            raise ValueError(f"{param.opts[0]} must be {expected}, got {text!r}")
        return text

    return check


def _device(param: typer.CallbackParam, name: str) -> str:
    """Refuses a GPU that is not here, before a model is opened; torch is imported for it."""
    _shaped("auto, cpu, cuda or cuda:N", r"auto|cpu|cuda(:(0|[1-9]\d?))?")(param, name)
    if name.isprintable() and name.startswith("cuda"):
        require_address_space(TRANSFORMERS_BYTES)
        from moe_runtime.kernels.operands import find_device

        find_device(name, "--device")
    return name


def _predictor(name: str) -> str:
    require_address_space()
    from moe_runtime.lab.traces.learned import check_predictor

    name = at_home(name)
    if name != "auto" and name.isprintable():
        check_predictor(name)
    return name


def _budget(param: typer.CallbackParam, text: str) -> str:
    if text.isprintable():
        parse_budget(text, name=param.opts[0])
    return text


def bytes_of(text: str, option: str, *, needs_unit: bool = False) -> int:
    """The value of an option as a number of bytes, at least one; errors name the option."""
    try:
        num_bytes = parse_bytes(text, needs_unit=needs_unit)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
    if num_bytes < 1:
        raise ValueError(f"{option} must be positive and at least one byte, got {text!r}")
    return num_bytes


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder of a safetensors checkpoint, a GGUF file, or a name on the hub: OWNER/NAME, "
        "with :QUANTISATION, /FILE.gguf or @REVISION.",
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
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from the last checkpoint, if there is one.")
]
Reschedule = Annotated[
    bool,
    typer.Option(
        "--reschedule",
        help="With --resume: the number of steps and the rate schedule may differ from before.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would happen, write nothing, and stop.")
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Each request gets the same bits as it would alone, whatever runs with it; slower.",
    ),
]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens to generate.")
]
HostMemory = Annotated[
    str, typer.Option(callback=_budget, help="RAM to use: 7GiB, a share such as 0.5, or auto.")
]
DeviceMemory = Annotated[
    str, typer.Option(callback=_budget, help="GPU memory to use, in the same form.")
]
Policy = Annotated[
    str,
    typer.Option(
        callback=_policy,
        help="Cache eviction policy: a name, your FILE.py, or auto (the best for recent use).",
    ),
]
Shares = Annotated[
    str,
    typer.Option(
        callback=named("shares", lambda: SHARES),
        help="Memory of each layer: even, adaptive (more where misses cost most), or auto.",
    ),
]
CacheCode = Annotated[
    str,
    typer.Option(
        callback=named("cache_code", lambda: CACHE_CODES),
        help="How bf16 experts and linear layers are stored in memory: none (as in the files) or "
        "planes, lossless compression, so that a budget holds 1.4 times as many experts. CPU only.",
    ),
]
Activations = Annotated[
    str,
    typer.Option(
        callback=named("activations", lambda: ACTIVATIONS),
        help="Precision of products with quantised weights: exact, or int8 (faster, less precise; "
        "CPU only).",
    ),
]
Misses = Annotated[
    str,
    typer.Option(
        callback=named("misses", lambda: MISSES),
        help="Where to compute experts that are not on the GPU: device (copy first), cpu, or auto "
        "(the faster). cpu and auto can change the last digits.",
    ),
]
Prefetch = Annotated[
    str,
    typer.Option(
        callback=named("prefetch mode", lambda: list(PrefetchMode)),
        help="Read experts before they are needed: off, observe (count only), enforce, or auto "
        "(while it is faster).",
    ),
]
Predictor = Annotated[
    str,
    typer.Option(
        callback=_predictor,
        help="What predicts experts to prefetch: a name, an .npz file, your FILE.py, or auto.",
    ),
]
Device = Annotated[str, typer.Option(callback=_device, help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[
    str,
    typer.Option(
        callback=_shaped(
            "auto, float32, bfloat16 or float16", "auto|float|half|float32|bfloat16|float16"
        ),
        help="auto (as the checkpoint says), bfloat16, float16 or float32.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a model is loaded; each option is a parameter of `moe_runtime.load`."""

    host_memory: HostMemory = "auto"
    device_memory: DeviceMemory = "auto"
    policy: Policy = "auto"
    shares: Shares = "auto"
    cache_code: CacheCode = "none"
    activations: Activations = "exact"
    misses: Misses = "device"
    prefetch: Prefetch = "auto"
    predictor: Predictor = "auto"
    device: Device = "auto"
    dtype: Dtype = "auto"

    def check(self, ctx: typer.Context) -> None:
        """Refuses a predictor that nothing asks."""
        if self.prefetch != "off":
            return
        why = "has no effect: give --prefetch"
        if self.policy not in ("auto", "predicted"):
            refuse_given(ctx, {"predictor"}, f"{why}, or --policy predicted or auto")
        from moe_runtime.policies.prediction import PREDICTORS

        if self.predictor in PREDICTORS and PREDICTORS[self.predictor].needs_hidden:
            why = f"{why}; policies use predictors that read routing alone"
            refuse_given(ctx, {"predictor"}, why)

    def settings(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


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
        help="Sample among the most likely tokens of this total probability. When omitted, the "
        "checkpoint decides."
    ),
]
Seed = Annotated[int | None, typer.Option(min=0, help="Makes sampling repeatable.")]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen."""

    temperature: Temperature = None
    top_p: TopP = None
    seed: Seed = None
