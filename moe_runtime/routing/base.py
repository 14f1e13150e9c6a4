"""`Gate`: the base of all gates.

Shape suffixes: T tokens, D model width, E experts, K choices of a token.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from types import MappingProxyType, NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypedDict, get_args, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel

from moe_runtime.config import is_number, type_in_words
from moe_runtime.kernels.operands import without_autocast
from moe_runtime.routing.capacity import Capacity, expert_slots
from moe_runtime.routing.losses import LOSSES, LossInputs, check_loss_names
from moe_runtime.routing.value import Policy, Routing, expert_counts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class RoutingContext:
    """Inputs of some gates besides the hidden states.

    Attributes:
        token_ids_T: `[T]` int64 token numbers (hash routing).
        previous_logits_TE: Raw scores of the previous layer's gate (MoE++'s gating residual).
        num_sequences: Sequences in the batch, consecutive tokens each (sequence-level loss).
        sequence_T: `[T]` int64: the sequence of each token; None means equal lengths.
        generator: Source of randomness; None means torch's own.
    """

    token_ids_T: Tensor | None = None
    previous_logits_TE: Tensor | None = None
    num_sequences: int = 1
    sequence_T: Tensor | None = None
    generator: torch.Generator | None = None


@dataclass(frozen=True, eq=False)
class Choice:
    """The choice of a gate, before capacity.

    Attributes:
        ids_TK: `[T, K]` int64, `E` where the token uses fewer experts.
        weights_TK: `[T, K]`, 0 there.
        logits_TE: Raw scores.
        probs_TE: Scores as shares of 1 in each row.
        own_losses: Losses that only this gate has.
        policy: Of a choice that was sampled.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    logits_TE: Tensor
    probs_TE: Tensor
    own_losses: Mapping[str, Callable[[], Tensor]] | None = None
    policy: Policy | None = None


class GateOptions(TypedDict, total=False):
    """Keyword arguments that every gate takes; see `Gate`."""

    capacity: Capacity | None
    num_groups: int
    loss_weights: Mapping[str, float] | None
    name: str
    device: torch.device | str | None
    dtype: torch.dtype | None


class Gate(nn.Module, ABC):
    """Scores experts and chooses some of them for each token.

    Scores are computed in fp32 (fp64 for fp64 inputs), also under autocast.

    Args:
        capacity: None is dropless.
        num_groups: Consecutive parts of the batch that are routed on their own (GShard).
        loss_weights: Coefficients of the losses to compute, by name; None means
            `default_loss_weights`, an empty mapping none.
        name: How errors call this gate.
        num_scores: Columns of the scores where more than the experts can be chosen.

    Attributes:
        weight: `[E, D]`, or None for a gate without a linear map.
        batch_group: Processes that route other tokens of the same batch, for the loss
            `global_balance`; None means those of the surrounding `DistributedDataParallel`, if any.
        step_counts_E: `[E]` int64: choices since the last `after_step`, for that loss. No buffer:
            `DistributedDataParallel` would overwrite it, and no checkpoint holds it.

    Raises:
        ValueError: Sizes that cannot work, or an unknown loss.
    """

    def __new__(cls, *sizes: int, **options: Any) -> Self:
        """Checks the types of options before any gate's own checks."""
        del sizes
        _check_types(cls, options)
        return super().__new__(cls)

    default_loss_weights: ClassVar[Mapping[str, float]] = {"load_balance": 0.01}
    own_loss_names: ClassVar[tuple[str, ...]] = ()
    is_linear: ClassVar[bool] = True
    fixed_top_k: ClassVar[int | None] = None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        capacity: Capacity | None = None,
        num_groups: int = 1,
        loss_weights: Mapping[str, float] | None = None,
        name: str = "gate",
        num_scores: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(hidden_size, num_experts, top_k, num_groups)
        if self.fixed_top_k not in (None, top_k):
            raise ValueError(
                f"{type(self).__name__} routes with top_k={self.fixed_top_k}, got {top_k}"
            )
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.capacity = capacity
        self.num_groups = num_groups
        self.name = name
        self.loss_weights = dict(
            self.default_loss_weights if loss_weights is None else loss_weights
        )
        check_loss_names(self.loss_weights, {**LOSSES, **dict.fromkeys(self.own_loss_names)})
        num_scores = num_scores or num_experts
        self.weight: nn.Parameter | None = None
        if self.is_linear:
            self.weight = nn.Parameter(
                torch.empty(num_scores, hidden_size, device=device, dtype=dtype)
            )
        self.batch_group: ProcessGroup | None = None
        self._replicas: ProcessGroup | None = None
        self.step_counts_E: Tensor | None = None
        if self.loss_weights.get("global_balance"):
            self.step_counts_E = torch.zeros(num_scores, dtype=torch.int64, device=device)
        self.register_load_state_dict_post_hook(_place_counts)
        Gate.reset_parameters(self)

    def reset_parameters(self) -> None:
        """Normal with standard deviation `1 / sqrt(hidden_size)`; counts begin at 0."""
        if self.weight is not None:
            nn.init.normal_(self.weight, std=1 / math.sqrt(self.hidden_size))
        for counts_E in (getattr(self, name, None) for name in _COUNTS):
            if counts_E is not None:
                counts_E.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As in `nn.Module`; counts move too, and begin at 0 when they leave the meta device."""
        super()._apply(fn, recurse)
        for name in _COUNTS:
            counts_E: Tensor | None = getattr(self, name, None)
            if counts_E is not None:
                device = fn(counts_E).device
                is_new = counts_E.is_meta or device.type == "meta"
                moved_E = torch.zeros_like(counts_E, device=device) if is_new else counts_E
                setattr(self, name, moved_E.to(device))
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold no process group of a surrounding wrapper."""
        return {**self.__dict__, "_replicas": None}

    def forward(self, x_TD: Tensor, context: RoutingContext | None = None) -> Routing:
        """Routes the tokens.

        Raises:
            ValueError: The batch does not divide into groups or sequences, or a score is not a
                number (checked on the CPU only: elsewhere it would wait for the device).
        """
        context = context or RoutingContext()
        self.check_batch(x_TD, context)
        if (wrapper := surrounding_ddp()) is not None:
            self._replicas = wrapper.process_group
        with without_autocast(x_TD.device.type):
            return self.finish(self.decide(x_TD, context), context)

    def decide(self, x_TD: Tensor, context: RoutingContext) -> Choice:
        logits_TE = self.logits(x_TD, context)
        self.check_logits(logits_TE)
        return self.choose(logits_TE, context)

    def logits(self, x_TD: Tensor, context: RoutingContext) -> Tensor:
        """`[T, E]` raw scores: a linear map of the tokens, in fp32 or fp64."""
        assert self.weight is not None, "a gate without a linear map has its own logits"
        precise = score_dtype(x_TD)
        return F.linear(x_TD.to(precise), self.weight.to(precise))

    def after_step(self, group: ProcessGroup | None = None, *, skipped: bool = False) -> None:
        """Updates the gate between optimizer steps: call it after each.

        Args:
            group: Processes that train copies of this gate; None means those of the
                `DistributedDataParallel` that the gate was last called in, if it was.
            skipped: Gradients were not finite and the optimizer changed nothing: the gate changes
                nothing either, and forgets what it counted.
        """
        if self.step_counts_E is not None:
            self.step_counts_E.zero_()

    @abstractmethod
    def choose(self, logits_TE: Tensor, context: RoutingContext) -> Choice:
        """Chooses experts and their weights from raw scores: score, bias, top-k, normalise."""

    def finish(self, choice: Choice, context: RoutingContext) -> Routing:
        """Computes the losses of a choice and applies capacity to it."""
        losses = self.losses(choice, context)
        num_experts = choice.probs_TE.shape[1]
        own = {"logits_TE": choice.logits_TE, "policy": choice.policy}
        if self.capacity is None:
            return Routing(choice.ids_TK, choice.weights_TK, num_experts, losses, **own)
        slots_TK, is_kept_TK = self.places(choice, self.capacity)
        return Routing(
            choice.ids_TK.masked_fill(~is_kept_TK, num_experts),
            choice.weights_TK.masked_fill(~is_kept_TK, 0.0),
            num_experts,
            losses,
            demand_E=expert_counts(choice.ids_TK, num_experts),
            slots_TK=slots_TK.masked_fill(~is_kept_TK, -1),
            **own,
        )

    def losses(self, choice: Choice, context: RoutingContext) -> dict[str, Tensor]:
        """The losses that have a coefficient."""
        inputs = LossInputs(
            choice.logits_TE,
            choice.probs_TE,
            choice.ids_TK,
            choice.weights_TK,
            self.num_groups,
            context.num_sequences,
            self._batch_counts(choice),
            context.sequence_T,
        )
        own = choice.own_losses or {}
        return {
            name: own[name]() if name in own else LOSSES[name](inputs)
            for name, weight in self.loss_weights.items()
            if weight
        }

    def _batch_counts(self, choice: Choice) -> Tensor | None:
        """`[E]` int64: choices in the batch, of other processes and of the step's calls so far.

        None without `global_balance` or training. A call that activation checkpointing makes again
        counts once. The gradient is exact where each forward pass is followed by its backward pass.
        """
        if self.step_counts_E is None or not (self.training and torch.is_grad_enabled()):
            return None
        if not is_made_again():
            counts_E = expert_counts(choice.ids_TK, len(self.step_counts_E))
            if (group := self.batch_group or self._replicas) is not None:
                torch.distributed.all_reduce(counts_E, group=group)
            self.step_counts_E += counts_E
        return self.step_counts_E.clone()

    def places(self, choice: Choice, capacity: Capacity) -> tuple[Tensor, Tensor]:
        """Place of each choice among those of its expert, and whether it is kept."""
        ids_TK, num_experts = choice.ids_TK, choice.probs_TE.shape[1]
        slots_TK = expert_slots(
            ids_TK,
            choice.weights_TK,
            num_experts,
            policy=capacity.policy,
            num_groups=self.num_groups,
        )
        limit = self.slot_limit(capacity, len(ids_TK) // self.num_groups)
        if isinstance(limit, Tensor):  # one limit for each expert; sentinels take none
            limit = F.pad(limit, (0, 1))[ids_TK]
        return slots_TK, (slots_TK < limit) & (ids_TK < num_experts)

    def slot_limit(self, capacity: Capacity, group_size: int) -> int | Tensor:
        """Choices that an expert takes from a group: one number, or one for each expert."""
        return capacity.slots_per_expert(group_size, self.top_k, self.num_experts)

    def check_batch(self, x_TD: Tensor, context: RoutingContext) -> None:
        if x_TD.ndim != 2 or x_TD.shape[1] != self.hidden_size:
            raise ValueError(
                f"{self.name}: expected tokens [T, {self.hidden_size}], got {list(x_TD.shape)}"
            )
        if x_TD.is_meta:
            raise ValueError(
                f"{self.name}: meta tensors have no values to choose experts by; shapes alone are "
                "found within torch's FakeTensorMode"
            )
        num_tokens = x_TD.shape[0]
        if num_tokens % self.num_groups:
            raise ValueError(
                f"{self.name}: {num_tokens} tokens do not divide into num_groups="
                f"{self.num_groups}; pad the batch or change num_groups"
            )
        is_equal = context.sequence_T is None
        if context.num_sequences < 1 or (is_equal and num_tokens % context.num_sequences):
            raise ValueError(
                f"{self.name}: {num_tokens} tokens do not divide into "
                f"{context.num_sequences} sequences"
            )

    def check_logits(self, logits_TE: Tensor) -> None:
        """Refuses scores that are not numbers, on the CPU; fake tensors have none."""
        if not logits_TE.is_cpu or torch.compiler.is_compiling():
            return
        all_finite = logits_TE.detach().isfinite().all()
        if isinstance(all_finite, FakeTensor):
            return
        try:
            is_sound = bool(all_finite)
        except RuntimeError as error:  # asked for one number, torch.func.vmap has several
            raise ValueError(
                f"{self.name}: torch.func.vmap hides the scores that experts are chosen by; call "
                "the layer with all rows at once, [B, T, D]"
            ) from error
        if not is_sound:
            rows = (~logits_TE.detach().isfinite().all(dim=1)).nonzero().flatten()
            raise ValueError(
                f"{self.name}: the scores of {rows.numel()} of {logits_TE.shape[0]} tokens are "
                f"not finite (the first is token {int(rows[0])}); the hidden states or the "
                f"gate's weights hold NaN or infinity"
            )

    def extra_repr(self) -> str:
        names = ("hidden_size", "num_experts", "top_k", "capacity")
        return ", ".join(f"{n}={v}" for n in names if (v := getattr(self, n)) is not None)


_NUMBERS: Mapping[type, type] = MappingProxyType({int: Integral, float: Real})
_COUNTS = ("step_counts_E", "load_E")
"""Attributes of gates that count since the last step."""


def _place_counts(gate: nn.Module, _: object) -> None:
    """Takes counts off the meta device where loading assigned weights of another."""
    held = next(itertools.chain(gate.parameters(), gate.buffers()), None)
    for name in _COUNTS:
        counts_E: Tensor | None = getattr(gate, name, None)
        if held is not None and counts_E is not None and counts_E.is_meta:
            setattr(gate, name, torch.zeros_like(counts_E, device=held.device))


def surrounding_ddp() -> DistributedDataParallel | None:
    """The `DistributedDataParallel` in whose forward pass this is, in compiled code too."""
    return DistributedDataParallel._active_ddp_module


def is_made_again() -> bool:
    """Whether activation checkpointing makes a call again, in the backward pass, that counted.

    A reentrant checkpoint makes its first call without gradients, so that its second one counts.
    """
    if torch.compiler.is_compiling():
        return False
    node = torch._C._current_autograd_node()
    return node is not None and node.name() != "CheckpointFunctionBackward"


def place_of(options: GateOptions) -> dict[str, Any]:
    """Device and dtype among the options of a gate."""
    return {"device": options.get("device"), "dtype": options.get("dtype")}


def score_dtype(x: Tensor) -> torch.dtype:
    """The precision of scores: fp64 for fp64, fp32 for all else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _check_types(kind: type[Gate], options: Mapping[str, Any]) -> None:
    """Refuses options whose values have another type than the gate's signature says."""
    hints: dict[str, Any] = {}
    try:
        for base in reversed(kind.__mro__[: kind.__mro__.index(Gate)]):
            hints |= get_type_hints(base.__init__) if "__init__" in vars(base) else {}
    except NameError:  # a gate from outside may name types that exist for checkers alone
        return
    for option, value in options.items():
        hint = hints.get(option)
        kinds: tuple[Any, ...] = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if not all(isinstance(one, type) for one in kinds):
            continue
        if not any(
            is_number(value, _NUMBERS[one]) if one in _NUMBERS else isinstance(value, one)
            for one in kinds
        ):
            words = " or ".join(type_in_words(one) for one in kinds if one is not NoneType)
            raise ValueError(
                f"option {option!r} of gate {kind.__name__} must be {words}, got {value!r}"
            )


def _check_sizes(hidden_size: int, num_experts: int, top_k: int, num_groups: int) -> None:
    for label, value in (
        ("hidden_size", hidden_size),
        ("num_experts", num_experts),
        ("top_k", top_k),
        ("num_groups", num_groups),
    ):
        if type(value) is not int or value < 1:
            raise ValueError(f"{label} must be an integer of at least 1, got {value!r}")
    if top_k > num_experts:
        raise ValueError(f"top_k must be at most num_experts={num_experts}, got {top_k}")
