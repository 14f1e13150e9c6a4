"""Decode steps after long contexts, by KV cache format: `python benchmarks/long_decode.py --save`.

A shape with random weights reads a short prompt, whose keys and values are then repeated up to the
length: what a step reads is as much as after a prompt of that length, which takes no time. Forms
take turns, each loaded anew. The slots are those that `--host-memory` has for the same length.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import moe_runtime
from moe_runtime.benchmarks.harness import scripting
from moe_runtime.benchmarks.suite import Metric, facts
from moe_runtime.benchmarks.synthetic.model_shapes import SHAPES, with_layers
from moe_runtime.benchmarks.synthetic.shape_checkpoint import shape_checkpoint, shapes_folder
from moe_runtime.config import KV_CACHES, parse_bytes
from moe_runtime.inference.inspection import inspect_checkpoint

PROMPT_TOKENS, UNTIMED_STEPS, STEPS = 256, 4, 24
METRICS = {
    "step_s": Metric("s"),
    "kv_bytes": Metric("bytes"),
    **facts("count", "expert_slots", better="more"),
}


def stretch(cache: Any, num_tokens: int) -> int:
    """Repeat the cache up to a length; return its bytes."""
    num_bytes = 0
    for layer in cache.layers:
        if layer.is_sliding:
            layer.cumulative_length = num_tokens
        else:
            times = -(-num_tokens // layer.keys.shape[-2])
            layer.keys, layer.values = (
                part.repeat(1, 1, times, 1)[..., :num_tokens, :]
                for part in (layer.keys, layer.values)
            )
        num_bytes += layer.keys.nbytes + layer.values.nbytes
    return num_bytes


@torch.inference_mode()
def steps_of(checkpoint: Path, form: str, num_tokens: int) -> dict[str, float]:
    """The median step after this many tokens, with every expert in memory."""
    room = num_tokens + UNTIMED_STEPS + STEPS + 1
    model: Any = moe_runtime.load(
        checkpoint, device="cpu", max_tokens=room, kv_cache=form, warm_up=True
    )
    with model.moe:
        size = model.config.vocab_size
        ids = torch.arange(PROMPT_TOKENS)[None] * 7 % size
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
        kept, times = stretch(cache, num_tokens), []
        for step in range(UNTIMED_STEPS + STEPS):
            token = torch.tensor([[(step * 31 + 5) % size]])
            began = time.perf_counter()
            model(token, past_key_values=cache, use_cache=True)
            times.append(time.perf_counter() - began)
    return {"step_s": statistics.median(times[UNTIMED_STEPS:]), "kv_bytes": kept}


def main() -> int:
    parser = scripting.results_parser(__doc__)
    parser.add_argument("--shape", default="olmoe-1b-7b", help="as of `bench latency`")
    parser.add_argument("--layers", type=scripting.positive, default=4)
    parser.add_argument("--tokens", type=scripting.positive, default=32768)
    parser.add_argument("--host-memory", default="8GiB", help="the budget whose slots are told")
    parser.add_argument("--repetitions", type=scripting.positive, default=5)
    options = parser.parse_args()
    shape = with_layers(SHAPES, options.shape, options.layers)
    names = ("shape", "layers", "tokens", "host_memory", "repetitions")
    settings = {name: getattr(options, name) for name in names} | {"weights": "random"}
    file = f"long-decode-{scripting.plain(options.shape)}"
    results = scripting.ScriptResults("long-decode", options, settings, METRICS, file=file)
    found: dict[str, list[dict[str, float]]] = {form: [] for form in KV_CACHES}
    writing: dict[str, Any] = {"keep": False, "needs_gguf": False, "say": print}
    with shape_checkpoint(shape, shapes_folder(), **writing) as files:
        slots = {
            form: inspect_checkpoint(
                files.checkpoint, max_tokens=options.tokens, kv_cache=form
            ).slots_for(parse_bytes(options.host_memory))
            for form in KV_CACHES
        }
        for _ in range(options.repetitions):
            for form in KV_CACHES:
                row = steps_of(files.checkpoint, form, options.tokens)
                found[form].append(row | {"expert_slots": slots[form]})
        for form, rows in found.items():
            results.add(form, rows)
    return results.finish()


if __name__ == "__main__":
    sys.exit(scripting.run_script(main))
