"""Memory layers: scores of all rows, torch's optimizers, bytes of the file, and runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training_runs import CONFIG, error_of, states_equal, train, write_run

from moe_runtime.research.memory_layers import (
    MemoryLayer,
    MemoryOptimizer,
    ValueRows,
    product_top_k,
)
from moe_runtime.training.run_config import MemoryConfig, OptimizerConfig

KEYS, WIDTH, HEADS, TOP_K = 6, 16, 2, 3
SHAPE = MemoryConfig(layers=(0,), keys=KEYS, heads=HEADS, top_k=TOP_K, key_size=8)
SETTINGS = OptimizerConfig(peak_rate=1e-2, betas=(0.9, 0.95), weight_decay=0.1, clip_norm=0.5)
MEMORY = CONFIG.replace(
    "num_layers = 2", "num_layers = 3\ndense_layers = [0, 2]\nintermediate_size = 24"
) + ("\n[research.memory]\nlayers = [0, 2]\nkeys = 16\nheads = 2\ntop_k = 4\nkey_size = 8\n")


@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_the_best_rows_are_those_of_all(top_k):
    scores_THSN = torch.randn(20, 2, 2, KEYS, generator=torch.Generator().manual_seed(1))
    ids, sums = product_top_k(scores_THSN, top_k)
    every = scores_THSN[:, :, 0, :, None] + scores_THSN[:, :, 1, None, :]
    expected = every.flatten(-2).topk(top_k)
    assert torch.equal(ids, expected.indices)
    assert torch.equal(sums, expected.values)


class InMemory(nn.Module):
    """The layers of `model` with all rows in a parameter, and scores of all of them."""

    def __init__(self, layers: list[MemoryLayer], values: Tensor) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.values = nn.Embedding(len(values), WIDTH, sparse=True, _weight=values.clone())

    def forward(self, x_TD: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, MemoryLayer)
            queries = layer.query_norm(layer.query_proj(x_TD).view(-1, HEADS, 2, 4))
            keys = layer.key_norm(layer.keys)
            halves = (queries[:, :, :, None] * keys).sum(-1)
            scores = (halves[:, :, 0, :, None] + halves[:, :, 1, None, :]).flatten(-2) / 2
            found = scores.topk(TOP_K)
            rows = self.values(found.indices)
            y_TD = (found.values.softmax(-1)[..., None] * rows).sum((1, 2))
            x_TD = x_TD + layer.down_proj(y_TD * F.silu(layer.gate_proj(x_TD)))
        return x_TD


class OffMemory(nn.Module):
    def __init__(self, layers: list[MemoryLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x_TD: Tensor) -> Tensor:
        for layer in self.layers:
            x_TD = x_TD + layer(x_TD)
        return x_TD


def made(tmp_path: Path) -> tuple[OffMemory, MemoryOptimizer]:
    torch.manual_seed(7)
    model = OffMemory([MemoryLayer(WIDTH, SHAPE) for _ in range(2)])
    path = tmp_path / "rows.scratch"
    options: Any = {"open_rows": lambda: ValueRows(path, KEYS**2, WIDTH, std=0.3)}
    return model, MemoryOptimizer(model, SETTINGS, **options)


def batch(step: int, part: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + part))


def test_rows_in_a_file_train_as_a_sparse_embedding(tmp_path):
    """Two layers that share the rows, two micro-batches, clipped by the norm of everything."""
    model, optimizer = made(tmp_path)
    torch.manual_seed(7)
    expected = InMemory(
        [MemoryLayer(WIDTH, SHAPE) for _ in range(2)], optimizer.rows.state_dict()["rows"]
    )
    dense = [p for p in expected.layers.parameters() if p.ndim > 1]
    norms = [p for p in expected.layers.parameters() if p.ndim == 1]
    groups = [{"params": dense, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
    sparse = torch.optim.SparseAdam([expected.values.weight], lr=1e-2, betas=(0.9, 0.95))
    for step in range(4):
        parts = [batch(step, part) for part in range(2)]
        optimizer.backward([lambda x=x: model(x).square().sum() for x in parts], rate=1e-2)
        outcome = optimizer.step(1e-2)
        for x in parts:
            expected(x).square().sum().backward()
        rows = expected.values.weight
        assert rows.grad is not None
        gradients = [p.grad for p in (*dense, *norms)] + [rows.grad.coalesce().values()]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients if g is not None]))
        assert outcome.gradient_norm == pytest.approx(float(norm), rel=1e-5)
        scale = min(1.0, 0.5 / float(norm))
        for parameter in expected.parameters():
            assert parameter.grad is not None
            parameter.grad *= scale
        for one in (adamw, sparse):
            one.step()
            one.zero_grad()
    found = optimizer.rows.state_dict()
    # sums in another order
    torch.testing.assert_close(found["rows"], expected.values.weight.detach(), rtol=1e-4, atol=1e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        moment = sparse.state[expected.values.weight][name]
        torch.testing.assert_close(found[name], moment, rtol=1e-3, atol=1e-7)
    for one, other in zip(model.parameters(), expected.layers.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_only_used_rows_move(tmp_path):
    model, optimizer = made(tmp_path)
    assert list(tmp_path.iterdir()) == []
    before, ids = optimizer.rows.state_dict(), []
    counted = optimizer.transfers()
    hooks = [
        layer.register_forward_hook(lambda *_: ids.append(optimizer.rows._used[-1][0]))
        for layer in model.layers
    ]
    optimizer.backward([lambda: model(batch(0, 0)).sum()], rate=1e-2)
    for hook in hooks:
        hook.remove()
    optimizer.step(1e-2)
    moved = optimizer.transfers()
    used = torch.cat(ids).unique()
    size = 4 * WIDTH
    assert 0 < len(used) < KEYS**2
    assert moved["read_bytes"] - counted["read_bytes"] == size * (
        sum(map(len, ids)) + 3 * len(used)
    )
    assert moved["written_bytes"] - counted["written_bytes"] == size * 3 * len(used)
    after = optimizer.rows.state_dict()
    changed = (after["rows"] != before["rows"]).any(1).nonzero().flatten()
    assert torch.equal(changed, used)
    with torch.no_grad():
        model(batch(0, 1))
    assert len(optimizer.rows._used) == 0
    optimizer.close()


def test_a_bad_step_changes_no_row(tmp_path):
    model, optimizer = made(tmp_path)
    before = optimizer.rows.state_dict()["rows"]
    optimizer.backward([lambda: model(batch(0, 0)).sum() * torch.inf], rate=1e-2)
    assert optimizer.step(1e-2).bad_parameters
    assert torch.equal(optimizer.rows.state_dict()["rows"], before)


def last_checkpoint(path: Path) -> Path:
    return path.parent / "out" / "checkpoints" / "step-00000008.pt"


def test_a_run_resumes_to_the_bit_and_leaves_no_rows(tmp_path, capsys):
    whole, stopped = (write_run(tmp_path / name, config=MEMORY) for name in ("whole", "stopped"))
    assert train(whole, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert "no Hugging Face architecture has layers with a memory" in summary["export_obstacle"]
    assert train(whole, "--dry-run", "--json", "--set", "run.output=new") == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == summary["parameters"]
    assert train(stopped) == 0
    last_checkpoint(stopped).unlink()
    assert train(stopped, "--resume") == 0
    assert states_equal(last_checkpoint(whole), last_checkpoint(stopped))
    rows = [torch.load(last_checkpoint(p))["optimizer"]["memory"] for p in (whole, stopped)]
    assert all(torch.equal(rows[0][name], rows[1][name]) for name in rows[0])
    assert rows[0]["rows"].shape == (256, 32)
    assert not [*tmp_path.rglob("memory.scratch")]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("layers=[1]", "layers must name dense layers of model.dense_layers"),
        ("layers=[3]", "or of a model without experts; got 3"),
        ("layers=[0, 0]", "layers must name some layers once, got [0, 0]"),
        ("top_k=17", "top_k (17) must be at most keys (16)"),
        ("key_size=7", "key_size must be even, got 7"),
        ("heads=0", "heads must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_a_memory_is_refused(setting, message, tmp_path, capsys):
    path = write_run(tmp_path, config=MEMORY)
    assert message in error_of(capsys, path, "--set", f"research.memory.{setting}")
    both = ("--set", "research.frozen_share=0.5")
    assert "frozen_share and memory do not go together" in error_of(capsys, path, *both)
