"""Peers of `bench experts`: the layer arrives as it is, and results are held to ours."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from moe_runtime.benchmarks.cases import expert_layers
from moe_runtime.benchmarks.cases.formats import FormatsPlan, measure_formats
from moe_runtime.benchmarks.peers import kt_kernel
from moe_runtime.benchmarks.suite import PeerFailedError, Rules
from moe_runtime.benchmarks.suite.peers import find_peer, find_peers, started
from moe_runtime.benchmarks.synthetic.model_shapes import LayerSizes
from moe_runtime.kernels.native import native_library

NUMPY = """
import numpy as np
INSTALL = "pip install numpy"
PACKAGES = ("numpy",)
CASES = ("experts",)
VARIANTS = ("doubled", "dies")
FORMATS = ("bf16", "int4")

def values(codes, scales=None):
    if scales is None:
        return f32(codes).astype(float)
    nibbles = np.stack((codes & 15, codes >> 4), -1).reshape(*codes.shape[:2], -1)
    return (nibbles - 8.0) * np.repeat(f32(scales), 32, axis=2)

def f32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)

def bf16(values):
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)

class Peer:
    def __init__(self, settings):
        self.variant = settings["variant"]
    def load_experts(self, *parts):
        self.parts = [values(*parts[number::3]) for number in range(3)]
    def experts(self, x, ids, weights, out):
        if self.variant == "dies":
            raise ValueError("no room")
        gate, up, down = self.parts
        for number, token in enumerate(f32(x).astype(float)):
            total = 0
            for expert, weight in zip(ids[number], weights[number]):
                hidden = gate[expert] @ token
                hidden = hidden / (1 + np.exp(-hidden)) * (up[expert] @ token)
                total = total + weight * (down[expert] @ hidden)
            out[number] = bf16(total * (1 + (self.variant == "doubled")))
"""


def measure(
    model: Path, folder: Path, *variants: str, dtype: torch.dtype = torch.bfloat16
) -> list[dict[str, Any]]:
    file = folder / "plain.py"
    file.write_text(NUMPY)
    plan = expert_layers.ExpertsPlan(
        layer=expert_layers.layer_of_model(model, dtype), tokens=(1, 5), trains=True, block_s=0.001
    )
    settings = {"model": None, "num_threads": 1, "top_k": plan.layer.top_k, "most_tokens": 5}
    peers = [find_peer(f"{file}{variant}", settings, "experts") for variant in variants]
    rules = Rules(judged=("forward_1_s",), least=2, most=2)
    results = expert_layers.measure_experts(plan, rules, settings={}, peers=peers)
    return results["measurements"][-len(variants) :]


def test_peers_compute_the_same_layer_or_have_no_numbers(model, tmp_path):
    plain, doubled, dies = measure(model, tmp_path, "", ":doubled", ":dies")
    assert (plain["failure"], plain["quality"]) == (None, {"compared": 6, "equal": 6})
    assert plain["summary"].keys() == {"forward_1_s", "forward_5_s"}
    assert len(plain["repetitions"]) == 2
    assert plain["versions"]["numpy"] == np.__version__
    assert doubled["failure"].startswith("6 of 6 tokens differ by more than roundings allow")
    assert dies["failure"].startswith("ValueError: no room (")
    assert dies["repetitions"] == []


@pytest.mark.skipif(native_library() is None, reason="no native library")
def test_a_peer_computes_the_formats_that_it_has_from_codes_and_scales(tmp_path):
    file = tmp_path / "plain.py"
    file.write_text(NUMPY)
    plan = FormatsPlan(["mxfp4", "int4"], LayerSizes(6, 2, 64, 32), 1 << 24, [1, 17], 1e-4)
    settings = {"model": None, "num_threads": 1, "top_k": 2, "most_tokens": 17}
    peers = find_peers([str(file), f"{file}:doubled"], settings, "experts")
    rules = Rules(judged=("forward_1_s",), least=2, most=2)
    results = measure_formats(plan, rules, settings={}, peers=peers)
    rows = {one["system"]: one for one in results["measurements"]}
    own = ["int4", "read, int4", "plain, int4", "plain:doubled, int4"]
    assert list(rows) == ["mxfp4", "read, mxfp4", *own]
    plain = rows["plain, int4"]
    assert (plain["failure"], plain["quality"]) == (None, {"compared": 18, "equal": 18})
    assert plain["summary"].keys() == rows["int4"]["summary"].keys()
    assert rows["plain:doubled, int4"]["failure"].startswith("18 of 18 tokens differ")


SPINNING = """
import os, sys, threading
sys.setswitchinterval(1e-5)  # else each import here waits for those that spin
CASES = ("experts",)
INSTALL = "pip install nothing"
PACKAGES = ()
def spin():
    while True: pass
class Peer:
    def __init__(self, settings):
        threading.Thread(target=spin, daemon=True).start()
    def load(self):
        os._exit(3)
"""


def test_a_peer_stands_still_while_it_is_not_its_turn(tmp_path):
    file = tmp_path / "spinning.py"
    file.write_text(SPINNING)
    program = find_peer(str(file), {"num_threads": 1}, "experts")
    with started(program, 60.0, stands_still=True) as peer:
        peer.ask("start", settings={})
        (one,) = (child for child in psutil.Process().children() if str(file) in child.cmdline())
        for num_threads in (2, 3):
            before = one.cpu_times()
            tasks = Path(f"/proc/{one.pid}/task").glob("*/stat")
            states = [task.read_text().rpartition(")")[2].split()[0] for task in tasks]
            assert states == ["T"] * num_threads
            sum(range(5_000_000))  # our turn: far longer than a tick of the kernel's clock
            assert one.cpu_times()[:2] == before[:2]
            peer.ask("start", settings={})
        with pytest.raises(PeerFailedError, match="exit code 3"):
            peer.ask("load")
    assert not one.is_running()
    with started(program, 60.0, stands_still=True) as peer:
        peer.ask("start", settings={})  # and is stopped when the block ends


def test_a_layer_that_was_not_handed_over_in_full_is_handed_over_again(
    model, tmp_path, monkeypatch
):
    plan = expert_layers.ExpertsPlan(
        layer=expert_layers.layer_of_model(model, torch.bfloat16),
        tokens=(1, 5),
        trains=False,
        block_s=0.001,
    )

    def fail(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as full:
        full.setattr(np, "savez", fail)
        with pytest.raises(OSError, match="No space"):
            expert_layers.write_layer(plan, tmp_path)
    expert_layers.write_layer(plan, tmp_path)
    names = ["1.npz", "5.npz", "down.npy", "gate.npy", "up.npy"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names


def test_another_type_is_refused_before_anything_starts(model, tmp_path):
    (found,) = measure(model, tmp_path, "", dtype=torch.float32)
    parts = "down_proj, gate_up_proj in float32"
    told = "takes gate_up_proj and down_proj in bfloat16; this layer has "
    assert found["failure"] == told + parts


class Pool:
    """Stands in for kt-kernel's threads."""

    backend_ = "backend"

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads

    def submit(self, task: Any) -> None:
        task()

    def sync(self) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "name", "quant"),
    [("fp8", "AVX2FP8_MOE", (8, 128)), ("int4-int8", "AMXInt4_KGroup_MOE", (4, 32))],
)
def test_kt_kernel_is_given_codes_and_scales_of_each_expert(kind, name, quant, monkeypatch):
    given = SimpleNamespace(quant_config=SimpleNamespace())

    def taken(config: Any) -> Any:
        return SimpleNamespace(load_weights_task=lambda order: lambda: None, config=config)

    moe = SimpleNamespace(**{"MOEConfig": lambda *sizes: given, name: taken})
    api = SimpleNamespace(CPUInfer=Pool, moe=moe)
    monkeypatch.setattr(kt_kernel, "find_extension", lambda folder: api)
    settings = {"model": None, "variant": None, "num_threads": 1, "top_k": 1, "most_tokens": 1}
    peer = kt_kernel.Peer({**settings, "format": kind})
    parts = [np.full((2, 3, 4), number, np.uint8) for number in range(6)]
    peer.load_experts(*parts)
    words = [f"{one}_{part}s" for part in ("proj", "scale") for one in ("gate", "up", "down")]
    for word, part in zip(words, parts, strict=True):
        assert getattr(given, word) == [[part.ctypes.data, part.ctypes.data + 12]]
    assert (given.quant_config.bits, given.quant_config.group_size) == quant


def test_kt_kernel_without_its_extension_says_where_it_looked(tmp_path):
    with pytest.raises(ImportError, match=f"no kt_kernel for .* in {tmp_path}"):
        kt_kernel.find_extension(str(tmp_path))
