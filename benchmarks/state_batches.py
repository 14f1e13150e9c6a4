"""Sequences with running states that decode together: `python benchmarks/state_batches.py --save`.

A model like Qwen3-Next (three layers of linear attention, one of attention, random weights in bf16;
with ``--shape granite-hybrid`` three layers of Mamba 2) decodes given tokens of several sequences,
all in one pass or one sequence after another, in turn (A B B A) in one process. Experts are all in
memory, or half of them and read with direct I/O, so that the budget is the cap. Tokens are drawn
evenly and routing with them: sequences share fewer experts than those of a trained model. Together
they are compared with the same model on torch's own convolutions, and on transformers' own steps of
its states, and so are prompts; one alone with transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import torch
from harness.machine import machine_name, run_facts
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig, Qwen3NextConfig

import moe_runtime
from moe_runtime.checkpoints.transformers_private import cache_name, cache_of
from moe_runtime.files import write_text
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.serving.adapters import Adapters
from moe_runtime.serving.passes import ModelPasses
from moe_runtime.serving.requests import GenerationRequest
from moe_runtime.serving.sequences import Sequence

ROOT = Path(__file__).resolve().parents[1]
EXPERTS: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 8,
}
SHAPES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "qwen3-next": (
        Qwen3NextConfig,
        {
            **EXPERTS,
            "head_dim": 128,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 128,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "granite-hybrid": (
        GraniteMoeHybridConfig,
        {
            **EXPERTS,
            "layer_types": ["mamba"] * 3 + ["attention"],
            "mamba_n_heads": 32,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "num_local_experts": 128,
            "intermediate_size": 512,
            "shared_intermediate_size": 512,
        },
    ),
}
COUNTS = (1, 4, 8)
PROMPT_TOKENS = 16
LONG_PROMPT = 512
MAX_TOKENS = 8192


def main() -> None:
    """Measures with all experts in memory and with half of them, and prints the rows."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    facts = run_facts(ROOT)
    with tempfile.TemporaryDirectory(prefix="moe-benchmark-") as temporary:
        folder = arguments.data or Path(temporary)
        if not (folder / "config.json").is_file():
            write_model(folder, arguments.shape)
        if arguments.only_write:
            return
        rows = [row for share in (1.0, 0.5) for row in measure(folder, share, arguments)]
        prompts = measure_prompts(folder, arguments)
        theirs = measure_transformers(folder, arguments)
    if arguments.save:
        settings = {
            **SHAPES[arguments.shape][1],
            "dtype": "bfloat16",
            "prompt_tokens": PROMPT_TOKENS,
            **{name: getattr(arguments, name) for name in ("steps", "rounds", "threads")},
        }
        name = f"state-batches-{arguments.shape}-{machine_name(facts['machine'])}.json"
        result = {**facts, "settings": settings, "rows": rows, "prompts_tokens_per_s": prompts}
        result["transformers_tokens_per_s"] = theirs
        write_text(ROOT / "benchmarks" / "results" / name, json.dumps(result, indent=1) + "\n")
        print(f"written to {name}")


def write_model(folder: Path, shape: str) -> None:
    """A checkpoint whose routing depends on the token: embeddings outweigh what layers add."""
    torch.manual_seed(0)
    kind, sizes = SHAPES[shape]
    model: Any = AutoModelForCausalLM.from_config(kind(**sizes, dtype="bfloat16"))
    model.to(torch.bfloat16)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=1.0)
    model.save_pretrained(folder)


def measure(folder: Path, share: float, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of sequences, with a share of the experts in memory."""
    summary = inspect_checkpoint(folder, max_tokens=MAX_TOKENS)
    slots = round(share * summary.total_experts)
    floor = summary.slots_for(summary.smallest_budget_bytes)
    budget = summary.smallest_budget_bytes + max(0, slots - floor) * summary.slot_bytes
    model: Any = moe_runtime.load(folder, device="cpu", host_memory=budget, max_tokens=MAX_TOKENS)
    rows = []
    with model.moe, torch.inference_mode():
        passes = ModelPasses(model, Adapters(model, {}))
        assert passes.can_join, "the model's sequences cannot decode together"
        num_tokens = arguments.steps * (2 + 10 * len(COUNTS) * arguments.rounds)
        sequences = [begin(passes, number, num_tokens) for number in range(max(COUNTS))]
        decode(passes, sequences, 2 * arguments.steps, together=True)  # experts are read
        for count in COUNTS:
            rows.append({"experts_in_memory": model.moe.stats().expert_slots, "share": share})
            rows[-1] |= compare(passes, model, sequences[:count], arguments)
            rows[-1] |= compare_parts(passes, model, sequences[:count], arguments)
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    return rows


def compare(
    passes: ModelPasses, model: Any, sequences: Items[Sequence], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Tokens a second of all sequences, and bytes read a token, in medians of blocks."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    read: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(arguments.rounds):
        for together in (True, False, False, True):
            before, begin_s = model.moe.stats().bytes_read, time.perf_counter()
            num_tokens = decode(passes, sequences, arguments.steps, together=together)
            rates[together].append(num_tokens / (time.perf_counter() - begin_s))
            read[together].append((model.moe.stats().bytes_read - before) / num_tokens)
    median = statistics.median
    return {
        "sequences": len(sequences),
        "together_tokens_per_s": round(median(rates[True]), 2),
        "apart_tokens_per_s": round(median(rates[False]), 2),
        "ratio": round(median(rates[True]) / median(rates[False]), 2),
        "together_read_bytes_per_token": round(median(read[True])),
        "apart_read_bytes_per_token": round(median(read[False])),
    }


def compare_parts(
    passes: ModelPasses, model: Any, sequences: Items[Sequence], arguments: argparse.Namespace
) -> dict[str, float]:
    """Tokens a second as it is, and with a part that is not ours, in medians of blocks."""
    rates: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for name in ("own", *PARTS, *reversed(PARTS), "own"):
            with PARTS.get(name, lambda _: contextlib.nullcontext())(model):
                begin_s = time.perf_counter()
                num_tokens = decode(passes, sequences, arguments.steps, together=True)
                rates.setdefault(name, []).append(num_tokens / (time.perf_counter() - begin_s))
    return {f"{name}_tokens_per_s": round(statistics.median(own), 2) for name, own in rates.items()}


@contextlib.contextmanager
def torch_convolutions(model: Any) -> Iterator[None]:
    """Depthwise layers have plain weights."""
    layers = [module for module in model.modules() if type(module) is torch.nn.Conv1d]
    ours = [layer.weight for layer in layers]
    for layer, weight in zip(layers, ours, strict=True):
        layer.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    yield
    for layer, weight in zip(layers, ours, strict=True):
        layer.weight = weight


@contextlib.contextmanager
def transformers_steps(model: Any) -> Iterator[None]:
    """Layers with recurrent states have their classes' own ``forward``."""
    layers = [module for module in model.modules() if "forward" in vars(module)]
    ours = [vars(layer).pop("forward") for layer in layers]
    yield
    for layer, forward in zip(layers, ours, strict=True):
        vars(layer)["forward"] = forward


PARTS = {"torch_convolutions": torch_convolutions, "transformers_steps": transformers_steps}


def measure_prompts(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of a prompt, all experts in memory, as `compare_parts`."""
    model: Any = moe_runtime.load(folder, device="cpu", max_tokens=MAX_TOKENS)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(EXPERTS["vocab_size"], (1, LONG_PROMPT), generator=generator)
    rates: dict[str, list[float]] = {}
    with model.moe, torch.inference_mode():
        model(tokens, logits_to_keep=1)  # experts are read
        for _ in range(arguments.rounds):
            for name in ("own", *PARTS, *reversed(PARTS), "own"):
                with PARTS.get(name, lambda _: contextlib.nullcontext())(model):
                    begin_s = time.perf_counter()
                    model(tokens, use_cache=True, logits_to_keep=1)
                    rates.setdefault(name, []).append(LONG_PROMPT / (time.perf_counter() - begin_s))
    found = {name: round(statistics.median(own), 1) for name, own in rates.items()}
    print("prompt", *(f"{name} {rate}" for name, rate in found.items()), flush=True)
    return found


def measure_transformers(folder: Path, arguments: argparse.Namespace) -> float:
    """Tokens a second of one sequence in transformers, all experts in memory: the median step's."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    generator = torch.Generator().manual_seed(0)
    size = (1, PROMPT_TOKENS + arguments.steps * arguments.rounds)
    tokens = torch.randint(EXPERTS["vocab_size"], size, generator=generator)
    rates = []
    with torch.inference_mode():
        cache = cache_of(model(tokens[:, :PROMPT_TOKENS], use_cache=True))
        for token in tokens[:, PROMPT_TOKENS:].split(1, dim=1):
            begin_s = time.perf_counter()
            model(token, use_cache=True, **{cache_name(model.forward): cache})
            rates.append(1 / (time.perf_counter() - begin_s))
    print(f"transformers {statistics.median(rates):.2f}", flush=True)
    return round(statistics.median(rates), 2)


def begin(passes: ModelPasses, number: int, num_tokens: int) -> Sequence:
    """A sequence whose prompt is read, with the tokens that it goes on with."""
    generator = torch.Generator().manual_seed(number)
    size = (PROMPT_TOKENS + num_tokens + 1,)
    tokens = torch.randint(EXPERTS["vocab_size"], size, generator=generator).tolist()
    prompt = tuple(tokens[:PROMPT_TOKENS])
    request = GenerationRequest(prompt_ids=prompt, max_new_tokens=num_tokens)
    sequence = Sequence(request, lambda event: None, number)
    sequence.tokens = tokens
    sequence.start(passes.new_cache(), 0, PROMPT_TOKENS)
    passes.read([(sequence, PROMPT_TOKENS)])
    sequence.num_computed = PROMPT_TOKENS
    return sequence


def decode(passes: ModelPasses, sequences: Items[Sequence], steps: int, *, together: bool) -> int:
    """So many tokens of each; gives how many in all."""
    groups = [list(sequences)] if together else [[sequence] for sequence in sequences]
    for _ in range(steps):
        for group in groups:
            passes.decode(group)
            for sequence in group:
                sequence.num_computed += 1
    return steps * len(sequences)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-next")
    parser.add_argument("--data", type=Path, help="folder that keeps the weights; else temporary")
    parser.add_argument("--only-write", action="store_true", help="write the weights and end")
    parser.add_argument("--steps", type=int, default=8, help="of a block")
    parser.add_argument("--rounds", type=int, default=2, help="of four blocks")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", action="store_true", help="write this machine's results file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
