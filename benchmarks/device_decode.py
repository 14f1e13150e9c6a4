"""Decode on a GPU with all or some of the experts resident, and compare with transformers.

`python benchmarks/device_decode.py --shape qwen3-30b-a3b --layers 4 --save` makes a checkpoint of
whole layers with random weights, measures the GPU, its link and the CPU, then greedy tokens a
second of one sequence: all experts on the GPU; slots for a half and a quarter of them and the rest
in pinned host memory, missing experts copied, or some computed by the CPU (`load(misses=...)`);
and transformers with `grouped_mm` and with our kernels. Routing is even and no token comes again,
the worst case of a cache.

Each row also has the share of the copy bandwidth at which weights were read, the least time that
its misses could take, whether logits have the bits of the resident model, and how far they are from
fp32. `--device cpu --tiny` is a rehearsal without a GPU.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

import moe_runtime
from moe_runtime.benchmarks.harness import gpu
from moe_runtime.benchmarks.harness.scripting import chosen, option
from moe_runtime.benchmarks.suite import Metric, facts
from moe_runtime.benchmarks.synthetic.model_shapes import BF16_BYTES, ModelShape

PEER, PEER_EXPERTS = "transformers", ("grouped_mm", "moe_runtime")
# If all experts are on the device, they only pass through host memory.
PASSING_EXPERTS = 32
MOST_ERROR = 1.5
"""Largest error relative to that of transformers in bf16, for logits that differ by rounding alone.
"""
LATE = "no time was left"
COSTS = ("miss_cpu_s", "miss_copy_s", "miss_return_s", "miss_launch_s")
WAYS = ("resident_steps", "fetched_steps", "cut_steps")
RECORDED = ("recorded_bytes", "recorded_reserve_bytes")
METRICS = {
    **{name: Metric("tokens/s", "more") for name in ("tokens_per_s", "prefill_tokens_per_s")},
    **facts("s", "load_s", "misses_bound_s", "stall_s_a_token", *COSTS),
    **facts("count", *WAYS),
    **facts("bytes", "copied_bytes_a_token", "read_bytes_a_token", *gpu.MEMORY, *RECORDED),
    **facts("count", "missed_a_token"),
    **facts("count", "computed_by_cpu_a_token", "same_bits", better="more"),
    **facts("share", "read_of_copy", "of_bound", "hit_rate", better="more"),
    # of logits, in their standard deviations
    **facts("share", "largest_difference", "error"),
}


class Answer(NamedTuple):
    """Greedy tokens `[N]` and the logits `[N, V]` behind them."""

    tokens_N: Tensor
    logits_NV: Tensor


@gpu.gpu_script(
    shape=option("olmoe-1b-7b", choices=("olmoe-1b-7b", "qwen3-30b-a3b")),
    layers=4,
    caches=option(["dynamic"], "of ours", nargs="+", choices=("dynamic", "static")),
    shares=option([0.5, 0.25], "of experts with slots", nargs="+", type=float),
    host_share=option(0.6, "in RAM beside the first of the shares"),
    repeats=option(3, "prompts"),
    prompt_tokens=32,
    new_tokens=64,
    long_prompt=2048,
    seconds=option(50.0, "after them no row begins"),
)
def main(options: argparse.Namespace) -> int:
    moe_runtime.register_with_transformers()
    shape = gpu.shape_of(options.shape, options.layers, is_tiny=options.tiny)
    rates = gpu.measure_rates(shape, options.device, 2**20 if options.tiny else 2**29)
    settings = {
        "model": shape.name,
        "layers": shape.num_layers,
        "shape": shape.describe(),
        **chosen(options, "prompt_tokens", "new_tokens"),
        "long_prompt_tokens": options.long_prompt,
        "active_bytes_a_token": active_bytes(shape),
        "rates": rates._asdict(),
    }
    file = f"device-decode-{shape.name}"
    results = gpu.GpuResults("device-decode", file, options, settings, METRICS)
    print(rates, flush=True)
    with gpu.drawn_checkpoint(shape, options.device) as folder:
        measure(Bench(shape, folder, options, rates, results))
    return results.finish()


def active_bytes(shape: ModelShape) -> int:
    """Bytes of the weights that a decoded token reads; of the embeddings only its row."""
    experts = shape.num_layers * shape.top_k * shape.expert_bytes
    rows_not_read = (shape.vocab_size - 1) * shape.model_width * BF16_BYTES
    return experts + shape.dense_bytes - rows_not_read


class Bench:
    """The state that all rows share."""

    def __init__(
        self,
        shape: ModelShape,
        folder: Path,
        options: argparse.Namespace,
        rates: gpu.Rates,
        results: gpu.GpuResults,
    ) -> None:
        self.shape, self.folder, self.options, self.results = shape, folder, options, results
        self._rates, self._plan, self._host_slot_bytes = rates, None, 0
        self._began_s = psutil.Process().create_time()
        self.answers = dict[str, Answer]()
        self.exact: Answer | None = None
        # random tokens, without special ones
        generator = torch.Generator().manual_seed(1)
        self.short_NT, self.long_1T = (
            torch.randint(2, shape.vocab_size, size, generator=generator).to(options.device)
            for size in ((options.repeats + 1, options.prompt_tokens), (1, options.long_prompt))
        )

    def is_late(self, name: str) -> bool:
        """Whether this row would exceed the time limit, which is then recorded."""
        if late := time.time() - self._began_s > self.options.seconds:
            self.results.add(name, LATE)
        return late

    def ours(self, share: float, misses: str, host_share: float = 1.0) -> None:
        """Rows with slots for a share of the experts, and the others in host memory."""
        ram = "" if host_share == 1.0 else f", RAM for {host_share:.0%}"
        name = f"moe_runtime, {share:.0%} resident, misses {misses}{ram}"
        caches = self.options.caches[: None if share == 1.0 else 1]
        if share < 1.0 and self.is_late(f"{name}, {caches[0]} cache"):
            return
        model = self._load(share, misses, host_share)
        for cache in caches:
            missing = misses if share < 1.0 else None
            self.row(f"{name}, {cache} cache", model, cache, model.moe.facts.load_s, missing)
        model.moe.close()
        del model
        gpu.free_memory()

    def _load(self, share: float, misses: str, host_share: float) -> Any:
        device = self.options.device
        num_experts = self.shape.num_layers * self.shape.num_experts
        num_slots = round(share * num_experts)
        budgets: dict[str, Any] = {}
        if self._plan is not None:
            around = self._plan.dense_bytes + self._plan.reserve_bytes
            budget = around + num_slots * self._plan.slot_bytes
            budgets = {"host_memory": budget}
            if device == "cuda":
                host = round(host_share * num_experts) * self._host_slot_bytes
                budgets = {"host_memory": host, "device_memory": budget, "misses": misses}
        elif device == "cuda":
            budgets = {"host_memory": PASSING_EXPERTS * 2 * self.shape.expert_bytes}
        asked = self.options
        # otherwise a budget decides the tokens, and so the slots
        budgets["max_tokens"] = max(asked.long_prompt, asked.prompt_tokens + asked.new_tokens)
        model: Any = moe_runtime.load(self.folder, device=device, warm_up=True, **budgets)
        facts = model.moe.facts
        plan = facts.device_plan or facts.host_plan
        if self._plan is None:
            self._plan, self._host_slot_bytes = plan, facts.host_plan.slot_bytes
        assert plan.num_slots == num_slots, f"asked for {num_slots} slots, got {plan.num_slots}"
        model.generation_config.eos_token_id = None
        return model

    def row(self, name: str, model: Any, cache: str, load_s: float, misses: str | None) -> None:
        """Measure a model with one kind of cache; `misses` if experts may be missing."""
        options, generation = self.options, {"cache_implementation": cache}
        generation |= {"max_new_tokens": options.new_tokens, "do_sample": False}
        first = {"load_s": load_s}

        @torch.inference_mode()
        def read() -> None:
            model(self.long_1T, use_cache=True, logits_to_keep=1)

        try:
            prompt_s = gpu.median_s(read, options.device, options.repeats)
            answer = answer_of(model, self.short_NT[0], **generation)
            found = decode(model, self.short_NT[1:], options.new_tokens, **generation)
        except RuntimeError as error:  # memory, compilation, or an unsupported cache
            self.results.add(name, f"{type(error).__name__}: {error}".splitlines()[0][:300])
            return
        first["prefill_tokens_per_s"] = options.long_prompt / prompt_s
        if hasattr(model, "moe"):
            first |= gpu.device_memory(model.moe.facts.device_plan)
        for wanted in [*self.answers.values()][:1]:
            beside, self.results.qualities[name] = compare(answer, wanted)
            first |= beside
        self.answers[name] = answer
        for one in found:
            read_bytes_s = one["tokens_per_s"] * active_bytes(self.shape)
            one["read_of_copy"] = read_bytes_s / self._rates.copy_bytes_s
            if misses is not None:
                one |= self._bound(one, misses)
        found[0] |= first
        self.results.add(name, found)
        self.judge(name)

    def _bound(self, one: dict[str, Any], misses: str) -> dict[str, float]:
        """The least time of a token with these misses, and the measured share of it."""
        missed, rates = one["missed_a_token"], self._rates
        cpu_s, link_s = missed * rates.cpu_expert_s, 0.0
        if rates.link_bytes_s is not None:
            link_s = missed * self.shape.expert_bytes / rates.link_bytes_s
        together_s = cpu_s * link_s / (cpu_s + link_s) if link_s else 0.0
        least_s = {"device": link_s, "auto": together_s}[misses]
        resident = self.results.value(next(iter(self.answers)), "tokens_per_s")
        assert resident is not None
        share = max(least_s, 1 / resident) * one["tokens_per_s"]
        return {"misses_bound_s": least_s, "of_bound": share}

    def judge(self, *names: str) -> None:
        """Record how far logits are from fp32 logits, if present. Ours must be as close as
        transformers'."""
        if self.exact is None:
            return
        for name in names:
            error = error_of(self.answers[name], self.exact)
            self.results.systems[name][0]["error"] = error  # type: ignore[index]
        peers = [name for name in self.answers if name.startswith(PEER)]
        most = MOST_ERROR * max(self.results.value(name, "error") or 0.0 for name in peers)
        for name in names:
            if name not in peers:
                error = self.results.value(name, "error") or 0.0
                self.results.aim(name, "error", most, error, at_most=True)
        self.results.write()


def measure(bench: Bench) -> None:
    """All rows, the most important first."""
    options, on_gpu = bench.options, bench.options.device == "cuda"
    bench.ours(1.0, "device")
    ways = ("device", "auto") if on_gpu else ("device",)
    first, *others = options.shares
    for misses in ways:
        bench.ours(first, misses)
        if misses == "device" and on_gpu:
            bench.ours(first, misses, options.host_share)
    peers(bench)
    for share, misses in itertools.product(others, ways):
        bench.ours(share, misses)


def peers(bench: Bench) -> None:
    """Rows of transformers with everything resident, and the distance of all logits from fp32."""
    from transformers import AutoModelForCausalLM

    if bench.is_late(PEER):
        return
    begun_s = time.perf_counter()
    model: Any = AutoModelForCausalLM.from_pretrained(
        bench.folder, dtype=torch.bfloat16, device_map=bench.options.device
    )
    model.eval().generation_config.eos_token_id = None
    load_s, answers = time.perf_counter() - begun_s, bench.answers
    resident = [*answers.values()][:1]
    for kind in PEER_EXPERTS:
        name = f"{PEER}, {kind}, dynamic cache"
        if not bench.is_late(name):
            model.set_experts_implementation(kind)
            bench.row(name, model, "dynamic", load_s, None)
    if resident and any(name.startswith(PEER) for name in answers):
        model.set_experts_implementation("eager")
        bench.exact = exact_answer(model.float(), bench.short_NT[0], resident[0])
        bench.judge(*answers)
    del model
    gpu.free_memory()


class TokenClock(BaseStreamer):
    """Host times of the first and the last new token of `generate`."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._times_s: list[float] | None = None

    def put(self, value: Tensor) -> None:
        if self._times_s is None:  # the prompt
            self._times_s = []
            return
        if not self._times_s:
            self._on_first()
        self._times_s.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is buffered."""

    def tokens_per_s(self, num_tokens: int) -> float:
        """Speed after the first token."""
        times_s = self._times_s or []
        assert len(times_s) == num_tokens, "an end was asked for"
        return (num_tokens - 1) / (times_s[-1] - times_s[0])


def answer_of(model: Any, prompt_T: Tensor, **options: Any) -> Answer:
    """A model's tokens and logits; also a warm-up."""
    told = {"output_logits": True, "return_dict_in_generate": True}
    found = model.generate(prompt_T[None], **told, **options)
    return Answer(found.sequences[0, len(prompt_T) :], torch.cat(found.logits))


def decode(model: Any, prompts_NT: Tensor, num_tokens: int, **options: Any) -> gpu.Repetitions:
    """Tokens per second after the first token, for each prompt."""
    runtime, found = getattr(model, "moe", None), gpu.Repetitions()
    for prompt_T in prompts_NT:
        clock = TokenClock(runtime.reset_stats if runtime else lambda: None)
        model.generate(prompt_T[None], streamer=clock, **options)
        experts = _experts(runtime.stats(), num_tokens - 1) if runtime else {}
        found.append({"tokens_per_s": clock.tokens_per_s(num_tokens), **experts})
    return found


def _experts(stats: Any, tokens: int) -> dict[str, float]:
    """The mean outcome of the experts that a token's layers asked for."""
    return {
        "hit_rate": stats.hits / (stats.hits + stats.late_hits + stats.misses),
        "missed_a_token": stats.misses / tokens,
        "computed_by_cpu_a_token": stats.computed_misses / tokens,
        "copied_bytes_a_token": stats.copied_bytes / tokens,
        "read_bytes_a_token": stats.bytes_read / tokens,
        "stall_s_a_token": stats.stall_s / tokens,
        **{name: getattr(stats, name) for name in (*COSTS, *WAYS, *RECORDED)},
    }


def compare(answer: Answer, wanted: Answer) -> tuple[dict[str, float], dict[str, int]]:
    """How much the logits of two systems differ before their tokens do, and where that is."""
    equal, difference_NV = _differences(answer, wanted)
    largest = float(difference_NV.abs().max() / wanted.logits_NV.std())
    same = int(torch.equal(answer.logits_NV, wanted.logits_NV))
    counts = {"compared": len(wanted.tokens_N), "equal": equal}
    return {"same_bits": same, "largest_difference": largest}, counts


def error_of(answer: Answer, exact: Answer) -> float:
    """Root mean square of the logits' errors, in standard deviations of the logits."""
    _, difference_NV = _differences(answer, exact)
    return float(difference_NV.square().mean().sqrt() / exact.logits_NV.std())


def _differences(answer: Answer, wanted: Answer) -> tuple[int, Tensor]:
    """Tokens before the first difference, and logits with equal context."""
    is_other_N = (answer.tokens_N != wanted.tokens_N).cpu()
    num_equal = int(is_other_N.int().argmax()) if is_other_N.any() else len(is_other_N)
    return num_equal, (answer.logits_NV - wanted.logits_NV)[: num_equal + 1]


@torch.inference_mode()
def exact_answer(model: Any, prompt_T: Tensor, answer: Answer) -> Answer:
    """An answer's tokens with the logits of a model, in one pass."""
    ids_T = torch.cat((prompt_T, answer.tokens_N[:-1]))
    found = model(ids_T[None], logits_to_keep=len(answer.tokens_N))
    return Answer(answer.tokens_N, found.logits[0].float())


if __name__ == "__main__":
    sys.exit(main())
