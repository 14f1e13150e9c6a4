"""A child that was forked says at once that the model is its parent's, and harms neither."""

import subprocess

import tiny_checkpoints
from moe_families import Family
from warm_python import warm_python

from moe_runtime.errors import FORKED

SCRIPT = """
import os, sys, torch
import moe_runtime
from moe_runtime.memory import source

path, folder = sys.argv[1:]
prompt = torch.tensor([[5, 70, 11, 13]])


def generate(model):
    return model.generate(prompt, max_new_tokens=6, do_sample=False).tolist()


def refused(model):
    for ask in (generate, lambda m: m(prompt), lambda m: m.moe.check(), lambda m: m.moe.stats()):
        try:
            ask(model)
            print("no error")
        except moe_runtime.MoERuntimeError as error:
            print(error)
    with model.moe:
        pass
    model.moe.close()


for threads in ("native", "python"):
    if threads == "python":
        source.native_library = lambda: None
    files = {"trace": f"{folder}/{threads}.npz", "timeline": f"{folder}/{threads}.json"}
    model = moe_runtime.load(path, device="cpu", max_tokens=64, prefetch="enforce", **files)
    before = generate(model)
    child = os.fork()
    if child == 0:
        refused(model)
        del model
        print("the child ends", flush=True)
        sys.exit(0) if threads == "native" else os._exit(0)  # an interpreter takes seconds to end
    assert os.waitpid(child, 0)[1] == 0
    assert generate(model) == before
    model.moe.check()
    model.moe.close()
    print("the parent goes on", flush=True)
os._exit(0)
"""


def test_a_forked_child_refuses_and_the_parent_goes_on(tmp_path):
    """With reading threads of C, and of Python."""
    made = tiny_checkpoints.tiny_model(Family("qwen3_moe", "Qwen3MoeForCausalLM"))
    path = tiny_checkpoints.save(made, tmp_path / "tiny", sharded=False)
    command = [warm_python(), "-P", "-c", SCRIPT, str(path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    once = [FORKED] * 4 + ["the child ends", "the parent goes on"]
    assert done.stdout.splitlines() == 2 * once
    for threads in ("native", "python"):
        assert (tmp_path / f"{threads}.npz").is_file()
        assert (tmp_path / f"{threads}.json").read_text().endswith("]\n")
