"""The options that several commands take: name, meaning and limits, each written once."""

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_runtime.cli.console import TRANSFORMERS_BYTES, require_address_space
from moe_runtime.cli.strict import FOLDER, apply_config, argument, option, refuse_given
from moe_runtime.config import (
    ACTIVATIONS,
    CACHE_CODES,
    KV_CACHES,
    MISSES,
    SHARES,
    PrefetchMode,
    check_draft,
    parse_budget,
    parse_bytes,
    parse_routing,
    require_known,
)
from moe_runtime.files import at_home


def checked(
    check: Callable[[str, str], object], *, is_path: bool = False
) -> Callable[[typer.CallbackParam, Any], Any]:
    """A callback that calls ``check(value, option)`` before slow imports.

    `StrictCommand` refuses bytes that are not text, with the option's name. ``is_path`` expands
    `~`.
    """

    def callback(param: typer.CallbackParam, text: str | None) -> str | None:
        if text is None:
            return None
        text = at_home(text) if is_path else text
        if text.isprintable():
            check(text, param.opts[0])
        return text

    return callback


def named(what: str, known: Callable[[], Iterable[str]]) -> Callable[..., Any]:
    """A callback that refuses names other than `known()`."""
    return checked(lambda name, _: require_known(what, name, known()))


def _shaped(expected: str, pattern: str) -> Callable[..., Any]:
    """A callback that refuses other forms, such as devices that torch cannot have."""

    def check(text: str, option: str) -> None:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{option} must be {expected}, got {text!r}")

    return checked(check)


def _check_policy(name: str, _: str) -> None:
    require_address_space()  # for numpy
    from moe_runtime.policies.eviction import require_live

    require_live(name)


def _device(param: typer.CallbackParam, name: str) -> str:
    """Refuses a GPU that is not here, before a model is opened; torch is imported for it."""
    gpu = r"cuda:(0|[1-9]\d?)"
    _shaped("auto, cpu, cuda or cuda:N", rf"auto|cpu|cuda|{gpu}(,{gpu})*")(param, name)
    if name.isprintable() and name.startswith("cuda"):
        require_address_space(TRANSFORMERS_BYTES)
        from moe_runtime.kernels.operands import find_devices

        find_devices(name, "--device")
    return name


def _check_predictor(name: str, _: str) -> None:
    require_address_space()
    from moe_runtime.lab.traces.learned import check_predictor

    if name != "auto":
        check_predictor(name)


_routing = checked(lambda text, _: parse_routing(text))
_budget = checked(lambda text, option: parse_budget(text, name=option))


def bytes_of(text: str, option: str, *, needs_unit: bool = False) -> int:
    """The value of an option as a number of bytes, at least one; errors name the option."""
    try:
        num_bytes = parse_bytes(text, needs_unit=needs_unit)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
    if num_bytes < 1:
        raise ValueError(f"{option} must be positive and at least one byte, got {text!r}")
    return num_bytes


def numbers_of(
    text: str,
    option: str,
    expected: str,
    kind: Callable[[str], Any] = float,
    *,
    is_sound: Callable[[Any], bool] = lambda value: True,
    repeats: bool = False,
) -> list[Any]:
    """The values of an option, separated by commas; errors name the option.

    Args:
        repeats: an equal value counts again; otherwise each is there once.
    """
    try:
        values = [kind(word.strip()) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(map(is_sound, values)):
        raise ValueError(f"{option} must be {expected}, got {text!r}")
    return values if repeats else list(dict.fromkeys(values))


Count = Annotated[int, typer.Option(min=1)]
Natural = Annotated[int, typer.Option(min=0)]
NotNegative = Annotated[float, typer.Option(min=0.0)]
Size = Annotated[str, typer.Option(metavar="SIZE")]
Output = Annotated[Path, typer.Option("--output", "-o")]
OutputFolder = Annotated[Path, typer.Option("--output", "-o", metavar=FOLDER)]
Model = Annotated[
    str,
    argument(
        "Folder of a safetensors checkpoint, a GGUF file, or a name on the hub: "
        "OWNER/NAME, with :QUANTISATION, /FILE.gguf or @REVISION.",
        metavar="MODEL",
    ),
]
Json = Annotated[bool, option("Print one JSON object on stdout, and nothing else there.", "--json")]
Verbose = Annotated[
    bool, option("Say in the table why policy and prefetch were chosen.", "--verbose", "-v")
]
Config = Annotated[
    Path | None,
    option("TOML file with defaults for these options.", callback=apply_config, is_eager=True),
]
Resume = Annotated[bool, option("Continue from the last checkpoint, if there is one.", "--resume")]
Reschedule = Annotated[
    bool,
    option(
        "With --resume: the number of steps and the rate schedule may differ from before.",
        "--reschedule",
    ),
]
DryRun = Annotated[bool, option("Show what would happen, write nothing, and stop.", "--dry-run")]
Exact = Annotated[
    bool,
    option(
        "Each request gets the same bits as it would alone, whatever runs with it; slower.",
        "--exact",
    ),
]
MaxNewTokens = Annotated[int, option("Most tokens to generate.", "--max-new-tokens", "-n", min=1)]
HostMemory = Annotated[
    str, option("RAM to use: 7GiB, a share such as 0.5, or auto.", callback=_budget)
]
DeviceMemory = Annotated[str, option("GPU memory to use, in the same form.", callback=_budget)]
Policy = Annotated[
    str,
    option(
        "Cache eviction policy: a name, your FILE.py, or auto (the best for recent use).",
        callback=checked(_check_policy, is_path=True),
    ),
]
CacheCode = Annotated[
    str,
    option(
        "How bf16 experts and linear layers are stored in memory: none (as in the files) "
        "or planes, lossless compression, so that a budget holds 1.4 times as many "
        "experts. CPU only.",
        callback=named("cache_code", lambda: CACHE_CODES),
    ),
]
KVCache = Annotated[
    str,
    option(
        "How keys and values are kept: exact, or int8, rounded to 8 bits: half the memory, and "
        "faster after long texts. Lossy; CPU only.",
        callback=named("kv_cache", lambda: KV_CACHES),
    ),
]
Misses = Annotated[
    str,
    option(
        "Where to compute experts that are not on the GPU: device (copy first), or auto (there or "
        "on the CPU, whichever is faster; can change the last digits). On a CPU: stand-in, int4 "
        "copies in memory answer for missing experts (lossy).",
        callback=named("misses", lambda: MISSES),
    ),
]
Prefetch = Annotated[
    str,
    option(
        "Read experts before they are needed: off, observe (count only), enforce, or auto"
        " (while it is faster).",
        callback=named("prefetch mode", lambda: list(PrefetchMode)),
    ),
]
Predictor = Annotated[
    str,
    option(
        "Predictor of experts to prefetch: a name, an .npz file, your FILE.py, or auto.",
        callback=checked(_check_predictor, is_path=True),
    ),
]
Draft = Annotated[
    str,
    option(
        "Source of drafted tokens, which one step verifies: none, lookup (the continuation of the "
        "same words before), mtp (the checkpoint's own head), or a small MODEL with the same "
        "tokenizer. The text stays the same. CPU only.",
        callback=checked(lambda name, _: check_draft(name), is_path=True),
    ),
]
Device = Annotated[
    str, option("auto, cpu, cuda or cuda:N, or several: cuda:0,cuda:1.", callback=_device)
]
Dtype = Annotated[
    str,
    option(
        "auto (as the checkpoint says), bfloat16, float16 or float32.",
        callback=_shaped(
            "auto, float32, bfloat16 or float16", "auto|float|half|float32|bfloat16|float16"
        ),
    ),
]


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a model is loaded; each option is a parameter of `moe_runtime.load`.

    Args:
        shares: Memory of each layer: even, adaptive (more where misses cost most), or auto.
        activations: Precision of products with quantised weights: exact, or int8 (faster, less
            precise; CPU only).
        routing: exact, or cache-aware:LAMBDA: a resident expert replaces a missing one whose weight
            is higher by at most this share of the token's weights. Lossy; CPU only.
        skip_below: Leave out missing experts with less than this share of a token's weights.
            Lossy; CPU only.
        teach: With --policy auto: afterwards train the policy reuse in the background, once enough
            routing is kept.
    """

    host_memory: HostMemory = "auto"
    device_memory: DeviceMemory = "auto"
    policy: Policy = "auto"
    shares: Annotated[str, typer.Option(callback=named("shares", lambda: SHARES))] = "auto"
    cache_code: CacheCode = "none"
    kv_cache: KVCache = "exact"
    activations: Annotated[
        str, typer.Option(callback=named("activations", lambda: ACTIVATIONS))
    ] = "exact"
    misses: Misses = "device"
    routing: Annotated[str, typer.Option(metavar="ROUTING", callback=_routing)] = "exact"
    skip_below: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.0
    prefetch: Prefetch = "auto"
    predictor: Predictor = "auto"
    draft: Draft = "none"
    device: Device = "auto"
    dtype: Dtype = "auto"
    teach: bool = True

    def check(self, ctx: typer.Context) -> None:
        if self.prefetch == "off":
            refuse_given(ctx, {"predictor"}, "has no effect: give --prefetch")

    def settings(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class AdaptedLoading(Loading):
    """How a model is loaded, and its adapter."""

    adapter: Annotated[
        Path | None,
        option(
            "Folder of a LoRA adapter in PEFT's format, on layers or experts, for all that the "
            "model computes. CPU only.",
            metavar=FOLDER,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SeveralProcesses:
    """How processes divide a model.

    Args:
        processes: Divide the experts among this many processes, each with its own --host-memory.
            On several machines start the command with `torchrun` instead.
        gpus: The same with a process for each of these GPUs: 0,1 or all.
        placement: Map made by `moe-runtime place` that assigns experts to processes.
    """

    processes: Annotated[int | None, typer.Option(min=2)] = None
    gpus: Annotated[
        str | None, typer.Option(callback=_shaped("all, or numbers such as 0,1", r"all|\d+(,\d+)*"))
    ] = None
    placement: Path | None = None

    def check(self, ctx: typer.Context) -> None:
        if self.processes is not None and self.gpus is not None:
            raise ValueError("--gpus starts a process for each GPU: leave --processes out")
        device = ctx.params.get("device", "auto")
        if self.gpus is not None and device not in ("auto", "cuda"):
            raise ValueError(f"--device {device}: --gpus names the devices, leave it out")
        if self.processes is not None and device.startswith("cuda:"):
            why = "--processes would share this GPU; --gpus starts a process for each GPU"
            raise ValueError(f"--device {device}: {why}")
        draft = ctx.params.get("draft", "none")
        if self.are_asked_for and draft != "none":
            raise ValueError(f"--draft {draft} is for one process: leave it out")

    @property
    def are_asked_for(self) -> bool:
        return self.processes is not None or self.gpus is not None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Args:
        temperature: Randomness. 0 always picks the most likely token. When omitted, the
            checkpoint's generation_config.json decides.
        top_p: Sample among the most likely tokens of this total probability. When omitted, the
            checkpoint decides.
        seed: Makes sampling repeatable.
    """

    temperature: NotNegative | None = None
    top_p: float | None = None
    seed: Natural | None = None
