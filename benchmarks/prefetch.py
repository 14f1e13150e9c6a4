"""Decoding with prefetch and without, in turn, in one process: `python benchmarks/prefetch.py`.

A model decodes a given text under a memory budget that holds a share of its experts. Blocks of
steps run without prefetch and with it in the order A B B A, over the same cache; medians of their
times, waits, bytes and seconds of predicting are compared. Two models: the bundled pocket model on
held-out text, and a synthetic checkpoint of a named shape (written once into `--data`) whose
tokens repeat as words do. With another eviction policy than LRU, the steps without prefetch are
those of a second model that evicts by LRU, over the same text. Experts are read with direct I/O, so
the budget is the cap: the page cache does not help. The mode `auto` runs after that, its
trials included, in turn with blocks without prefetch. In a last block, whose time counts for
nothing else, every call of the eviction policy is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.machine import commit, describe_machine, machine_name, versions

import moe_runtime
from moe_runtime.bench.synthetic.checkpoint_writer import is_complete, write_checkpoint
from moe_runtime.bench.synthetic.model_shapes import SHAPES
from moe_runtime.config import PrefetchMode
from moe_runtime.files import write_text
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.models.pocket import pocket_path

HERE = Path(__file__).resolve().parent
POCKET = "pocket"
LRU = "lru"
WARMUP_STEPS = 24
PROMPT_TOKENS = 16


@dataclass(kw_only=True)
class Tally:
    """What the decode steps of one mode took."""

    step_s: list[float] = field(default_factory=list)
    stall_s: float = 0.0
    bytes_read: int = 0
    predict_s: float = 0.0

    def summary(self) -> dict[str, float]:
        """Per step, and predicting as a share of the decode time."""
        steps = max(1, len(self.step_s))
        return {
            "steps": len(self.step_s),
            "step_ms_median": round(1e3 * statistics.median(self.step_s), 3),
            "step_ms_mean": round(1e3 * sum(self.step_s) / steps, 3),
            "stall_ms": round(1e3 * self.stall_s / steps, 3),
            "kib_read": round(self.bytes_read / steps / 1024, 1),
            "prediction_share": round(self.predict_s / sum(self.step_s), 4),
        }


class Decoder:
    """A loaded model that decodes given texts step by step and keeps the counts of every mode."""

    def __init__(self, model: Any, texts: list[list[int]]) -> None:
        self._model, self._tokens_BT = model, torch.tensor(texts)
        self._at = PROMPT_TOKENS
        with torch.inference_mode():
            out = model(input_ids=self._tokens_BT[:, :PROMPT_TOKENS], use_cache=True)
        self._cache = out.past_key_values

    def run(self, mode: PrefetchMode, steps: int, tally: Tally) -> None:
        """Decodes some more tokens in a mode and adds what they took."""
        moe = self._model.moe
        moe.prefetcher.mode = mode
        before, predict_s = moe.stats(), moe.prefetcher.stats().predict_s
        with torch.inference_mode():
            for at in range(self._at, self._at + steps):
                token_B1 = self._tokens_BT[:, at : at + 1].contiguous()
                start_s = time.perf_counter()
                out = self._model(input_ids=token_B1, past_key_values=self._cache, use_cache=True)
                self._cache = out.past_key_values
                tally.step_s.append(time.perf_counter() - start_s)
        self._at += steps
        after = moe.stats()
        tally.stall_s += after.stall_s - before.stall_s
        tally.bytes_read += after.bytes_read - before.bytes_read
        tally.predict_s += moe.prefetcher.stats().predict_s - predict_s


class TimedPolicy:
    """An eviction policy whose calls are timed, its watchers' too."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._policy, name)
        if name == "watcher" and value:
            return _TimedCalls(value, self)
        return self.timed(value) if callable(value) else value

    def __len__(self) -> int:
        return len(self._policy)

    def timed(self, function: Any) -> Any:
        """The function, whose seconds are added up."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start_s

        return call


class _TimedCalls:
    def __init__(self, of: Any, timed: TimedPolicy) -> None:
        self.observe, self.finish = timed.timed(of.observe), timed.timed(of.finish)


def policy_share(decoder: Decoder, store: Any, steps: int) -> float:
    """Decodes without prefetch; returns the share of the time that went to the policy."""
    tally, policy = Tally(), store._policy
    timed = store._policy = TimedPolicy(policy)
    decoder.run(PrefetchMode.OFF, steps, tally)
    store._policy = policy
    return round(timed.seconds / sum(tally.step_s), 4)


def main() -> None:
    arguments = _arguments()
    rows = []
    for name in arguments.models:
        folder = pocket_path() if name == POCKET else synthetic(name, arguments.data)
        for share in arguments.shares:
            row = measure(name, folder, share, arguments)
            rows.append(row)
            _print(row)
    if arguments.out:
        write(arguments.out, arguments, rows)


def measure(name: str, folder: Path, share: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Decodes with a share of the experts in memory, in all modes; returns the comparison."""
    blocks, num_texts = 8 * arguments.rounds + 1, arguments.sequences
    num_tokens = PROMPT_TOKENS + WARMUP_STEPS + blocks * arguments.block
    make = pocket_tokens if name == POCKET else partial(zipf_tokens, name)
    texts = np.reshape(make(num_texts * num_tokens), (num_texts, num_tokens)).tolist()
    summary = inspect_checkpoint(folder, max_tokens=num_texts * num_tokens)
    slots = round(share * summary.total_experts)
    floor = summary.slots_for(summary.smallest_budget_bytes)
    budget = summary.smallest_budget_bytes + max(0, slots - floor) * summary.slot_bytes

    def load(policy: str) -> Any:
        return moe_runtime.load(
            folder,
            device="cpu",
            host_memory=budget,
            max_tokens=num_texts * num_tokens,
            policy=policy,
            prefetch="auto",
            predictor=arguments.predictor,
        )

    model = load(arguments.policy)
    plain = model if arguments.policy == LRU else load(LRU)
    off, on, auto, beside = Tally(), Tally(), Tally(), Tally()
    with plain.moe, model.moe:
        decoder = Decoder(model, texts)
        without = decoder if plain is model else Decoder(plain, texts)
        for each in {id(decoder): decoder, id(without): without}.values():
            each.run(PrefetchMode.OFF, WARMUP_STEPS, Tally())
        for _ in range(arguments.rounds):
            for mode, tally in (
                (PrefetchMode.OFF, off),
                (PrefetchMode.ENFORCE, on),
                (PrefetchMode.ENFORCE, on),
                (PrefetchMode.OFF, off),
            ):
                (without if mode is PrefetchMode.OFF else decoder).run(mode, arguments.block, tally)
        model.moe.prefetcher.reset_stats()
        for _ in range(2 * arguments.rounds):
            without.run(PrefetchMode.OFF, arguments.block, beside)
            decoder.run(PrefetchMode.AUTO, arguments.block, auto)
        model.moe.prefetcher.mode = PrefetchMode.AUTO
        verdict = model.moe.prefetcher.describe()
        share_of_policy = policy_share(decoder, model.moe._store, arguments.block)
        model.moe.check()
        slots = model.moe.stats().expert_slots
    return {
        "model": name,
        "sequences": num_texts,
        "share_of_experts": share,
        "slots": slots,
        "policy": model.moe.facts.choice.policy,
        "predictor": arguments.predictor,
        "off": off.summary(),
        "enforce": on.summary(),
        "auto": {**auto.summary(), "verdict": verdict},
        "policy_share": share_of_policy,
        "decode_ratio": _ratio(statistics.median(off.step_s), statistics.median(on.step_s)),
        "stall_ratio": _ratio(on.stall_s, off.stall_s),
        "traffic_ratio": _ratio(on.bytes_read, off.bytes_read),
        "auto_decode_ratio": _ratio(
            statistics.median(beside.step_s), statistics.median(auto.step_s)
        ),
    }


def _ratio(numerator: float, denominator: float) -> float | None:
    return round(numerator / denominator, 3) if denominator else None


def synthetic(name: str, data: Path) -> Path:
    """The folder of a synthetic checkpoint, written if it is not there."""
    folder = data / name
    if not is_complete(SHAPES[name], folder):
        print(f"writing {folder} ({SHAPES[name].total_bytes / 1e9:.1f} GB)", flush=True)
        data.mkdir(parents=True, exist_ok=True)
        write_checkpoint(SHAPES[name], folder)
    return folder


def pocket_tokens(num_tokens: int) -> list[int]:
    """Documents that the pocket model was not trained on, one after another."""
    from transformers import AutoTokenizer

    from moe_runtime.models.pocket.corpus import gather

    tokenizer = AutoTokenizer.from_pretrained(pocket_path())
    tokens: list[int] = []
    for document in gather():
        if document.held_out and len(tokens) < num_tokens:
            tokens += tokenizer(document.text[:2000])["input_ids"]
    return tokens[:num_tokens]


def zipf_tokens(name: str, num_tokens: int) -> list[int]:
    """Tokens of a synthetic vocabulary that repeat as often as words do (Zipf's law)."""
    rng = np.random.default_rng(0)
    return (rng.zipf(1.2, size=num_tokens) % SHAPES[name].vocab_size).tolist()


def _print(row: dict[str, Any]) -> None:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    print(
        f"{row['model']:>12} x {row['sequences']} {row['share_of_experts']:>5.0%}: enforce decodes "
        f"{shown(row['decode_ratio'])} x, stall {shown(row['stall_ratio'])} x, traffic "
        f"{shown(row['traffic_ratio'])} x, predicting {row['enforce']['prediction_share']:.1%} "
        f"and the policy {row['policy_share']:.1%} of the time; auto "
        f"{shown(row['auto_decode_ratio'])} x ({row['auto']['verdict']})",
        flush=True,
    )


def write(out: Path, arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Writes the rows with machine, versions and commit."""
    facts = describe_machine()
    report = {
        "subject": "decoding with prefetch against without, in turn in one process",
        "machine": facts,
        "versions": versions(),
        "commit": commit(HERE.parent),
        "block_steps": arguments.block,
        "rounds": arguments.rounds,
        "rows": rows,
    }
    path = out / f"prefetch-{machine_name(facts)}.json" if out.is_dir() else out
    write_text(path, json.dumps(report, indent=1) + "\n")
    print(f"written to {path}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models", nargs="+", choices=[POCKET, *SHAPES], default=[POCKET, "olmoe-small"]
    )
    parser.add_argument("--shares", nargs="+", type=float, default=[0.25, 0.5, 0.75])
    parser.add_argument("--policy", default=LRU, help="as for `run --policy`")
    parser.add_argument("--predictor", default="auto", help="as for `run --predictor`")
    parser.add_argument("--sequences", type=int, default=1, help="decoded side by side")
    parser.add_argument("--block", type=int, default=12, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=4, help="times off, on, on, off")
    parser.add_argument("--quick", action="store_true", help="one round, half of the experts")
    parser.add_argument("--data", type=Path, default=HERE / "data", help="folder for checkpoints")
    parser.add_argument("--out", type=Path, help="folder or file for the results as JSON")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.shares = 1, [0.5]
    return arguments


if __name__ == "__main__":
    main()
