"""Decode steps after long contexts, by KV cache format: `python benchmarks/long_decode.py --save`.

A shape with random weights reads a short prompt, whose keys and values are then repeated up to the
length: what a step reads is as much as after a prompt of that length, which takes no time. Forms
take turns, each loaded anew. The slots are those that `--host-memory` has for the same length.
"""

import statistics
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import moe_runtime
from moe_runtime.benchmarks.harness.scripting import ScriptResults, chosen, option, plain, script
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
def steps_of(checkpoint: Path, form: str, num_tokens: int, num_slots: int) -> dict[str, float]:
    """The median step after this many tokens, with every expert in memory, and the slots."""
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
    median_s = statistics.median(times[UNTIMED_STEPS:])
    return {"step_s": median_s, "kv_bytes": kept, "expert_slots": num_slots}


@script(
    shape=option("olmoe-1b-7b", "as of `bench latency`"),
    layers=4,
    tokens=32768,
    host_memory=option("8GiB", "the budget whose slots are told"),
    repetitions=5,
)
def main(options: Namespace) -> int:
    shape = with_layers(SHAPES, options.shape, options.layers)
    names = ("shape", "layers", "tokens", "host_memory", "repetitions")
    settings = chosen(options, *names) | {"weights": "random"}
    file = f"long-decode-{plain(options.shape)}"
    results = ScriptResults("long-decode", options, settings, METRICS, file=file)
    writing: dict[str, Any] = {"keep": False, "needs_gguf": False, "say": print}
    with shape_checkpoint(shape, shapes_folder(), **writing) as files:
        slots = {
            form: inspect_checkpoint(
                files.checkpoint, max_tokens=options.tokens, kv_cache=form
            ).slots_for(parse_bytes(options.host_memory))
            for form in KV_CACHES
        }
        forms = {
            form: partial(steps_of, files.checkpoint, form, options.tokens, slots[form])
            for form in KV_CACHES
        }
        results.add_rounds(forms, options.repetitions)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
