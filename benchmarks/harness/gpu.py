"""What the GPU scripts share: checkpoints drawn on the GPU, rates of the hardware, decoding,
profiles, and results that are written row by row.

Unlike in `model_shapes`, what experts compute reaches the logits, so that outputs can be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import io
import pstats
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers.generation.streamers import BaseStreamer

from moe_runtime.benchmarks.harness.scripting import RESULTS, write_systems
from moe_runtime.benchmarks.suite.results import Metric
from moe_runtime.benchmarks.suite.runner import MeasuredSystem, middle
from moe_runtime.benchmarks.synthetic.checkpoint_writer import write_checkpoint
from moe_runtime.benchmarks.synthetic.model_shapes import (
    BF16_BYTES,
    QWEN3_30B_BF16,
    SHAPES,
    SMALL_STD,
    WEIGHT_STD,
    ModelShape,
    Qwen3Shape,
    TensorPlan,
)
from moe_runtime.files import check_output_path
from moe_runtime.kernels.expert_mlp import ExpertWeights, expert_ffn
from moe_runtime.kernels.native import native_library

DEVICE_SHAPES: dict[str, ModelShape] = {
    shape.name: shape for shape in (SHAPES["olmoe-1b-7b"], QWEN3_30B_BF16)
}
TINY = Qwen3Shape(
    name="tiny",
    num_layers=2,
    num_experts=8,
    top_k=2,
    model_width=64,
    expert_width=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    vocab_size=320,
    shard_bytes=10**6,
)
MEMORY_FOLDER = Path("/dev/shm")


def shape_of(name: str, num_layers: int, *, is_tiny: bool) -> ModelShape:
    """The shape of a name with fewer layers, or the one of a rehearsal."""
    return TINY if is_tiny else replace(DEVICE_SHAPES[name], num_layers=num_layers)


def active_bytes(shape: ModelShape) -> int:
    """Bytes of the weights that a decoded token reads: of the embeddings its row alone."""
    experts = shape.num_layers * shape.top_k * shape.expert_bytes
    rows_not_read = (shape.vocab_size - 1) * shape.model_width * BF16_BYTES
    return experts + shape.dense_bytes - rows_not_read


@contextlib.contextmanager
def drawn_checkpoint(shape: ModelShape, device: str) -> Iterator[Path]:
    """The checkpoint's folder, in memory where it fits twice; all beside it is removed, too."""
    place = MEMORY_FOLDER
    if not place.is_dir() or shutil.disk_usage(place).free < 2 * shape.total_bytes:
        place = Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix="moe-benchmark-", dir=place) as folder:
        write_checkpoint(shape, Path(folder, "model"), make=_drawn_on(device))
        yield Path(folder, "model")


def _drawn_on(device: str) -> Any:
    """Draws weights one after another on a device: a function of their order, too."""
    generator = torch.Generator(device).manual_seed(0)

    def make(plan: TensorPlan, seed: int) -> list[Any]:
        del seed
        values = torch.ones(plan.shape, dtype=torch.bfloat16, device=device)
        if plan.std is not None:
            std = WEIGHT_STD if plan.std == SMALL_STD else plan.std
            values.normal_(std=std, generator=generator)
        return [values.cpu().view(torch.uint16).numpy()]

    return make


CPU_EXPERTS = 30
"""Enough to lie in memory, not in a cache."""


class Rates(NamedTuple):
    """Bytes a second of a copy within the device, read and written bytes both counted; of a copy
    from pinned memory to the device, None on a CPU; and seconds of an expert with one row on the
    CPU, as kernels compute it here, and with other threads: torch's or their own, so many."""

    copy_bytes_s: float
    link_bytes_s: float | None
    cpu_expert_s: float
    cpu_expert_s_by_threads: dict[str, float]


def measure_rates(shape: ModelShape, device: str, num_bytes: int) -> Rates:
    """Measures with tensors of `num_bytes`, and with experts of the shape."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), device)
    link_s = None
    if device == "cuda":
        pinned = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        link_s = median_s(lambda: target.copy_(pinned, non_blocking=True), device)
    cpu_expert_s, by_threads = _cpu_expert_s(shape)
    return Rates(
        copy_bytes_s=2 * num_bytes / copy_s,
        link_bytes_s=None if link_s is None else num_bytes / link_s,
        cpu_expert_s=cpu_expert_s,
        cpu_expert_s_by_threads=by_threads,
    )


def _cpu_expert_s(shape: ModelShape) -> tuple[float, dict[str, float]]:
    width, hidden = shape.model_width, shape.expert_width

    def matrix(rows: int, cols: int) -> torch.Tensor:
        return torch.full((rows, cols), 0.01, dtype=torch.bfloat16)

    experts = [
        ExpertWeights(matrix(hidden, width), matrix(hidden, width), matrix(width, hidden))
        for _ in range(CPU_EXPERTS)
    ]
    x_TD = torch.ones(1, width, dtype=torch.bfloat16)
    y_TD = torch.empty_like(x_TD)

    def median() -> float:
        seconds = []
        for expert in experts:
            begun_s = time.perf_counter()
            expert_ffn(x_TD, [expert], [1], [0], [0], y_TD, activation="silu")
            seconds.append(time.perf_counter() - begun_s)
        return statistics.median(seconds)

    library, most = native_library(), torch.get_num_threads()
    found = median()
    if library is None or library.num_threads != most:
        return found, {}
    by_threads = {}
    for number in sorted({1, most // 4, most // 2, most - 1, most} - {0}):
        library.set_num_threads(number)
        for owner in ("torch's", "own"):
            torch.set_num_threads(number if owner == "torch's" else 1)
            if library.shares_threads() == (owner == "torch's"):
                by_threads[f"{number} {owner}"] = median()
    library.set_num_threads(most)
    torch.set_num_threads(most)
    return found, by_threads


def median_s(call: Callable[[], Any], device: str, repeats: int = 5) -> float:
    """Median seconds of a call after one that is not counted, the device's work included."""
    seconds = []
    for _ in range(repeats + 1):
        wait_for(device)
        begun_s = time.perf_counter()
        call()
        wait_for(device)
        seconds.append(time.perf_counter() - begun_s)
    return statistics.median(seconds[1:])


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


Repetitions = list[dict[str, float]]


def add_options(parser: argparse.ArgumentParser, file: str) -> None:
    """Options of every script; a file of this name is written with `--save`."""
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, as a rehearsal")
    parser.add_argument("--save", action="store_true", help=f"write benchmarks/results/{file}-GPU")
    parser.add_argument("--out", type=Path, help="write the results here")


def lacks_gpu(options: argparse.Namespace) -> bool:
    """Whether a GPU is asked for and there is none, which is said."""
    is_lacking = options.device == "cuda" and not torch.cuda.is_available()
    if is_lacking:
        print("no GPU here; rehearse with --device cpu --tiny", file=sys.stderr)
    return is_lacking


class GpuResults:
    """A results file that is written after each row: what was measured stays if another fails."""

    def __init__(
        self,
        kind: str,
        file: str,
        options: argparse.Namespace,
        settings: Mapping[str, Any],
        metrics: Mapping[str, Metric],
    ) -> None:
        gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
        self.settings = {"gpu": gpu, **settings, "aims": dict[str, Any]()}
        self.systems = dict[str, Repetitions | str]()
        self.qualities = dict[str, Mapping[str, int]]()
        self._kind, self._metrics, self._path = kind, metrics, options.out
        if options.save:
            name = re.sub(r"[^a-z0-9]+", "-", (gpu or "rehearsal").lower()).strip("-")
            self._path = RESULTS / f"{file}-{name}.json"
        if self._path is not None:
            check_output_path(self._path, "results")
        self._ended = "interrupted"

    def add(self, name: str, found: Sequence[Mapping[str, float | None]] | str) -> None:
        """Takes a row, and writes the file; of what is None there was nothing to measure."""
        if not isinstance(found, str):
            found = [{key: v for key, v in one.items() if v is not None} for one in found]
        self.systems[name] = found
        self.write()

    def value(self, name: str, metric: str) -> float | None:
        """The median over a row's repetitions; None where it has none."""
        found = self.systems.get(name, "")
        values = (
            [] if isinstance(found, str) else MeasuredSystem(repetitions=[*found]).values(metric)
        )
        return middle(values) if values else None

    def aim(
        self, what: str, field: str, asked: float, measured: float, *, at_most: bool = False
    ) -> None:
        """Notes what is aimed at beside what was measured."""
        holds = measured <= asked if at_most else measured >= asked
        self.settings["aims"][f"{what}: {field}"] = {
            "sign": "<=" if at_most else ">=",
            "asked": asked,
            "measured": measured,
            "holds": holds,
        }

    def write(self) -> None:
        if self._path is not None:
            write_systems(
                self._path,
                self._kind,
                self.settings,
                self.systems,
                self._metrics,
                self.qualities,
                ended=self._ended,
            )

    def finish(self) -> None:
        """Writes that nothing is missing, and says what is aimed at beside what was measured."""
        self._ended = "most"
        self.write()
        print("\n".join(self.aim_lines()))

    def aim_lines(self) -> Iterator[str]:
        for what, aim in self.settings["aims"].items():
            verdict = "holds" if aim["holds"] else "MISSED"
            yield (
                f"{what:62} {aim['sign']} {aim['asked']:<12.6g} {aim['measured']:<12.6g} {verdict}"
            )


MEMORY = ("budget_bytes", "peak_bytes", "peak_reserved_bytes")


class Prompts(NamedTuple):
    """What is asked: several short prompts `[N, T]`, and a long one `[1, T]`."""

    short_NT: Tensor
    long_1T: Tensor


class Answer(NamedTuple):
    """Greedy tokens `[N]` and the logits `[N, V]` that they were taken from."""

    tokens_N: Tensor
    logits_NV: Tensor


class TokenClock(BaseStreamer):
    """Knows when `generate` had its first and its last new token, on the host."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._is_prompt = True
        self.num_tokens = 0
        self.first_s = self.last_s = 0.0

    def put(self, value: Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self.num_tokens += 1
        if self.num_tokens == 1:
            self._on_first()
            self.first_s = time.perf_counter()
        self.last_s = time.perf_counter()

    def end(self) -> None:
        """Nothing is held back."""

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens after the first."""
        return (self.num_tokens - 1) / (self.last_s - self.first_s)


def prepare_generation(model: Any) -> None:
    """Texts have no end."""
    model.generation_config.eos_token_id = None


def answer_of(model: Any, prompt_T: Tensor, num_tokens: int, **options: Any) -> Answer:
    """What a model says, and why; also a warm-up."""
    found = model.generate(
        prompt_T[None], max_new_tokens=num_tokens, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return Answer(found.sequences[0, len(prompt_T) :], torch.cat(found.logits))


def decode(model: Any, prompts: Prompts, num_tokens: int, **options: Any) -> Repetitions:
    """Tokens a second after the first token, for each prompt but the first."""
    runtime, found = getattr(model, "moe", None), Repetitions()
    for prompt_T in prompts.short_NT[1:]:
        clock = TokenClock(runtime.reset_stats if runtime else lambda: None)
        model.generate(
            prompt_T[None], max_new_tokens=num_tokens, do_sample=False, streamer=clock, **options
        )
        assert clock.num_tokens == num_tokens, "an end was asked for"
        experts = _experts(runtime.stats(), num_tokens - 1) if runtime else {}
        found.append({"tokens_per_s": clock.tokens_per_s, **experts})
    return found


def _experts(stats: Any, tokens: int) -> dict[str, float]:
    """What became of the experts that layers asked for, in the mean of a token."""
    return {
        "hit_rate": stats.hits / (stats.hits + stats.late_hits + stats.misses),
        "missed_a_token": stats.misses / tokens,
        "computed_by_cpu_a_token": stats.computed_misses / tokens,
        "copied_bytes_a_token": stats.copied_bytes / tokens,
        "read_bytes_a_token": stats.bytes_read / tokens,
        "stall_s_a_token": stats.stall_s / tokens,
    }


def device_memory(plan: Any) -> dict[str, int]:
    """The budget of a GPU, and the most that tensors and torch have held there beside it."""
    if plan is None:
        return {}
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return dict(zip(MEMORY, (plan.budget_bytes, *peaks), strict=True))


def prefill_tokens_per_s(model: Any, prompts: Prompts, device: str, repeats: int) -> float:
    """Of the long prompt, by the median pass after one that is not counted."""

    @torch.inference_mode()
    def read() -> None:
        model(prompts.long_1T, use_cache=True, logits_to_keep=1)

    return prompts.long_1T.shape[1] / median_s(read, device, repeats)


def compare(answer: Answer, wanted: Answer) -> dict[str, Any]:
    """How far two systems say the same, and how much their logits differ until they do not."""
    num_equal, difference_NV = _differences(answer, wanted)
    largest = float(difference_NV.abs().max() / wanted.logits_NV.std())
    return {
        "equal_tokens": num_equal,
        "of_tokens": len(wanted.tokens_N),
        "is_bit_equal": torch.equal(answer.logits_NV, wanted.logits_NV),
        "largest_difference_in_deviations": largest,
    }


def error_of(answer: Answer, exact: Answer) -> float:
    """Root of the mean square of the logits' errors, in standard deviations of the logits."""
    _, difference_NV = _differences(answer, exact)
    return float(difference_NV.square().mean().sqrt() / exact.logits_NV.std())


def _differences(answer: Answer, wanted: Answer) -> tuple[int, Tensor]:
    """Tokens until the first other one, and logits where both had the same tokens before."""
    is_other_N = (answer.tokens_N != wanted.tokens_N).cpu()
    num_equal = int(is_other_N.int().argmax()) if is_other_N.any() else len(is_other_N)
    both = answer.logits_NV[: num_equal + 1], wanted.logits_NV[: num_equal + 1]
    return num_equal, both[0] - both[1]


@torch.inference_mode()
def exact_answer(model: Any, prompt_T: Tensor, answer: Answer) -> Answer:
    """The tokens of an answer with the logits of a model, all at once."""
    ids_T = torch.cat((prompt_T, answer.tokens_N[:-1]))
    found = model(ids_T[None], logits_to_keep=len(answer.tokens_N))
    return Answer(answer.tokens_N, found.logits[0].float())


def new_prompts(
    vocab_size: int, counts: tuple[int, int, int], device: str, seed: int = 1
) -> Prompts:
    """Random tokens, without those that models have for other purposes."""
    generator = torch.Generator().manual_seed(seed)
    number, short, long = counts
    short_NT = torch.randint(2, vocab_size, (number, short), generator=generator)
    long_1T = torch.randint(2, vocab_size, (1, long), generator=generator)
    found = Prompts(short_NT.to(device), long_1T.to(device))
    wait_for(device)
    return found


ROWS = 18


def profiled(title: str, call: Callable[[], Any], device: str) -> str:
    """Calls twice: with torch's profiler, and with Python's."""
    lines = [f"==== {title}"]
    activities, order = [ProfilerActivity.CPU], ["self_cpu_time_total"]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
        order.append("self_cuda_time_total")
    with profile(activities=activities) as found:
        call()
    averages = found.key_averages()
    for key in order:
        lines.append(averages.table(sort_by=key, row_limit=ROWS, max_name_column_width=60))
    python = cProfile.Profile()
    python.runcall(call)
    text = io.StringIO()
    pstats.Stats(python, stream=text).sort_stats("tottime").print_stats(ROWS * 2)
    return "\n".join([*lines, text.getvalue()])
