"""Records the routing of a model and replays it under several policies and cache sizes.

python examples/compare_policies.py [MODEL]

The same on the command line: `moe-runtime replay TRACE --policy lru,lfu,belady`.
"""

import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

import moe_runtime
from moe_runtime.lab.replay.experiment import Experiment, run_experiment
from moe_runtime.lab.traces import read_trace
from moe_runtime.lab.traces.workload import workload_of
from moe_runtime.models.pocket import pocket_path

PROMPTS = ("The for statement", "Lists are", "An exception is")


def main(model_path: str, folder: Path) -> None:
    """Prints hit rates; Belady's optimum knows the future, and no policy finds more."""
    trace = folder / "trace.npz"
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = moe_runtime.load(model_path, host_memory="64MiB", max_tokens=64, trace=trace)
    with model.moe:
        for text in PROMPTS:
            prompt = tokenizer(text, return_tensors="pt")
            model.generate(**prompt, max_new_tokens=16, do_sample=False)
    experiment = Experiment(policies=("lru", "lfu"), capacities=(0.25, 0.5))
    print("policy, share of the experts in memory, hits")
    for row in run_experiment(workload_of(read_trace(trace)), experiment):
        print(f"{row.policy:14} {row.capacity:5.0%} {row.hit_rate:6.1%}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(sys.argv[1] if sys.argv[1:] else str(pocket_path()), Path(made))
