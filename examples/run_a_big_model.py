"""Generates text under a memory budget: experts that do not fit are read as they are routed to.

python examples/run_a_big_model.py [MODEL] [BUDGET]
"""

import sys

from transformers import AutoTokenizer

import moe_runtime
from moe_runtime.models.pocket import pocket_path


def main(model_path: str, budget: str) -> None:
    """Loads a checkpoint within a budget, generates, and says what the budget cost."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = moe_runtime.load(model_path, host_memory=budget, max_tokens=64)
    with model.moe:
        prompt = tokenizer("The for statement", return_tensors="pt")
        ids = model.generate(**prompt, max_new_tokens=16, do_sample=False)
        print(tokenizer.decode(ids[0]))
        stats = model.moe.stats()
    print(f"experts found in memory {stats.hits}, read from the files {stats.misses}")


if __name__ == "__main__":
    words = sys.argv[1:]
    main(words[0] if words else str(pocket_path()), words[1] if len(words) > 1 else "20MiB")
