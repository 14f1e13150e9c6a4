"""`MoELayer`: a Mixture-of-Experts layer in place of a feed-forward block.

Shape suffixes: T tokens, D model width, E experts, K choices of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from moe_runtime.kernels.expert_mlp.op import ExpertMlpImpl, check_impl
from moe_runtime.layer.activations import activation_named
from moe_runtime.layer.aux import AttachLoss, LayerAux, weighted_loss
from moe_runtime.layer.experts import (
    Experts,
    HeterogeneousExperts,
    SharedExperts,
    ZeroExperts,
    compute_dtype,
)
from moe_runtime.routing import (
    Capacity,
    DropPolicy,
    Gate,
    MoEPlusPlus,
    Routing,
    RoutingContext,
    ZeroExpertCounts,
    make_gate,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from moe_runtime.parallel import ExpertGroup, ExpertSpread


class TokenParts(Protocol):
    """Processes that have parts of the same sequences."""

    def gather(self, part: Tensor, /) -> Tensor:
        """`[B, S, ...]`, all tokens of the sequences, of every process's part of them."""
        ...

    def own_choices(self, routing: Routing, num_sequences: int, /) -> Routing:
        """The choices of this process's tokens, of those of all tokens."""
        ...


class MoELayer(nn.Module):
    """Each token visits `top_k` of `num_experts` feed-forward networks, chosen by a gate.

    `y = sum_k weight_k * expert_k(x) + shared(x)`. Dropless unless `capacity_factor` is given.

    Args:
        hidden_size: Width of the tokens.
        intermediate_size: Width inside one expert; or one width for each.
        gate: A name of `moe_runtime.routing.GATES`, or a gate of that width and those experts.
        gate_options: Keyword arguments of the named gate.
        activation: A name of `moe_runtime.layer.activations.ACTIVATIONS`.
        bias: Experts with biases.
        shared_experts: Experts that every token visits too, each `intermediate_size` wide.
        shared_expert_gate: Multiplies their output by `sigmoid(w x)` (Qwen2-MoE).
        capacity_factor: An expert takes `ceil(capacity_factor * tokens * top_k / num_experts)`
            choices of a group; None means dropless.
        drop_policy: Which choices are kept: see `moe_runtime.routing.Capacity`.
        num_groups: Consecutive parts of the batch that are routed on their own (GShard).
        loss_weights: Coefficients of the auxiliary losses by name; None means the gate's own.
        zero_experts: Zero-computation experts next to the routed ones (MoE++), as counts or by kind
            (`constant`, `copy`, `zero`); they need the gate `moepp`, which `softmax_topk` then
            means.
        attach_losses: The backward pass of the output also computes the gradients of `aux.loss`
            (times `loss_scale`): it must not be added to the training loss.
        impl: Implementation of `kernels.expert_mlp`.
        recompute: The backward pass computes the experts' pre-activations again.
        group: The processes that the routed experts are spread over: a process group, a
            `ParallelLayout` or the `LayoutGroups` made of one, or, with options, an `ExpertSpread`
            of any of them (all of `moe_runtime.parallel`). All processes make the layer, and call
            it, together. None for this process alone.
        experts: What runs the routed experts instead of `Experts`: a module called with `(x_TD,
            ids_TK, weights_TK)`.
        name: How errors call this layer.

    Attributes:
        aux: `LayerAux` of the last call; None before the first.
        parts: What holds the other tokens of the sequences. The gate then sees all tokens and the
            experts this process's; `token_ids` and `aux` are of all tokens. None where all are
            here.
        loss_scale: Factor of attached losses: the scale of a gradient scaler, or 1 over the number
            of micro-batches.

    Raises:
        ValueError: Sizes that cannot work, or unknown names.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int | Sequence[int],
        num_experts: int,
        top_k: int,
        *,
        gate: str | Gate = "softmax_topk",
        gate_options: Mapping[str, Any] | None = None,
        activation: str = "swiglu",
        bias: bool = False,
        shared_experts: int = 0,
        shared_expert_gate: bool = False,
        capacity_factor: float | None = None,
        drop_policy: DropPolicy = "choice",
        num_groups: int = 1,
        loss_weights: Mapping[str, float] | None = None,
        zero_experts: ZeroExpertCounts | Mapping[str, int] | None = None,
        attach_losses: bool = False,
        impl: ExpertMlpImpl = "auto",
        recompute: bool = False,
        group: ExpertGroup | ExpertSpread | None = None,
        experts: nn.Module | None = None,
        name: str = "MoELayer",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_widths(intermediate_size, num_experts)
        check_impl(impl)
        if type(shared_experts) is not int or shared_experts < 0:
            raise ValueError(f"shared_experts must be an integer from 0 on, got {shared_experts!r}")
        self.name = name
        self.hidden_size = hidden_size
        self.attach_losses = attach_losses
        self.loss_scale = 1.0
        self.parts: TokenParts | None = None
        self.aux: LayerAux | None = None
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        kind: dict[str, Any] = {"activation": activation, "bias": bias, **place}
        ways: dict[str, Any] = {"impl": impl, "recompute": recompute}
        if isinstance(gate, Gate):
            own = {
                "gate_options": gate_options,
                "capacity_factor": capacity_factor,
                "num_groups": None if num_groups == 1 else num_groups,
                "loss_weights": loss_weights,
                "zero_experts": zero_experts,
            }
            for option, value in own.items():
                if value is not None:
                    raise ValueError(
                        f"{option} belongs to the gate that was given: make the gate with it"
                    )
            self.gate = gate
            expected = (hidden_size, num_experts, top_k)
            if (got := (gate.hidden_size, gate.num_experts, gate.top_k)) != expected:
                raise ValueError(
                    f"{name}: the gate was made for (hidden_size, num_experts, top_k) = {got}, "
                    f"the layer for {expected}"
                )
        else:
            is_dropless = capacity_factor is None
            options: dict[str, Any] = {
                "capacity": None if is_dropless else Capacity(capacity_factor, drop_policy),
                "num_groups": num_groups,
                "loss_weights": loss_weights,
                "name": f"the gate of {name}",
                **place,
            }
            for option in options.keys() & (gate_options or {}):
                raise ValueError(f"gate_options has {option!r}, which the layer itself gives")
            options |= gate_options or {}
            gate, options = _with_zero_experts(gate, zero_experts, options)
            self.gate = make_gate(gate, hidden_size, num_experts, top_k, **options)
        if experts is not None:
            if group is not None:
                raise ValueError("give either group or experts: experts know their own group")
            self.experts = experts
        elif group is not None:
            if not isinstance(intermediate_size, int):
                raise ValueError("experts of several widths cannot be spread over a group")
            from moe_runtime.parallel import ExpertSpread

            spread = group if isinstance(group, ExpertSpread) else ExpertSpread(groups=group)
            formula = activation_named(activation)
            self.experts = spread.make_experts(
                num_experts,
                hidden_size,
                intermediate_size,
                activation=formula.spec,
                has_gate=formula.has_gate,
                bias=bias,
                **ways,
                **place,
            )
        elif isinstance(intermediate_size, int):
            self.experts = Experts(num_experts, hidden_size, intermediate_size, **ways, **kind)
        else:
            self.experts = HeterogeneousExperts(hidden_size, intermediate_size, **ways, **kind)
        self.zero: ZeroExperts | None = None
        if isinstance(self.gate, MoEPlusPlus):
            self.zero = ZeroExperts(self.gate.zero_experts, hidden_size, **place)
        self.shared: SharedExperts | None = None
        if shared_experts:
            if not isinstance(intermediate_size, int):
                raise ValueError("shared_experts need one intermediate_size, got a list of them")
            width = shared_experts * intermediate_size
            self.shared = SharedExperts(hidden_size, width, gated=shared_expert_gate, **kind)

    def forward(
        self,
        x: Tensor,
        *,
        token_ids: Tensor | None = None,
        previous_logits: Tensor | None = None,
        padding_mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Routes and computes.

        Args:
            x: `[..., D]`; with three or more dimensions the last but one is the sequence.
            token_ids: Token numbers `[...]`, for hash routing.
            previous_logits: `aux.routing.logits_TE` of the previous layer, for MoE++.
            padding_mask: `[...]` as `x`, or `[T]` of all its tokens; bool, True is a real token.
                The results are those of a batch of the real tokens alone; the output of the others
                is 0. None means that all are real. Finding them waits for the mask's device.
            generator: Randomness of gates that use some; None means torch's own.

        Returns:
            `[..., D]` in the dtype of `x` (under autocast in autocast's).

        Raises:
            ValueError: A width, type or batch that does not fit, scores that are not numbers or
                cannot be seen (meta tensors, `torch.func.vmap`), or derivatives in forward mode or
                by `torch.func` of an `impl` other than `auto` and `reference`.
            RuntimeError: A second derivative is asked of kernels: make the layer with
                `impl="reference"` for those.
        """
        routing = self.route(
            x,
            token_ids=token_ids,
            previous_logits=previous_logits,
            padding_mask=padding_mask,
            generator=generator,
        )
        return self.compute(x, routing)

    def route(
        self,
        x: Tensor,
        *,
        token_ids: Tensor | None = None,
        previous_logits: Tensor | None = None,
        padding_mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Routing:
        """The first half of `forward`: chooses the experts of each token."""
        if x.ndim < 1 or x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"{self.name}: expected [..., {self.hidden_size}], got {list(x.shape)}"
            )
        if not x.is_floating_point() or x.dtype.itemsize < 2:
            raise ValueError(
                f"{self.name}: expected floating-point numbers of 16 bits or more, got {x.dtype}"
            )
        if self.parts is not None:
            x = self.parts.gather(x)
        x_TD = x.reshape(-1, self.hidden_size)
        num_sequences = max(1, math.prod(x.shape[:-2])) if x.ndim > 2 else 1
        context = RoutingContext(
            token_ids_T=None if token_ids is None else token_ids.reshape(-1),
            previous_logits_TE=previous_logits,
            num_sequences=num_sequences,
            generator=generator,
        )
        if padding_mask is None:
            return self.gate(x_TD, context)
        rows_R = self._real_rows(x, padding_mask)

        def real(values: Tensor | None, label: str) -> Tensor | None:
            if values is not None and len(values) != len(x_TD):
                raise ValueError(
                    f"{self.name}: {label} must be of all {len(x_TD)} tokens, padding included, "
                    f"got {len(values)}"
                )
            return None if values is None else values[rows_R]

        context = replace(
            context,
            token_ids_T=real(context.token_ids_T, "token_ids"),
            previous_logits_TE=real(previous_logits, "previous_logits"),
            sequence_T=rows_R // max(1, len(x_TD) // num_sequences),
        )
        return self.gate(x_TD[rows_R], context).among_padding(rows_R, len(x_TD))

    def _real_rows(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        """`[R]` int64: the rows of `x` that are not padding."""
        if self.parts is not None:
            raise ValueError(
                f"{self.name}: padding_mask does not go together with sequences that are divided "
                "among processes; leave one of them out"
            )
        shapes = (x.shape[:-1], (math.prod(x.shape[:-1]),))
        if padding_mask.dtype != torch.bool or tuple(padding_mask.shape) not in shapes:
            raise ValueError(
                f"{self.name}: padding_mask must be bool {list(x.shape[:-1])}, True for real "
                f"tokens, got {padding_mask.dtype} {list(padding_mask.shape)}"
            )
        return padding_mask.reshape(-1).nonzero().squeeze(1).to(x.device)

    def compute(self, x: Tensor, routing: Routing) -> Tensor:
        """The second half of `forward`: the chosen experts, the shared ones, and `aux`."""
        return self.begin(x, routing)()

    def begin(self, x: Tensor, routing: Routing) -> Callable[[], Tensor]:
        """As `compute`, in two parts: sends rows for experts of other processes, and returns a
        function that computes the rest."""
        x_TD = x.reshape(-1, self.hidden_size)
        own = routing if self.parts is None else self.parts.own_choices(routing, len(x))
        if own.rows_R is not None:
            x_TD, own = x_TD[own.rows_R], own.without_padding()
        shared, options = self.shared, {}
        if shared is not None and getattr(self.experts, "overlaps_shared", False):
            # Computed there while rows travel.
            shared, options = None, {"shared": shared}
        choices = (x_TD, own.ids_TK, own.weights_TK)
        if getattr(self.experts, "begins_early", False):
            pending = self.experts(*choices, **options, later=True)
        else:
            pending = partial(self.experts, *choices, **options)
        return partial(self._finish, x, x_TD, pending, shared, routing, own)

    def _finish(
        self,
        x: Tensor,
        x_TD: Tensor,
        pending: Callable[[], Tensor],
        shared: nn.Module | None,
        routing: Routing,
        own: Routing,
    ) -> Tensor:
        """The part after the routed experts; `own` are the choices of the rows `x_TD`."""
        out_TD = pending()
        if self.zero is not None and own.zero is not None:
            out_TD = out_TD + self.zero(x_TD, own.zero)
        if shared is not None:
            out_TD = out_TD + shared(x_TD)
        if routing.rows_R is not None:
            zeros_TD = out_TD.new_zeros(len(routing.ids_TK), self.hidden_size)
            out_TD = zeros_TD.index_copy(0, routing.rows_R, out_TD)
        loss = weighted_loss(routing.losses, self.gate.loss_weights, routing.weights_TK)
        if self.attach_losses and torch.is_grad_enabled() and loss.requires_grad:
            out_TD = cast(Tensor, AttachLoss.apply(out_TD, loss, self.loss_scale))
            loss = loss.detach()
        self.aux = LayerAux(routing, routing.losses, loss)
        out_TD = out_TD.to(compute_dtype(x))
        # wrappers such as FSDP warn of views
        return out_TD if x.ndim == 2 else out_TD.view(x.shape)

    def after_step(self, group: ProcessGroup | None = None, *, skipped: bool = False) -> None:
        """Updates the gate between optimizer steps (selection bias, annealing): call it after each.

        Args:
            group: Processes that train copies of this layer; None means those of the
                `DistributedDataParallel` that the layer was last called in, if it was.
            skipped: Gradients were not finite and the optimizer changed nothing; the gate changes
                nothing then.
        """
        self.gate.after_step(group, skipped=skipped)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles drop the last call, whose tensors belong to a graph."""
        return {**self.__dict__, "aux": None}


def _check_widths(widths: int | Sequence[int], num_experts: int) -> None:
    numbers = widths if isinstance(widths, Sequence) else (widths,)
    if any(type(number) is not int or number < 1 for number in numbers):
        raise ValueError(
            "intermediate_size must be an integer of at least 1, or a list of one for each "
            f"expert, got {widths!r}"
        )
    if numbers is widths and len(numbers) != num_experts:
        raise ValueError(
            f"intermediate_size must be one number, or one for each of {num_experts} experts; got "
            f"{len(numbers)} numbers"
        )


def _with_zero_experts(
    gate: str, zero_experts: ZeroExpertCounts | Mapping[str, int] | None, options: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The gate that can choose zero experts, if there are any."""
    if zero_experts is None:
        return gate, options
    if gate not in ("softmax_topk", "moepp"):
        raise ValueError(f"zero_experts need the gate 'moepp', got {gate!r}")
    if not isinstance(zero_experts, ZeroExpertCounts):
        if not isinstance(zero_experts, Mapping):
            raise ValueError(
                f"zero_experts must be counts by kind, such as {{'zero': 1}}, got {zero_experts!r}"
            )
        zero_experts = ZeroExpertCounts.of_kinds(zero_experts)
    return "moepp", {**options, "zero_experts": zero_experts}
