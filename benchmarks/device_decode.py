"""Decoding on a GPU: everything resident, and slots for a part of the experts, beside transformers.

`python benchmarks/device_decode.py --shape qwen3-30b-a3b --layers 4 --save` makes a checkpoint of
whole layers with random weights, measures the GPU, its link and the CPU, then greedy tokens a
second of one sequence: all experts on the GPU; slots for a half and a quarter of them and the rest
in pinned host memory, missing experts copied, computed by the CPU, or both (`load(misses=...)`);
and transformers with `grouped_mm` and with our kernels. Routing is even and no token comes again,
the worst case of a cache.

Each row also has the share of the copy bandwidth at which weights were read, the least time that
its misses could take, whether logits have the bits of the resident model, and how far they are from
fp32. `--device cpu --tiny` is a rehearsal without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from moe_runtime.benchmarks.harness.gpu import (
    DEVICE_SHAPES,
    MEMORY,
    Answer,
    GpuResults,
    Prompts,
    Rates,
    active_bytes,
    add_options,
    answer_of,
    compare,
    decode,
    device_memory,
    drawn_checkpoint,
    error_of,
    exact_answer,
    lacks_gpu,
    measure_rates,
    new_prompts,
    prefill_tokens_per_s,
    prepare_generation,
    profiled,
    shape_of,
)
from moe_runtime.benchmarks.harness.scripting import parser_of, positive, run_script
from moe_runtime.benchmarks.suite.results import Metric
from moe_runtime.benchmarks.synthetic.model_shapes import ModelShape
from moe_runtime.files import write_text

PEER, PEER_EXPERTS = "transformers", ("grouped_mm", "moe_runtime")
# Of a model that is all on the device experts only pass through the host's memory.
PASSING_EXPERTS = 32
PROFILED_TOKENS = 9
MOST_ERROR = 1.5
"""Of the largest error of transformers in bf16, at most, where logits differ by rounding alone."""
LATE = "no time was left"
MORE = ("computed_by_cpu_a_token", "same_bits", "read_of_copy", "of_bound", "hit_rate")
FACTS = {
    "s": ("load_s", "misses_bound_s", "stall_s_a_token"),
    "bytes": ("copied_bytes_a_token", "read_bytes_a_token", *MEMORY),
    "count": ("missed_a_token", "computed_by_cpu_a_token", "same_bits"),
    # The last two of logits, in their standard deviations.
    "share": ("read_of_copy", "of_bound", "hit_rate", "largest_difference", "error"),
}
METRICS = {
    **{name: Metric("tokens/s", "more") for name in ("tokens_per_s", "prefill_tokens_per_s")},
    **{
        name: Metric(unit, "more" if name in MORE else "less", is_judged=False)
        for unit, names in FACTS.items()
        for name in names
    },
}


def main() -> int:
    options, began_s = _arguments(), psutil.Process().create_time()
    if lacks_gpu(options):
        return 2
    import moe_runtime

    moe_runtime.register_with_transformers()
    shape = shape_of(options.shape, options.layers, is_tiny=options.tiny)
    counts = (options.repeats + 1, options.prompt_tokens, options.long_prompt)
    prompts = new_prompts(shape.vocab_size, counts, options.device)
    rates = measure_rates(shape, options.device, 2**20 if options.tiny else 2**29)
    settings = {
        "model": shape.name,
        "layers": shape.num_layers,
        "shape": shape.describe(),
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "long_prompt_tokens": options.long_prompt,
        "active_bytes_a_token": active_bytes(shape),
        "rates": rates._asdict(),
    }
    file = f"device-decode-{shape.name}"
    results = GpuResults("device-decode", file, options, settings, METRICS)
    print(f"copies {_gb(rates.copy_bytes_s)}, from the host {_gb(rates.link_bytes_s)}; ", end="")
    by_threads = {key: f"{1e3 * s:.3f}" for key, s in rates.cpu_expert_s_by_threads.items()}
    print(f"an expert on the CPU {1e3 * rates.cpu_expert_s:.3f} ms {by_threads}", flush=True)
    with drawn_checkpoint(shape, options.device) as folder:
        print(f"checkpoint after {time.time() - began_s:.1f} s", flush=True)
        measure(Bench(shape, folder, options, prompts, rates, results, began_s))
    results.finish()
    print(f"done after {time.time() - began_s:.1f} s")
    return 0


@dataclasses.dataclass(frozen=True)
class Bench:
    """What all rows have in common, and what earlier ones leave for later ones."""

    shape: ModelShape
    folder: Path
    options: argparse.Namespace
    prompts: Prompts
    rates: Rates
    results: GpuResults
    began_s: float
    answers: dict[str, Answer] = dataclasses.field(default_factory=dict)
    exact: list[Answer] = dataclasses.field(default_factory=list)
    profiles: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_late(self) -> bool:
        """Whether rows that are left would take longer than may be."""
        return time.time() - self.began_s > self.options.seconds

    def add(self, name: str, found: Any) -> None:
        self.results.add(name, found)
        since_s = time.time() - self.began_s
        print(f"{since_s:5.1f} s  {decode_line(self.results, name)}", flush=True)

    def row(
        self, name: str, model: Any, cache: str, load_s: float, misses: str | None = None
    ) -> None:
        """Measures a model with a kind of cache; `misses` where experts may be missing."""
        options, generation = self.options, {"cache_implementation": cache}
        prompts, first = self.prompts, {"load_s": load_s}
        try:
            first["prefill_tokens_per_s"] = prefill_tokens_per_s(
                model, prompts, options.device, options.repeats
            )
            answer = answer_of(model, prompts.short_NT[0], options.new_tokens, **generation)
            found = decode(model, prompts, options.new_tokens, **generation)
        except RuntimeError as error:  # memory, what compiles, a cache that does not work here
            self.add(name, f"{type(error).__name__}: {error}".splitlines()[0][:300])
            return
        if hasattr(model, "moe"):
            first |= device_memory(model.moe.facts.device_plan)
        for wanted in [*self.answers.values()][:1]:
            beside = compare(answer, wanted)
            first["same_bits"] = int(beside["is_bit_equal"])
            first["largest_difference"] = beside["largest_difference_in_deviations"]
            compared = {"compared": beside["of_tokens"], "equal": beside["equal_tokens"]}
            self.results.qualities[name] = compared
        self.answers[name] = answer
        for one in found:
            one["read_of_copy"] = (
                one["tokens_per_s"] * active_bytes(self.shape) / self.rates.copy_bytes_s
            )
            if misses is not None:
                one |= self._bound(one, misses)
        found[0] |= first
        self.add(name, found)
        self.judge(name)
        if options.profile is not None and not self.is_late:

            def generate() -> None:
                one = prompts.short_NT[:1]
                model.generate(one, max_new_tokens=PROFILED_TOKENS, do_sample=False, **generation)

            self.profiles.append(profiled(name, generate, options.device))
            write_text(options.profile, "\n".join(self.profiles) + "\n")

    def _bound(self, one: dict[str, Any], misses: str) -> dict[str, float]:
        """The least that a token could take where these misses are treated so, and its share."""
        missed = one["missed_a_token"]
        cpu_s, link_s = missed * self.rates.cpu_expert_s, 0.0
        if self.rates.link_bytes_s is not None:
            link_s = missed * self.shape.expert_bytes / self.rates.link_bytes_s
        together_s = cpu_s * link_s / (cpu_s + link_s) if link_s else 0.0
        least_s = {"device": link_s, "cpu": cpu_s, "auto": together_s}[misses]
        resident = self.results.value(next(iter(self.answers)), "tokens_per_s")
        assert resident is not None
        return {
            "misses_bound_s": least_s,
            "of_bound": max(least_s, 1 / resident) * one["tokens_per_s"],
        }

    def judge(self, *names: str) -> None:
        """Notes how far logits of rows are from those in fp32, where these are there: ours must be
        as near as transformers'."""
        if not self.exact:
            return
        for name in names:
            error = error_of(self.answers[name], self.exact[0])
            self.results.systems[name][0]["error"] = error  # type: ignore[index]
        peers = [name for name in self.answers if name.startswith(PEER)]
        most = MOST_ERROR * max(self.results.value(name, "error") or 0.0 for name in peers)
        for name in names:
            if name not in peers:
                error = self.results.value(name, "error") or 0.0
                self.results.aim(name, "error", most, error, at_most=True)
        self.results.write()


def measure(bench: Bench) -> None:
    """All rows, those that are wanted most first."""
    options, ours = bench.options, Ours(bench)
    ours.rows(1.0, "device", caches=options.caches)
    ways = ("device", "auto", "cpu") if options.device == "cuda" else ("device",)
    first, *others = options.shares
    for misses in ways:
        ours.rows(first, misses)
        if misses == "device" and options.device == "cuda":
            ours.rows(first, misses, options.host_share)
    peers(bench)
    for share, misses in itertools.product(others, ways):
        ours.rows(share, misses)


class Ours:
    """Rows of this runtime."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._plan: Any = None
        self._host_slot_bytes = 0

    def rows(
        self, share: float, misses: str, host_share: float = 1.0, caches: Sequence[str] = ()
    ) -> None:
        """With slots for a share of the experts, and others in the host's memory."""
        ram = "" if host_share == 1.0 else f", RAM for {host_share:.0%}"
        name = f"moe_runtime, {share:.0%} resident, misses {misses}{ram}"
        caches = caches or self._bench.options.caches[:1]
        if share < 1.0 and self._bench.is_late:
            self._bench.add(f"{name}, {caches[0]} cache", LATE)
            return
        model = self._load(share, misses, host_share)
        for cache in caches:
            load_s, missing = model.moe.facts.load_s, misses if share < 1.0 else None
            self._bench.row(f"{name}, {cache} cache", model, cache, load_s, missing)
        model.moe.close()
        del model
        _free()

    def _load(self, share: float, misses: str, host_share: float) -> Any:
        import moe_runtime

        bench, device = self._bench, self._bench.options.device
        num_experts = bench.shape.num_layers * bench.shape.num_experts
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
            budgets = {"host_memory": PASSING_EXPERTS * 2 * bench.shape.expert_bytes}
        model: Any = moe_runtime.load(bench.folder, device=device, warm_up=True, **budgets)
        facts = model.moe.facts
        if self._plan is None:
            self._plan = facts.device_plan or facts.host_plan
            self._host_slot_bytes = facts.host_plan.slot_bytes
        slots = (facts.device_plan or facts.host_plan).num_slots
        assert slots == num_slots, f"{num_slots} slots were asked for, there are {slots}"
        prepare_generation(model)
        return model


def peers(bench: Bench) -> None:
    """Rows of transformers, everything resident, and how far all are from logits in fp32."""
    from transformers import AutoModelForCausalLM

    options = bench.options
    if bench.is_late:
        bench.add(PEER, LATE)
        return
    begun_s = time.perf_counter()
    model: Any = AutoModelForCausalLM.from_pretrained(
        bench.folder, dtype=torch.bfloat16, device_map=options.device
    )
    model.eval()
    prepare_generation(model)
    load_s, resident = time.perf_counter() - begun_s, [*bench.answers.values()][:1]
    caches = ("dynamic", "static") if options.compile_peer else ("dynamic",)
    for kind, cache in itertools.product(PEER_EXPERTS, caches):
        name = f"{PEER}, {kind}, {cache} cache"
        if bench.is_late:
            bench.add(name, LATE)
            continue
        model.set_experts_implementation(kind)
        bench.row(name, model, cache, load_s)
    answers = bench.answers
    if resident and not bench.is_late and any(name.startswith(PEER) for name in answers):
        model.set_experts_implementation("eager")
        bench.exact.append(exact_answer(model.float(), bench.prompts.short_NT[0], resident[0]))
        bench.judge(*answers)
    del model
    _free()


def _free() -> None:
    """Frees the memory of a model that is gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _gb(bytes_s: float | None) -> str:
    return "-" if bytes_s is None else f"{bytes_s / 1e9:.1f} GB/s"


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_options(parser, "device-decode-SHAPE")
    add("--shape", default="olmoe-1b-7b", choices=DEVICE_SHAPES)
    add("--layers", type=positive, default=4, help="(default: %(default)s)")
    add("--caches", nargs="+", default=["dynamic"], choices=("dynamic", "static"), help="of ours")
    add("--compile-peer", action="store_true", help="transformers with a static cache too")
    add("--shares", nargs="+", type=float, default=[0.5, 0.25], help="of experts with slots")
    add("--host-share", type=float, default=0.6, help="in RAM beside the first of the shares")
    add("--repeats", type=positive, default=3, help="prompts (default: %(default)s)")
    add("--prompt-tokens", type=positive, default=32, help="(default: %(default)s)")
    add("--new-tokens", type=positive, default=64, help="(default: %(default)s)")
    add("--long-prompt", type=positive, default=2048, help="(default: %(default)s)")
    add("--seconds", type=float, default=50.0, help="after them no row begins")
    add("--profile", type=Path, metavar="FILE", help="write where the time of 9 tokens goes")
    return parser.parse_args()


def decode_line(results: GpuResults, name: str) -> str:
    if isinstance(found := results.systems[name], str):
        return f"{name}: {found}"

    def value(metric: str) -> float:
        return results.value(name, metric) or 0.0

    text = (
        f"{name}: {value('tokens_per_s'):.1f} tokens/s, reads {value('read_of_copy'):.0%} of copy"
    )
    if "prefill_tokens_per_s" in found[0]:
        text += f", prompt {value('prefill_tokens_per_s'):,.0f} tokens/s"
    if "hit_rate" in found[0]:
        text += f", hits {value('hit_rate'):.0%}"
    if value("read_bytes_a_token"):
        text += f", {value('read_bytes_a_token') / 1e6:.1f} MB a token from files"
    if "of_bound" in found[0]:
        text += f", {value('of_bound'):.0%} of the bound"
    if name in results.qualities:
        same = "same bits as" if found[0]["same_bits"] else "other bits than"
        equal, compared = (results.qualities[name][what] for what in ("equal", "compared"))
        text += f", {same} resident ({equal} of {compared} tokens)"
    return text


if __name__ == "__main__":
    sys.exit(run_script(main))
