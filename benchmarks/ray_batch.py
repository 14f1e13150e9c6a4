"""A file of prompts on Ray and in one engine: `python benchmarks/ray_batch.py [--save]`.

Two nodes of one processor each, on this machine, with an engine each; one engine with both
processors. In turn, the pocket model with all experts in memory, and equal answers. Needs
moe-runtime[ray].
"""

import json
import random
import subprocess
import sys
import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks.harness.scripting import ScriptResults, script
from moe_runtime.benchmarks.suite import Metric, facts
from moe_runtime.models.pocket import pocket_path

METRICS = {
    "tokens_per_s": Metric("tokens/s", "more"),
    **facts("s", "answering_s"),
    **facts("count", "new_tokens"),
}
WORDS = ["the", "for", "class", "def", "import", "return", "list", "string", "value", "object"]


def write_prompts(path: Path, count: int, seed: int = 0) -> None:
    choice = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            text = " ".join(choice.choices(WORDS, k=choice.randint(4, 60)))
            line = {"prompt": text, "max_tokens": choice.randint(32, 96), "ignore_eos": True}
            file.write(json.dumps(line) + "\n")


def answer(prompts: Path, output: Path, *words: str) -> dict[str, Any]:
    """The summary of `generate --json` for a new file of answers."""
    output.unlink(missing_ok=True)
    program = [sys.executable, "-P", "-m", "moe_runtime.cli.program", "generate"]
    named = [str(pocket_path()), "--prompts", str(prompts), "-o", str(output), "--json"]
    same = ["--host-memory", "1GiB", "--temperature", "0", "--dtype", "float32"]
    found = subprocess.run(
        [*program, *named, *same, *words], check=True, stdout=subprocess.PIPE, text=True
    )
    told = json.loads(found.stdout)
    return {
        "tokens_per_s": told["new_tokens"] / told["seconds"],
        "answering_s": told["seconds"],
        "new_tokens": told["new_tokens"],
    }


@script(prompts=200, rounds=3)
def main(options: Namespace) -> int:
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    settings = {"model": "pocket", "prompts": options.prompts, "nodes": 2, "cpus_per_node": 1}
    results = ScriptResults("ray-batch", options, settings, METRICS)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    systems = {"one engine": (), "two engines on Ray": ("--ray", cluster.address)}
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "in.jsonl"
        outputs = {name: Path(folder) / f"{name}.jsonl" for name in systems}
        write_prompts(prompts, options.prompts)
        calls = {
            name: partial(answer, prompts, outputs[name], *words) for name, words in systems.items()
        }
        results.add_rounds(calls, options.rounds)
        texts = [
            [json.loads(line)["text"] for line in path.read_text().splitlines()]
            for path in outputs.values()
        ]
    cluster.shutdown()
    if len(texts[0]) != options.prompts or [len(one) for one in texts] != [options.prompts] * 2:
        raise SystemExit("a file lacks answers")
    same = sum(one == other for one, other in zip(*texts, strict=True))
    one, other = (results.value(name, "tokens_per_s") for name in systems)
    assert one is not None
    assert other is not None
    print(f"Ray / one engine: {other / one:.3f}; {same} of {options.prompts} texts are equal")
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
