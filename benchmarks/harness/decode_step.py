"""The time of a decode step with every expert resident, of whichever moe_runtime is installed.

`PYTHON benchmarks/harness/decode_step.py MODEL --threads N` prints the microseconds of the quickest
step. It uses public calls alone, so the interpreter may be that of another version's environment.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import moe_runtime

PROMPT_TOKENS = 16
STEPS = 200


def main() -> None:
    """Times, and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--host-memory", default="1GiB")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load_resident(arguments.model, arguments.host_memory, arguments.steps)
    runs = [step_seconds(model, arguments.steps) for _ in range(arguments.runs)]
    print(round(1e6 * min(runs), 1))


def load_resident(path: str, host_memory: str = "1GiB", num_steps: int = STEPS) -> Any:
    """The model after a run that has read all the experts which the timed steps visit."""
    model: Any = moe_runtime.load(path, device="cpu", host_memory=host_memory, max_tokens=512)
    decode(model, num_steps)
    before = model.moe.stats().misses
    decode(model, num_steps)
    assert model.moe.stats().misses == before, "not all experts are resident"
    return model


@torch.inference_mode()
def decode(model: Any, num_steps: int) -> list[float]:
    """Decodes given tokens after a given prompt; returns the seconds of each step."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, PROMPT_TOKENS + num_steps)
    tokens = torch.randint(model.config.vocab_size, shape, generator=generator)
    cache = model(tokens[:, :PROMPT_TOKENS], use_cache=True).past_key_values
    seconds = []
    for place in range(PROMPT_TOKENS, tokens.shape[1]):
        begin = time.perf_counter()
        model(tokens[:, place : place + 1], past_key_values=cache, use_cache=True)
        seconds.append(time.perf_counter() - begin)
    return seconds


def step_seconds(model: Any, num_steps: int = STEPS) -> float:
    """The quickest of many steps: what other programs on the machine take is not counted."""
    return min(decode(model, num_steps))


if __name__ == "__main__":
    main()
