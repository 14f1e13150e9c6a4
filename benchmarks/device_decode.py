"""Decoding on a GPU: everything resident, and slots for a part of the experts, beside transformers.

One command: `python benchmarks/device_decode.py --shape qwen3-30b-a3b --layers 4 --save`. Makes a
checkpoint of whole layers of a published shape with random weights, measures what the GPU, its link
and the CPU can do, and then greedy tokens a second of one sequence, in medians over prompts: ours
with all experts on the GPU; with slots for a half and for a quarter of them and the rest in locked
host memory, missing experts copied, computed by the CPU, or both (`load(misses=...)`); and
transformers with its implementations of experts, which decodes by `batched_mm` where `grouped_mm`
is asked for, and with our kernels as one more. Routing is even and no token comes again, the worst
case of a cache: its hit rate is about the share of the experts that has slots.

Beside each: the bytes of the weights that a token reads, as a share of what a copy moves; for a
part of the experts what the link, the CPU or both would take for the misses that were counted, or
the rest of the model if that is more; whether logits have the bits of the resident model; and how
far they are from those of the same weights in fp32, which must be as near as transformers' are. One
row has RAM for a part of the experts alone, which both tiers together can hold: what is read from
files a token tells whether they do. Reading a long prompt is timed apart. `--device cpu --tiny` is
a rehearsal without a GPU: there the host's memory takes the part of the experts, and nobody
computes for anybody else.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from gpu_parts.device_decoding import (
    Answer,
    Prompts,
    answer_of,
    compare,
    decode,
    error_of,
    exact_answer,
    new_prompts,
    prefill_tokens_per_s,
    prepare_generation,
)
from gpu_parts.device_lines import decode_line
from gpu_parts.device_rates import Rates, measure_rates
from harness.arguments import positive
from harness.drawn_checkpoints import DEVICE_SHAPES, active_bytes, drawn_checkpoint, shape_of
from harness.machine import run_facts
from harness.profiled import profiled

from moe_runtime.bench.synthetic.model_shapes import ModelShape
from moe_runtime.files import write_text

ROOT = Path(__file__).resolve().parents[1]
PEER_EXPERTS = ("grouped_mm", "batched_mm", "moe_runtime")
# Copies the weights of every choice, which a long prompt has no memory for.
DECODES_ALONE = "batched_mm"
# Of a model that is all on the device experts only pass through the host's memory.
PASSING_EXPERTS = 32
PROFILED_TOKENS = 9
PROFILED_PEERS = ("grouped_mm", "moe_runtime")
MOST_ERROR = 1.5
"""Of the largest error of transformers in bf16, at most, where logits differ by rounding alone."""
LATE = {"obstacle": "no time was left"}


@dataclasses.dataclass(frozen=True)
class Bench:
    """What all rows have in common.

    Attributes:
        shape: of the checkpoint.
        folder: it lies there.
        options: of the command.
        prompts: what is asked.
        rates: what the machine can do.
        began_s: when this process began.
    """

    shape: ModelShape
    folder: Path
    options: argparse.Namespace
    prompts: Prompts
    rates: Rates
    began_s: float

    @property
    def num_experts(self) -> int:
        """Of all layers."""
        return self.shape.num_layers * self.shape.num_experts

    @property
    def is_late(self) -> bool:
        """Whether rows that are left would take longer than may be."""
        return time.time() - self.began_s > self.options.seconds

    def generation(self, cache: str) -> dict[str, Any]:
        """Options of `generate` for a kind of cache."""
        return {"cache_implementation": cache}


def main() -> int:
    options, began_s = _arguments(), psutil.Process().create_time()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here; rehearse with --device cpu --tiny", file=sys.stderr)
        return 2
    import moe_runtime

    moe_runtime.register_with_transformers()
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    shape = shape_of(options.shape, options.layers, is_tiny=options.tiny)
    counts = (options.repeats + 1, options.prompt_tokens, options.long_prompt)
    prompts = new_prompts(shape.vocab_size, counts, options.device)
    rates = measure_rates(shape, options.device, 2**20 if options.tiny else 2**29)
    results: dict[str, Any] = {
        **run_facts(ROOT),
        "gpu": gpu,
        "shape": shape.describe(),
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "long_prompt_tokens": options.long_prompt,
        "active_bytes_a_token": active_bytes(shape),
        "rates": rates._asdict(),
        "rows": [],
    }
    path, profiles = options.out, list[str]()
    if options.save:
        name = re.sub(r"[^a-z0-9]+", "-", (gpu or "rehearsal").lower()).strip("-")
        path = ROOT / "benchmarks" / "results" / f"device-decode-{shape.name}-{name}.json"
    print(f"copies {_gb(rates.copy_bytes_s)}, from the host {_gb(rates.link_bytes_s)}; ", end="")
    by_threads = {key: f"{1e3 * s:.3f}" for key, s in rates.cpu_expert_s_by_threads.items()}
    print(f"an expert on the CPU {1e3 * rates.cpu_expert_s:.3f} ms {by_threads}", flush=True)
    with drawn_checkpoint(shape, options.device) as folder:
        bench = Bench(shape, folder, options, prompts, rates, began_s)
        print(f"checkpoint after {time.time() - began_s:.1f} s", flush=True)
        for row in measure(bench, profiles):
            row["after_s"] = round(time.time() - began_s, 1)
            results["rows"].append(row)
            print(decode_line(row), flush=True)
            # After each row: what was measured stays if the next one fails.
            if path is not None:
                write_text(path, json.dumps(results, indent=1) + "\n")
            if options.profile is not None:
                write_text(options.profile, "\n".join(profiles) + "\n")
    print(f"done after {time.time() - began_s:.1f} s")
    return 0


def measure(bench: Bench, profiles: list[str]) -> Iterator[dict[str, Any]]:
    """All rows, those that are wanted most first."""
    ours = Ours(bench, profiles)
    yield from ours.resident()
    ways = ("device", "auto", "cpu") if bench.options.device == "cuda" else ("device",)
    first, *others = bench.options.shares
    for misses in ways:
        yield from ours.partial(first, misses)
        if misses == "device" and bench.options.device == "cuda":
            yield from ours.partial(first, misses, bench.options.host_share)
    yield from peers(bench, ours, profiles)
    for share, misses in itertools.product(others, ways):
        yield from ours.partial(share, misses)


class Ours:
    """Rows of this runtime.

    Attributes:
        answer: of the model that is resident as a whole, once it was measured.
        answers: of all that were measured before `exact` was there, by what they are.
        exact: the same tokens with logits in fp32, once transformers computed them.
        most_error: logits that are equal up to rounding are as near to these.
    """

    def __init__(self, bench: Bench, profiles: list[str]) -> None:
        self._bench, self._profiles = bench, profiles
        self.answer: Answer | None = None
        self.answers: dict[str, Answer] = {}
        self.exact: Answer | None = None
        self.most_error = 0.0
        self._row_s = 0.0
        self._plan: Any = None
        self._host_slot_bytes = 0

    def resident(self) -> Iterator[dict[str, Any]]:
        """With every expert where it is computed, for each kind of cache."""
        model = self._load(1.0, "device")
        for cache in self._bench.options.caches:
            row = {"system": "ours", "share": 1.0, "misses": "device", "cache": cache}
            row = self._measured(row, model)
            if "tokens_per_s" in row and not self._row_s:
                self._row_s = 1 / row["tokens_per_s"]
            yield row
        model.moe.close()
        del model
        _free()

    def partial(
        self, share: float, misses: str, host_share: float = 1.0
    ) -> Iterator[dict[str, Any]]:
        """With slots for a share of the experts, and others in the host's memory."""
        row = {"system": "ours", "share": share, "misses": misses, "host_share": host_share}
        if self._bench.is_late:
            yield row | LATE
            return
        model = self._load(share, misses, host_share)
        row = self._measured({**row, "cache": self._bench.options.caches[0]}, model)
        if "tokens_per_s" in row:
            row |= self._bound(row)
        yield row
        model.moe.close()
        del model
        _free()

    def _load(self, share: float, misses: str, host_share: float = 1.0) -> Any:
        import moe_runtime

        bench, device = self._bench, self._bench.options.device
        num_slots = round(share * bench.num_experts)
        budgets: dict[str, Any] = {}
        if self._plan is not None:
            around = self._plan.dense_bytes + self._plan.reserve_bytes
            budget = around + num_slots * self._plan.slot_bytes
            budgets = {"host_memory": budget}
            if device == "cuda":
                host = round(host_share * bench.num_experts) * self._host_slot_bytes
                budgets = {"host_memory": host, "device_memory": budget, "misses": misses}
        elif device == "cuda":
            budgets = {"host_memory": PASSING_EXPERTS * 2 * bench.shape.expert_bytes}
        budgets["warm_up"] = share == 1.0  # else what no prompt asks for stays missing
        model: Any = moe_runtime.load(bench.folder, device=device, **budgets)
        facts = model.moe.facts
        if self._plan is None:
            self._plan = facts.device_plan or facts.host_plan
            self._host_slot_bytes = facts.host_plan.slot_bytes
        slots = model.moe.stats().expert_slots
        assert slots == num_slots, f"{num_slots} slots were asked for, there are {slots}"
        prepare_generation(model)
        return model

    def _measured(self, row: dict[str, Any], model: Any) -> dict[str, Any]:
        bench, options = self._bench, self._bench.options
        generation = bench.generation(row["cache"])
        row["load_s"] = model.moe.facts.load_s
        try:
            row["prefill_tokens_per_s"] = prefill_tokens_per_s(
                model, bench.prompts, options.device, options.repeats
            )
            answer = answer_of(model, bench.prompts.short_NT[0], options.new_tokens, **generation)
            row |= decode(model, bench.prompts, options.new_tokens, **generation)
        except RuntimeError as error:  # a kind of cache that does not work here
            return row | {"obstacle": _first_line(error)}
        if self.answer is None:
            self.answer = answer
        else:
            row["beside_resident"] = compare(answer, self.answer)
        if self.exact is None:
            name = f"ours, {row['share']:.0%} resident, misses {row['misses']}"
            self.answers[f"{name}, {row['cache']} cache"] = answer
        else:
            row["error"] = error_of(answer, self.exact)
            row["is_equal_up_to_rounding"] = row["error"] <= self.most_error
        row["read_of_copy"] = _read_of_copy(bench, row)
        title = f"ours, {row['share']:.0%} resident, misses {row['misses']}, {row['cache']} cache"
        _profile(bench, title, model, generation, self._profiles)
        return row

    def _bound(self, row: dict[str, Any]) -> dict[str, Any]:
        """The least that a token could take where these misses are treated so, and its share."""
        rates, missed = self._bench.rates, row["missed_a_token"]
        cpu_s, link_s = missed * rates.cpu_expert_s, 0.0
        if rates.link_bytes_s is not None:
            link_s = missed * self._bench.shape.expert_bytes / rates.link_bytes_s
        together_s = cpu_s * link_s / (cpu_s + link_s) if link_s else 0.0
        least_s = {"device": link_s, "cpu": cpu_s, "auto": together_s}[row["misses"]]
        bound_s = max(least_s, self._row_s)
        return {
            "misses_bound_s": least_s,
            "resident_s": self._row_s,
            "of_bound": bound_s * row["tokens_per_s"],
        }


def peers(bench: Bench, ours: Ours, profiles: list[str]) -> Iterator[dict[str, Any]]:
    """Rows of transformers, everything resident, and how far both are from logits in fp32."""
    from transformers import AutoModelForCausalLM

    options, answers = bench.options, dict[str, Answer]()
    if bench.is_late:
        yield {"system": "transformers"} | LATE
        return
    begun_s = time.perf_counter()
    model: Any = AutoModelForCausalLM.from_pretrained(
        bench.folder, dtype=torch.bfloat16, device_map=options.device
    )
    model.eval()
    prepare_generation(model)
    load_s = time.perf_counter() - begun_s
    caches = ("dynamic", "static") if options.compile_peer else ("dynamic",)
    for kind, cache in itertools.product(PEER_EXPERTS, caches):
        row: dict[str, Any] = {"system": "transformers", "experts": kind, "cache": cache}
        row["load_s"] = load_s
        if bench.is_late:
            yield row | LATE
            continue
        model.set_experts_implementation(kind)
        generation = bench.generation(cache)
        try:
            if kind != DECODES_ALONE:
                row["prefill_tokens_per_s"] = prefill_tokens_per_s(
                    model, bench.prompts, options.device, options.repeats
                )
            answer = answer_of(model, bench.prompts.short_NT[0], options.new_tokens, **generation)
            row |= decode(model, bench.prompts, options.new_tokens, **generation)
        except RuntimeError as error:  # memory, or what compiles
            yield row | {"obstacle": _first_line(error)}
            continue
        answers[f"{kind}, {cache} cache"] = answer
        if ours.answer is not None:
            row["beside_resident"] = compare(answer, ours.answer)
        row["read_of_copy"] = _read_of_copy(bench, row)
        if kind in PROFILED_PEERS:
            _profile(bench, f"transformers, {kind}, {cache} cache", model, generation, profiles)
        yield row
    if ours.answer is not None and answers and not bench.is_late:
        model.set_experts_implementation("eager")
        ours.exact = exact_answer(model.float(), bench.prompts.short_NT[0], ours.answer)
        errors = {name: error_of(answer, ours.exact) for name, answer in answers.items()}
        ours.most_error = MOST_ERROR * max(errors.values())
        own = {name: error_of(answer, ours.exact) for name, answer in ours.answers.items()}
        is_equal = max(own.values()) <= ours.most_error
        yield {"system": "fp32", "errors": errors | own, "is_equal_up_to_rounding": is_equal}
    del model
    _free()


def _profile(
    bench: Bench, title: str, model: Any, generation: dict[str, Any], profiles: list[str]
) -> None:
    if bench.options.profile is None or bench.is_late:
        return
    prompt_1T = bench.prompts.short_NT[:1]

    def generate() -> None:
        model.generate(prompt_1T, max_new_tokens=PROFILED_TOKENS, do_sample=False, **generation)

    profiles.append(profiled(title, generate, bench.options.device))


def _free() -> None:
    """Gives up the memory of a model that nobody has any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _read_of_copy(bench: Bench, row: dict[str, Any]) -> float:
    return row["tokens_per_s"] * active_bytes(bench.shape) / bench.rates.copy_bytes_s


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _gb(bytes_s: float | None) -> str:
    return "-" if bytes_s is None else f"{bytes_s / 1e9:.1f} GB/s"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--shape", default="olmoe-1b-7b", choices=DEVICE_SHAPES)
    add("--layers", type=positive, default=4, help="(default: %(default)s)")
    add("--tiny", action="store_true", help="a tiny shape, as a rehearsal")
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
    add("--save", action="store_true", help="write benchmarks/results/device-decode-SHAPE-GPU")
    add("--out", type=Path, help="write the results here as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
