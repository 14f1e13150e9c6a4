"""What libraries set up at first use, done before memory is measured: it counts as theirs."""

from __future__ import annotations

import numpy as np
import torch


def set_up_libraries(dtype: torch.dtype) -> None:
    """Has the libraries make what they make at first use.

    Torch's matrix libraries set themselves up at their first call, and every operation pages in its
    code: some 20 MiB which no model asked for. The operations are those of loading, of forward
    passes and of sampling, on a few values; nothing that they make outlives the call.

    Args:
        dtype: what the model computes in.
    """
    with torch.inference_mode():
        _set_up_layers(dtype)
        _set_up_sampling()
    _set_up_numpy()


def _set_up_layers(dtype: torch.dtype) -> None:
    """What transformers' layers and the loading of their weights consist of."""
    functional = torch.nn.functional
    ids = torch.arange(8)
    rows = functional.embedding(ids, torch.zeros(8, 64, dtype=dtype)) + 1
    wide, weight = rows.float(), torch.zeros(64, 64, dtype=dtype)
    heads = rows.view(1, 1, 8, 64)
    functional.linear(rows, weight)
    for num_rows in (1, 8):
        functional.linear(wide[:num_rows], weight.float())
    functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    wide_heads = heads.float()
    functional.scaled_dot_product_attention(wide_heads, wide_heads, wide_heads, is_causal=True)
    torch.bmm(wide.unsqueeze(1), wide.unsqueeze(2))
    chosen = torch.topk(torch.softmax(wide, dim=-1), 2)
    (chosen.values / chosen.values.sum(-1, keepdim=True)).to(dtype)
    angles = torch.outer(1.0 / 10.0 ** (torch.arange(0, 64, 2) / 64), ids.float())
    angles.cos().mul_(0.5).to(dtype)
    angles.sin()
    normal = wide * wide.square().mean(-1, keepdim=True).rsqrt()
    halves = torch.cat((-rows[:, 32:], rows[:, :32]), dim=-1)
    gated = functional.silu(rows) * halves + normal.to(dtype)
    out = torch.zeros(8, 64, dtype=dtype)
    out[ids] = functional.pad(gated[ids], (0, 0, 0, 8))[:8]
    out.new_empty(1, 2, 8, 64).narrow(-2, 0, 8).copy_(heads)
    out.transpose(0, 1).reshape(-1)
    torch.equal(out, torch.stack(list(out)))
    torch.allclose(out, out)
    out.clone().normal_().uniform_()
    torch.zeros(128, dtype=torch.uint8).view(dtype)


def _set_up_sampling() -> None:
    """What transformers' generation does between forward passes."""
    scores = torch.zeros(1, 64)
    ids = torch.ones(1, 8, dtype=torch.int64)
    in_order, order = torch.sort(scores, descending=False)
    removed = in_order.softmax(dim=-1).cumsum(dim=-1) <= 0.1
    removed[..., -1:] = False
    scores = scores.masked_fill(removed.scatter(1, order, removed), -float("inf"))
    with torch.random.fork_rng(devices=[]):
        torch.multinomial(torch.softmax(scores / 0.5, dim=-1), num_samples=1).squeeze(1)
    scores.argmax(-1)
    places = (ids.cumsum(-1) - 1).masked_fill(ids == 0, 1)
    done = torch.isin(ids[:, -1], torch.tensor([0])) | torch.full((1,), False)
    ids = torch.cat((ids, (ids[:, -1] * (1 - done.long()))[:, None]), dim=-1)
    ids.mul(2).eq(places[:, :1]).any(dim=-1).logical_not().all().item()
    ids.max().item()


def _set_up_numpy() -> None:
    """What records, predictors and policies consist of."""
    counts = np.zeros((8, 8), np.float32)
    np.add.at(counts, (np.arange(8), np.arange(8)), 1.0)
    chance = (counts @ counts).sum(axis=1) / np.maximum(np.sqrt(counts).max(axis=1), 1.0)
    np.argsort(-chance, kind="stable")
    np.linalg.norm(counts)
    np.tensordot(counts[None], counts, axes=2)
    np.einsum("cx,cx->c", counts, counts)
    np.exp(np.where(chance > 0, chance, 0)).astype(np.float16)
    flat = np.unique(np.repeat(np.arange(8), 2), return_inverse=True)[1].astype(np.int32)
    np.bincount(flat, weights=flat, minlength=9).cumsum()
    np.split(np.searchsorted(flat, flat, side="right"), [4])
    np.concatenate([flat, np.diff(flat), np.flatnonzero(flat)]).tobytes()
