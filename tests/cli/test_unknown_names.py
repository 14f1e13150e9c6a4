"""Shapes and peers that nobody knows: refused with the known ones before torch is imported."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from moe_runtime.cli.main import main
code = main(["bench", *sys.argv[1:]])
sys.exit(99 if {"torch", "transformers"} & sys.modules.keys() else code)
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


@pytest.mark.parametrize(
    ("case", "option", "known"),
    [
        *((case, "shape", known) for case, known in SHAPES.items()),
        *((case, "peer", known) for case, known in PEERS.items()),
    ],
)
def test_unknown_names_are_refused_at_once(case: str, option: str, known: tuple[str, ...]) -> None:
    words = [*(() if option == "shape" else ("no-model",)), f"--{option}", "nobodys"]
    command = [sys.executable, "-P", "-c", SCRIPT, case, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2, done.stderr
    said, names = done.stderr.split(" known: ")
    assert said.startswith(f"moe-runtime: error: unknown {option} 'nobodys':")
    assert {*known} <= {*names.strip().split(", ")}
    assert done.stderr.count("\n") == 1
