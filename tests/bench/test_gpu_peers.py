"""Peers of `bench experts` that need a GPU, against stand-ins of their packages on the CPU.

A stand-in has the package's signature and the places of its parameters, and computes token by token
from them: weights that came to another place, or transposed, give another layer.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moe_runtime.benchmarks.cases import expert_layers
from moe_runtime.benchmarks.peers import host
from moe_runtime.benchmarks.suite.peers import peer_file

PEERS = ("megablocks", "scattermoe")


class Matrices(nn.Module):
    """ScatterMoE's `ParallelExperts`."""

    def __init__(self, num_experts: int, input_size: int, output_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, output_size, input_size))


class GLUMLP(nn.Module):
    """ScatterMoE's gated experts."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        bias: bool = False,
        activation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        assert not bias
        self.top_k, self.activation = top_k, activation
        self.experts = Matrices(num_experts, input_size, 2 * hidden_size)
        self.output_experts = Matrices(num_experts, hidden_size, input_size)

    def forward(self, x: Tensor, expert_p: Tensor, expert_idxs: Tensor) -> Tensor:
        assert expert_p.dtype == x.dtype  # they are multiplied
        assert expert_idxs.shape == (len(x), self.top_k)
        assert isinstance(self.activation, nn.SiLU)
        up, gate = self.experts.weight[expert_idxs].chunk(2, dim=2)
        return mixed(x, gate, up, self.output_experts.weight[expert_idxs], expert_p)


@dataclass
class Arguments:
    """Those of MegaBlocks that describe a layer; what is left out has the package's value."""

    hidden_size: int = 1024
    ffn_hidden_size: int = 4096
    bias: bool = True
    activation_fn: Any = None
    moe_num_experts: int = 1
    moe_top_k: int = 1
    mlp_type: str = "mlp"
    mlp_impl: str = "sparse"
    fp16: bool = True
    bf16: bool = False


class ParallelDroplessMLP(nn.Module):
    """MegaBlocks' dropless experts."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        assert (args.mlp_type, args.mlp_impl, args.bias) == ("glu", "grouped", False)
        assert (args.fp16, args.bf16) == (False, True)
        assert args.activation_fn is nn.functional.silu
        self.args, self.mlp = args, nn.Module()
        rows = args.moe_num_experts * args.ffn_hidden_size
        for name in ("w1", "v1", "w2"):
            empty = torch.full((rows, args.hidden_size), torch.nan, dtype=torch.bfloat16)
            self.mlp.register_parameter(name, nn.Parameter(empty))

    def forward(
        self, x: Tensor, scores: None, expert_weights: Tensor, top_experts: Tensor
    ) -> Tensor:
        assert scores is None  # of a loss, which is kept in training alone
        assert not self.training
        assert top_experts.shape == (len(x), self.args.moe_top_k)
        shape = (self.args.moe_num_experts, self.args.ffn_hidden_size, self.args.hidden_size)
        parts = (getattr(self.mlp, name).view(shape)[top_experts] for name in ("w1", "v1", "w2"))
        gate, up, down = parts
        return mixed(x, gate, up, down.mT, expert_weights)


def mixed(x_TD: Tensor, gate_TKFD: Tensor, up_TKFD: Tensor, down_TKDF: Tensor, w_TK: Tensor) -> Any:
    """The sum of a token's experts, exact but for one rounding at the end."""
    x, gate, up, down, weights = (
        part.double() for part in (x_TD, gate_TKFD, up_TKFD, down_TKDF, w_TK)
    )
    hidden = nn.functional.silu(torch.einsum("tkfd,td->tkf", gate, x))
    hidden = hidden * torch.einsum("tkfd,td->tkf", up, x)
    return torch.einsum("tkdf,tkf,tk->td", down, hidden, weights).to(x_TD.dtype)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins of both packages, and a GPU that is the CPU; notes what is waited for."""
    waited: list[str] = []
    contents = {
        "scattermoe": {},
        "scattermoe.mlp": {"GLUMLP": GLUMLP},
        "megablocks": {},
        "megablocks.layers": {},
        "megablocks.layers.arguments": {"Arguments": Arguments},
        "megablocks.layers.dmoe": {"ParallelDroplessMLP": ParallelDroplessMLP},
    }
    for name, attributes in contents.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        home, _, last = name.rpartition(".")
        if home:
            setattr(sys.modules[home], last, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append("all"))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    return waited


@pytest.fixture(scope="module")
def plan(model: Path) -> expert_layers.ExpertsPlan:
    layer = expert_layers.layer_of_model(model, torch.bfloat16)
    return expert_layers.ExpertsPlan(layer=layer, tokens=(1, 5), trains=False, block_s=0.001)


@pytest.mark.parametrize("name", PEERS)
def test_the_layer_arrives_as_it_is(name, plan, packages, tmp_path):
    expert_layers.write_layer(plan, tmp_path)
    _, peer = host._made(str(peer_file(name)), {"top_k": plan.layer.top_k})
    host.load_experts(peer, str(tmp_path))
    plan.layer.select("eager")
    for tokens in plan.tokens:
        assert host.run_experts(peer, str(tmp_path), tokens, None) == {}
        bits = np.load(tmp_path / f"{tokens}.npy").view(np.int16)
        found = torch.from_numpy(bits).view(torch.bfloat16)
        expected = plan.call(tokens, trains=False)(0)
        assert expert_layers.num_equal(plan, found, expected, trains=False) == tokens
        assert expert_layers.num_equal(plan, found * torch.nan, expected, trains=False) == 0
    assert len(packages) == len(plan.tokens)
    assert len(host.run_experts(peer, str(tmp_path), 5, 0.001)["seconds"]) >= 1
    # the untimed call, too, and every one is waited for
    assert len(packages) >= len(plan.tokens) + 2
