"""One layer's experts as transformers builds them, with random weights, to be measured."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_runtime.benchmarks.cases.layer_shapes import LAYER_SHAPES
from moe_runtime.benchmarks.cases.layer_shapes import LayerSizes as LayerSizes
from moe_runtime.benchmarks.peers.host import time_block as time_block
from moe_runtime.benchmarks.suite.results import Metric
from moe_runtime.benchmarks.suite.runner import (
    BenchSystem,
    Number,
    PeerFailedError,
    peer_failures,
)
from moe_runtime.config import require_known

PEERS = ("eager", "grouped_mm", "batched_mm")
"""Implementations of transformers."""
OURS = "moe_runtime"
# batched_mm copies an expert for every row; beyond this many bytes it is no contender.
_BATCHED_BYTES = 2 << 30
_HANDED = {"gate_up_proj", "down_proj"}


def kinds_of_calls(tokens: Sequence[int], *, trains: bool) -> Iterator[tuple[str, int, bool]]:
    """Metric, tokens and whether there is a backward pass, of each kind of call to be measured."""
    for has_backward in (False, True)[: 1 + trains]:
        for num_tokens in tokens:
            name = "backward" if has_backward else "forward"
            yield f"{name}_{num_tokens}_s", num_tokens, has_backward


@dataclass(frozen=True, kw_only=True)
class CallsPlan:
    """Which calls of a layer are measured."""

    tokens: Sequence[int]
    trains: bool
    block_s: float

    def calls(self) -> Iterator[tuple[str, int, bool]]:
        return kinds_of_calls(self.tokens, trains=self.trains)

    def metrics(self) -> dict[str, Metric]:
        """Seconds of each kind of call."""
        return {name: Metric("s") for name, _, _ in self.calls()}


class CallsSystem(BenchSystem):
    """A layer under test; tokens are compared."""

    def __init__(self, name: str, plan: CallsPlan) -> None:
        super().__init__(name)
        self._plan = plan

    def takes(self, num_tokens: int, *, trains: bool) -> bool:
        """Whether it has room and time for a kind of call."""
        del num_tokens, trains
        return True

    @abstractmethod
    def call(self, num_tokens: int, *, trains: bool) -> Callable[[int], Tensor]:
        """A call, which is given its number."""

    @abstractmethod
    def num_equal(self, metric: str, found: Tensor, *, trains: bool) -> tuple[int, int]:
        """How many tokens of a result are compared, and how many agree."""

    def repeat(self) -> Mapping[str, Number]:
        """Measures every kind of call; before the first time, compares results."""
        kinds = [one for one in self._plan.calls() if self.takes(one[1], trains=one[2])]
        with peer_failures():
            if not self.compared:
                for name, tokens, trains in kinds:
                    found = self.call(tokens, trains=trains)(0)
                    compared, equal = self.num_equal(name, found, trains=trains)
                    self.compared, self.equal = self.compared + compared, self.equal + equal
                self.require_all_equal()
            return {
                name: time_block(self.call(tokens, trains=trains), self._plan.block_s)
                for name, tokens, trains in kinds
            }


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """A module of experts in memory, and what its calls need."""

    module: Any
    num_experts: int
    top_k: int
    dim_model: int
    dim_hidden: int

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where weights and tokens are."""
        return next(self.module.parameters()).device

    @property
    def expert_bytes(self) -> int:
        return sum(p[0].nbytes for p in self.module.parameters() if len(p) == self.num_experts)

    @property
    def input_rounding(self) -> float:
        """How far roundings of what is multiplied by weights move a result, relative to it."""
        return 0.0

    def select(self, implementation: str) -> None:
        """Has later calls computed by an implementation."""
        self.module.config._experts_implementation_internal = implementation

    def routing(self, num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        """Uniform top-k ids and normalised gate weights, ``[T, K]``."""
        generator = torch.Generator().manual_seed(seed)
        scores = torch.rand(num_tokens, self.num_experts, generator=generator)
        weights, ids = scores.topk(self.top_k)
        shares = weights / weights.sum(-1, keepdim=True)
        return ids.to(self.device), shares.to(self.device, self.dtype)

    def tokens(self, num_tokens: int) -> Tensor:
        generator = torch.Generator().manual_seed(99)
        drawn = torch.randn(num_tokens, self.dim_model, generator=generator)
        return drawn.to(self.device, self.dtype)

    def contenders(self, num_tokens: int, *, trains: bool) -> list[str]:
        """The implementations of transformers that have room and time for a call."""
        copied = num_tokens * self.top_k * self.expert_bytes * (2 if trains else 1)
        no_room = {"batched_mm"} if copied > _BATCHED_BYTES else set()
        # Eager's backward fills a gradient of all experts for each: a minute for many experts.
        slow = {"eager"} if trains and self.num_experts > 8 else set()
        return [name for name in PEERS if name not in no_room | slow]

    def in_float64(self, ids: Tensor) -> tuple[Any, Tensor]:
        """The experts of some tokens alone in float64, computed one by one, and the ids there."""
        kept, places = ids.unique(return_inverse=True)
        few = copy.copy(self.module)
        few._parameters = {
            name: torch.nn.Parameter(value[kept].double(), requires_grad=False)
            if len(value) == self.num_experts
            else value
            for name, value in self.module.named_parameters(recurse=False)
        }
        few.config = copy.copy(self.module.config)
        few.config._experts_implementation_internal = "eager"
        few.num_experts = len(kept)
        return few, places

    def handed_parts(self) -> Iterator[tuple[str, Tensor]]:
        """What a peer in another process is given: gate and up ``[E, F, D]``, down ``[E, D,
        F]``."""
        found = {name: value.detach() for name, value in self.module.named_parameters()}
        is_transposed = getattr(self.module, "is_transposed", False)
        if self.dtype != torch.bfloat16 or found.keys() != _HANDED or is_transposed:
            kind = str(self.dtype).removeprefix("torch.")
            told = f"{', '.join(sorted(found))} in {kind}{', transposed' * is_transposed}"
            raise PeerFailedError(
                f"takes gate_up_proj and down_proj in bfloat16; this layer has {told}"
            )
        gate, up = found["gate_up_proj"].chunk(2, dim=1)
        yield from (("gate", gate), ("up", up), ("down", found["down_proj"]))


def synthetic_layer(name: str, dtype: torch.dtype) -> ExpertLayer:
    """The experts of a known model with random weights."""
    from transformers import CONFIG_MAPPING
    from transformers.models import gpt_oss, mixtral, olmoe, qwen3_moe

    require_known("shape", name, LAYER_SHAPES)
    shape = LAYER_SHAPES[name]
    home = {"mixtral": mixtral, "olmoe": olmoe, "qwen3_moe": qwen3_moe, "gpt_oss": gpt_oss}
    config_class: Any = CONFIG_MAPPING[shape.model_type]
    config = config_class(
        hidden_size=shape.dim_model,
        intermediate_size=shape.dim_hidden,
        moe_intermediate_size=shape.dim_hidden,
        num_experts=shape.num_experts,
        num_local_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
    )
    code = getattr(home[shape.model_type], f"modeling_{shape.model_type}")
    with torch.device("meta"):
        module = getattr(code, shape.experts_class)(config)
    return _drawn(module, dtype, shape.num_experts, shape.top_k)


def layer_of_model(model: str | Path, dtype: str | torch.dtype) -> ExpertLayer:
    """The first layer of experts of a checkpoint, with random weights."""
    module, found_dtype, num_experts, top_k = _of_model(model, dtype)
    return _drawn(module, found_dtype, num_experts, top_k)


def sizes_of_model(model: str | Path, dtype: str | torch.dtype) -> tuple[LayerSizes, torch.dtype]:
    """Sizes of the first layer of experts of a checkpoint, and the type to compute in."""
    module, found_dtype, num_experts, top_k = _of_model(model, dtype)
    return LayerSizes(num_experts, top_k, *_dims(module)), found_dtype


def _of_model(model: str | Path, dtype: str | torch.dtype) -> tuple[Any, torch.dtype, int, int]:
    from moe_runtime.checkpoints.expert_map import chosen_per_token, find_experts
    from moe_runtime.checkpoints.opening import build_on_meta, found_headers, open_checkpoint

    with found_headers(model) as folder:
        checkpoint = open_checkpoint(folder, dtype)
        found = find_experts(built := build_on_meta(checkpoint))[0]
    top_k = chosen_per_token(built, [found])
    return found.module, checkpoint.dtype, found.num_experts, top_k


def _dims(module: Any) -> tuple[int, int]:
    down = tuple(module.down_proj.shape[1:])
    return (down[1], down[0]) if getattr(module, "is_transposed", False) else down


def _drawn(module: Any, dtype: torch.dtype, num_experts: int, top_k: int) -> ExpertLayer:
    module = module.to(dtype).to_empty(device="cpu").eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        # One expert is drawn, the others are its rows in another order: drawing all takes minutes.
        pattern = torch.randn(parameter.shape[1:], generator=generator).to(dtype) * 0.02
        for expert in range(len(parameter)):
            parameter.data[expert] = pattern.roll(expert, dims=0)
    dim_model, dim_hidden = _dims(module)
    return ExpertLayer(
        module=module,
        num_experts=num_experts,
        top_k=top_k,
        dim_model=dim_model,
        dim_hidden=dim_hidden,
    )
