"""Memory layers: a token's feed-forward network is a sum of a few rows out of very many.

Product keys find the best rows without scoring all. Rows and their moments lie in a file. A step
reads and writes those that it used.

Sources: Lample et al., "Large Memory Layers with Product Keys" (2019); Berges et al., "Memory
Layers at Scale" (2024), whose gate (Memory+) and shared pool are here.

Shape suffixes: T tokens, D model width, H heads, S halves of a key, N keys of a half, K rows of a
token in a head, U different rows.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_runtime.files import make_folders
from moe_runtime.memory.source import host_view
from moe_runtime.models.lm.blocks import Block
from moe_runtime.models.lm.layers import Linear, RMSNorm
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.training.checkpoint import require_like
from moe_runtime.training.offload.disk import RecordFile
from moe_runtime.training.optimizer import Optimizer, StepOutcome, clip_scale
from moe_runtime.training.run_config import MemoryConfig

_DRAWN_BYTES = 16 << 20
"""Of first rows that are drawn at a time."""


def product_top_k(scores_THSN: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The best sums of one score of each half: `[T, H, K]` numbers and sums, best first.

    Row `i * N + j` has the sum of the first half's score `i` and the second's `j`. A best sum is
    made of scores that are among the `top_k` of their halves.
    """
    best_THSK, halves_THSK = scores_THSN.topk(min(top_k, scores_THSN.shape[-1]), dim=-1)
    sums = (best_THSK[..., 0, :, None] + best_THSK[..., 1, None, :]).flatten(-2)
    first, second = halves_THSK.unbind(-2)
    rows = (first[..., :, None] * scores_THSN.shape[-1] + second[..., None, :]).flatten(-2)
    sums_THK, places_THK = sums.topk(top_k, dim=-1)
    return rows.gather(-1, places_THK), sums_THK


class ValueRows:
    """Rows `[D]` in a file, each with the two moments of Adam, which updates used rows alone.

    The arithmetic is that of `torch.optim.SparseAdam`.

    Args:
        path: of the file, whose name is free again at once.
        std: standard deviation of the first rows, drawn from torch's random numbers.

    Attributes:
        read_bytes, written_bytes, waited_s: so far.
    """

    def __init__(self, path: Path, num_rows: int, width: int, *, std: float) -> None:
        make_folders(path.parent)
        path.unlink(missing_ok=True)
        self.num_rows, self.width = num_rows, width
        self._file = RecordFile(path, 4 * width, 3 * num_rows, direct=False)
        path.unlink()  # nothing is left of it, however the run ends
        self.read_bytes = self.written_bytes = self.num_steps = 0
        self.waited_s = 0.0
        self._used: list[tuple[Tensor, Tensor]] = []
        for ids in torch.arange(num_rows).split(max(1, _DRAWN_BYTES // (4 * width))):
            self._move("write", 0, ids, torch.randn(len(ids), width) * std)
        self.written_bytes = 0

    def used(self, ids_U: Tensor) -> Tensor:
        """Rows `[U, D]` for a forward pass, whose gradients the next `update` takes.

        Args:
            ids_U: different numbers, ascending.
        """
        rows_UD = self._read(0, ids_U)
        if torch.is_grad_enabled():
            self._used.append((ids_U, rows_UD.requires_grad_()))
        return rows_UD

    def gradients(self) -> tuple[Tensor, Tensor]:
        """`[U]` numbers of rows that have gradients, ascending, and `[U, D]` their sums."""
        with_grad = [(ids_U, rows.grad) for ids_U, rows in self._used if rows.grad is not None]
        if not with_grad:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, self.width)
        ids_U, places = torch.cat([ids for ids, _ in with_grad]).unique(return_inverse=True)
        sums_UD = torch.zeros(len(ids_U), self.width)
        sums_UD.index_add_(0, places, torch.cat([grad for _, grad in with_grad]))
        return ids_U, sums_UD

    def update(
        self, ids_U: Tensor, grads_UD: Tensor, *, rate: float, betas: Sequence[float], eps: float
    ) -> None:
        self.num_steps += 1
        rows_UD, first_UD, second_UD = (self._read(part, ids_U) for part in range(3))
        first_UD.lerp_(grads_UD, 1 - betas[0])
        second_UD.lerp_(grads_UD.square(), 1 - betas[1])
        corrections = [1 - beta**self.num_steps for beta in betas]
        size = rate * math.sqrt(corrections[1]) / corrections[0]
        rows_UD.addcdiv_(first_UD, second_UD.sqrt().add_(eps), value=-size)
        for part, tensor in enumerate((rows_UD, first_UD, second_UD)):
            self._move("write", part, ids_U, tensor)

    def forget(self) -> None:
        """Drops the gradients of rows."""
        self._used.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """All rows with their moments, in memory."""
        every = torch.arange(self.num_rows)
        names = ("rows", "exp_avg", "exp_avg_sq")
        found = {name: torch.empty(self.num_rows, self.width) for name in names}
        for part, tensor in enumerate(found.values()):
            self._move("fetch", part, every, tensor)
        return {**found, "step": torch.tensor(self.num_steps)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        shape = torch.empty(self.num_rows, self.width, device="meta")
        own = {**dict.fromkeys(("rows", "exp_avg", "exp_avg_sq"), shape), "step": torch.tensor(0)}
        require_like(state, own, "the memory's state")
        for part, name in enumerate(("rows", "exp_avg", "exp_avg_sq")):
            self._move("write", part, torch.arange(self.num_rows), state[name])
        self.num_steps = int(state["step"])

    def close(self) -> None:
        self._file.close()

    def _read(self, part: int, ids_U: Tensor) -> Tensor:
        rows_UD = torch.empty(len(ids_U), self.width)
        self.read_bytes += rows_UD.nbytes
        self._move("fetch", part, ids_U, rows_UD)
        return rows_UD

    def _move(
        self, way: Literal["fetch", "write"], part: int, ids_U: Tensor, rows_UD: Tensor
    ) -> None:
        """Moves a part (rows or a moment) of rows, neighbours at once."""
        started = time.perf_counter()
        move, size = getattr(self._file, way), 4 * self.width
        content = host_view(rows_UD.contiguous().view(torch.uint8).flatten())
        starts = [0, *((ids_U.diff() != 1).nonzero().flatten() + 1).tolist(), len(ids_U)]
        for begin, end in itertools.pairwise(starts) if len(ids_U) else ():
            place = (part * self.num_rows + int(ids_U[begin])) * size
            move(place, content[begin * size : end * size])
        self.waited_s += time.perf_counter() - started
        if way == "write":
            self.written_bytes += rows_UD.nbytes


class MemoryLayer(nn.Module):
    """`W_2 (y * silu(W_1 x))`, where `y` is the weighted sum of the rows that fit best (Memory+).

    Attributes:
        rows: a pool that several layers may share; given before the first call.
    """

    def __init__(self, hidden_size: int, config: MemoryConfig) -> None:
        super().__init__()
        self.rows: ValueRows | None = None
        self.heads, self.top_k, self.half_width = config.heads, config.top_k, config.key_size // 2
        self.query_proj = Linear(hidden_size, config.heads * config.key_size, bias=False)
        keys = torch.randn(config.heads, 2, config.keys, self.half_width)
        self.keys = nn.Parameter(keys)
        self.query_norm, self.key_norm = (RMSNorm(self.half_width, 1e-6) for _ in range(2))
        self.gate_proj, self.down_proj = (
            Linear(hidden_size, hidden_size, bias=False) for _ in range(2)
        )
        for weight in (self.query_proj.weight, self.gate_proj.weight, self.down_proj.weight):
            nn.init.normal_(weight, std=hidden_size**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        assert self.rows is not None, "rows are given before the first call"
        x_TD = x.reshape(-1, x.shape[-1])
        queries = self.query_proj(x_TD).unflatten(-1, (self.heads, 2, self.half_width))
        queries_THSd = self.query_norm(queries.float())
        scores_THSN = torch.einsum("thsd,hsnd->thsn", queries_THSd, self.key_norm(self.keys))
        ids_THK, sums_THK = product_top_k(scores_THSN, self.top_k)
        shares = sums_THK.mul(self.half_width**-0.5).softmax(dim=-1).flatten(1)
        ids_U, places = ids_THK.flatten(1).unique(return_inverse=True)
        y_TD = F.embedding_bag(places, self.rows.used(ids_U), per_sample_weights=shares, mode="sum")
        return self.down_proj(y_TD.to(x.dtype) * F.silu(self.gate_proj(x_TD))).view(x.shape)


def add_memory(model: LanguageModel, config: MemoryConfig) -> None:
    """Puts memory layers in the place of some dense feed-forward networks."""
    device = model.embedding.weight.device
    if device.type != "cpu":
        raise ValueError(f"research.memory is for the CPU, got {device}; give run.device = 'cpu'")
    for layer in config.layers:
        block = model.blocks[layer]
        assert isinstance(block, Block), "the configuration refuses pairs of layers"
        block.feed_forward = MemoryLayer(model.config.hidden_size, config)


class MemoryOptimizer(Optimizer):
    """AdamW of everything in memory, and Adam of the rows that a step used, which do not decay."""

    def __init__(self, model: nn.Module, *options: Any, open_rows: Callable[[], ValueRows]) -> None:
        super().__init__(model, *options)
        self.rows = open_rows()
        for module in model.modules():
            if isinstance(module, MemoryLayer):
                module.rows = self.rows

    def backward(self, parts: Sequence[Callable[[], Tensor]], *, rate: float) -> None:
        self.rows.forget()  # of a step that failed
        super().backward(parts, rate=rate)

    def step(self, rate: float) -> StepOutcome:
        ids_U, grads_UD = self.rows.gradients()
        self.rows.forget()
        own = float(torch.linalg.vector_norm(grads_UD))
        norm = math.hypot(self.dense.norm(), own)
        outcome = self.dense.clipped_step(rate, self._clip_norm, norm)
        if outcome.bad_parameters and not math.isfinite(own):
            return StepOutcome(norm, ("the rows of the memory",))
        if outcome.bad_parameters:
            return outcome
        adamw = self.dense.adamw
        assert adamw is not None, "memory layers have parameters"
        (betas, eps) = (adamw.defaults[name] for name in ("betas", "eps"))
        scaled_UD = grads_UD * clip_scale(norm, self._clip_norm)
        self.rows.update(ids_U, scaled_UD, rate=rate, betas=betas, eps=eps)
        return outcome

    def transfers(self) -> dict[str, Any]:
        rows = self.rows
        return {
            "stall_s": rows.waited_s,
            "memory_bytes": 0,
            "read_bytes": rows.read_bytes,
            "written_bytes": rows.written_bytes,
        }

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "memory": self.rows.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({name: part for name, part in state.items() if name != "memory"})
        self.rows.load_state_dict(dict(state.get("memory") or {}))

    def close(self) -> None:
        super().close()
        self.rows.close()
