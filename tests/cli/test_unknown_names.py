"""Shapes and peers that nobody knows: refused with the known ones before torch is imported."""

import json
import subprocess
import sys

SCRIPT = """
import json, sys
from moe_runtime.cli.main import main
for words in json.loads(sys.argv[1]):
    assert main(["bench", *words]) == 2
    assert not {"torch", "transformers"} & sys.modules.keys(), words
"""
TEXTS = ("latency", "throughput")
SHAPES = {
    **dict.fromkeys(TEXTS, ("olmoe-tiny", "qwen3.6-tiny-q4_k")),
    **dict.fromkeys(("experts", "layer", "ops"), ("gpt-oss-20b", "mixtral-8x7b")),
    "training": ("300m", "pocket"),
}
PEERS = {
    "latency": ("llama_cpp", "vllm"),
    "throughput": ("accelerate", "transformers"),
    "experts": ("kt_kernel", "megablocks"),
    "training": ("deepspeed",),
}


CASES = [(case, "shape", known) for case, known in SHAPES.items()]
CASES += [(case, "peer", known) for case, known in PEERS.items()]


def test_unknown_names_are_refused_at_once():
    """One after another in a process that has imported nothing."""
    asked = [
        [case, *(() if option == "shape" else ("no-model",)), f"--{option}", "nobodys"]
        for case, option, _ in CASES
    ]
    command = [sys.executable, "-P", "-c", SCRIPT, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for line, (_, option, known) in zip(done.stderr.splitlines(), CASES, strict=True):
        said, names = line.split(" known: ")
        assert said.startswith(f"moe-runtime: error: unknown {option} 'nobodys':")
        assert {*known} <= {*names.split(", ")}
