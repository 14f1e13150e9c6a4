"""The module that replaces a model's experts and computes them from the store."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_runtime.checkpoints.absent import AbsentParameters, AbsentTensor, refuse_content
from moe_runtime.checkpoints.expert_map import ExpertMap, ExpertsModule
from moe_runtime.checkpoints.transformers_private import gate_of, has_usual_gate
from moe_runtime.errors import UnsupportedUseError
from moe_runtime.inference.cpu.step_layers import is_observed
from moe_runtime.inference.known_classes import activation_of
from moe_runtime.inference.steps import LayerRouting, Listeners, require_plain_call
from moe_runtime.kernels.combine import combine_assignments
from moe_runtime.kernels.decode_step.prepared import ExpertStep
from moe_runtime.kernels.expert_mlp import (
    ActivationName,
    ActivationSpec,
    ExpertWeights,
    expert_ffn,
)
from moe_runtime.kernels.expert_mlp.separate_experts import ActivationFn, ExpertActivation
from moe_runtime.kernels.operands import without_autocast
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only
from moe_runtime.memory.store import ExpertStore
from moe_runtime.types import ExpertKey

if TYPE_CHECKING:
    from moe_runtime.inference.adapters import RowAdapters
    from moe_runtime.inference.expert_partition import ExpertPartition
    from moe_runtime.inference.lossy import MissRules

# T tokens, D model, F hidden, E experts, K top-k, R routed rows = T * K

_NEARLY_ALL = 0.9
"""A prompt that uses at least this share of a layer's experts will use nearly all of the next
layer's too."""


class OffloadedExperts(AbsentParameters):
    """Routed experts whose weights lie in a store, with the interface of transformers.

    Keeps the flags, activation and submodules of the module that it replaces. Each expert computes
    its own rows, and a token's rows are summed in the order of its top-k: the result does not
    depend on residency or the order of arrivals.
    """

    def __init__(self, experts: ExpertsModule, layer: int, following: Sequence[ExpertKey]) -> None:
        """Removes the expert parameters of the replaced module. ``following`` are the experts of
        the next layer."""
        super().__init__()
        original = experts.module
        self.config = original.config
        self.num_experts = experts.num_experts
        self.layer = layer
        self.store: ExpertStore[ExpertWeights] | None = None
        self.partition: ExpertPartition | None = None
        self.miss_rules: MissRules | None = None
        self.listeners = Listeners()
        self.adapters: RowAdapters | None = None
        self._keys = tuple(ExpertKey(layer, expert) for expert in range(self.num_experts))
        self._following = tuple(following)
        self._norms_outputs = bool(getattr(original, "has_post_expert_norm", False))
        self.expert_shapes = {
            name: original.get_parameter(name).shape for name in experts.parameters
        }
        for name in experts.parameters:
            del original._parameters[name]
        for name, parameter in original.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, child in original.named_children():
            self.add_module(name, child)
        self._activation: ExpertActivation = _find_activation(original)
        self._step_kernel: ExpertStep | None = None
        # not registered: its submodules are registered here, and transformers would initialise it
        self.__dict__["replaced"] = original

    def __getattr__(self, name: str) -> Any:
        replaced = self.__dict__.get("replaced")
        if replaced is not None and name in vars(replaced):
            return vars(replaced)[name]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        replaced = self.__dict__.get("replaced")
        if replaced is not None and hasattr(replaced, name):  # the activation may read it
            setattr(replaced, name, value)
            super().__setattr__("_activation", _find_activation(replaced))
            super().__setattr__("_step_kernel", None)

    @property
    def dim_in(self) -> int | None:
        """Width of the input rows; None before the first expert was computed."""
        return None if self._step_kernel is None else self._step_kernel.shape.dim_in

    def list_parameters(self, dtype: torch.dtype, device: torch.device) -> None:
        """Lists the experts' parameters under transformers' names, after dense weights."""
        self.add_absent(self.expert_shapes, dtype, device)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Computes the routed experts.

        The experts are frozen; hidden values and router weights have gradients. Under autocast the
        experts compute in fp32 and round the result.

        Args:
            hidden_states: ``[T, D]``.
            top_k_index: ``[T, K]`` expert ids; ids outside the layer's experts are skipped.
            top_k_weights: ``[T, K]`` router weights.

        Returns:
            ``[T, D]``, in the dtype of ``hidden_states``.

        Raises:
            CheckpointError: an expert could not be read.
            RankFailureError: another process with experts died or stalled.
            UnsupportedUseError: anything but a backward pass differentiates it, or weights of
                experts were assigned.
        """
        if torch.compiler.is_compiling():
            return _call_uncompiled(self.forward, hidden_states, top_k_index, top_k_weights)
        for name in self._absent_names:  # assigned weights would not be used
            if not isinstance(self._parameters.get(name), AbsentTensor):
                refuse_content()
        step = self._step_kernel
        if (
            step is not None
            and top_k_index.numel() <= step.most_rows
            and not torch.is_grad_enabled()
        ):
            with torch._C.DisableTorchFunction():  # rows are independent already, see `RowsAlone`
                out = self._try_resident_step(step, hidden_states, top_k_index, top_k_weights)
            if out is not None:
                return out
        return self._forward_general(hidden_states, top_k_index, top_k_weights)

    def _try_resident_step(
        self,
        step: ExpertStep,
        hidden_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> torch.Tensor | None:
        """The output for a few tokens if all their experts are resident, else None."""
        store, listeners = self.store, self.listeners
        assert store is not None
        if (
            self.partition is not None
            or self.adapters is not None
            or any(one.reads_ahead for one in listeners.demand_listeners)
            or ids_TK.ndim != 2
            or ids_TK.shape != weights_TK.shape
            or self._activation_now() is not self._activation
        ):
            return None
        ids_R = experts = ids_TK.flatten().tolist()
        places_R: Sequence[int] = range(len(ids_R))
        if not ids_R or min(ids_R) < 0 or max(ids_R) >= self.num_experts:
            return None
        if len(set(ids_R)) < len(ids_R):
            experts = [*self.rows_of(ids_TK)]
            place_of = dict(zip(experts, places_R, strict=False))
            places_R = [*map(place_of.__getitem__, ids_R)]
        if len(ids_TK) > 1 and len(experts) > store.slots_of(self.layer):
            return None
        keys = [*map(self._keys.__getitem__, experts)]
        if not listeners.routing_listeners and not listeners.demand_listeners:
            return store.use_resident(keys, partial(step.layer, hidden_TD, weights_TK, places_R))
        routing = LayerRouting(self.layer, keys, hidden_TD, ids_TK, weights_TK)

        def use(found: list[ExpertWeights]) -> torch.Tensor | None:
            out_TD = step.layer(hidden_TD, weights_TK, places_R, found)
            if out_TD is not None:
                for listener in listeners.routing_listeners:
                    listener.routed(routing)
            return out_TD

        out_TD = store.use_resident(keys, use)
        if out_TD is not None:
            for listener in listeners.demand_listeners:
                listener.demanded(routing)
        return out_TD

    def _forward_general(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if torch.is_autocast_enabled(hidden_states.device.type):
            wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
            with torch.autocast(hidden_states.device.type, enabled=False):
                out_TD = self._forward_general(wide, top_k_index, top_k_weights)
            return out_TD.to(hidden_states.dtype)
        if forward_ad._current_level >= 0 and any(
            forward_ad.unpack_dual(part).tangent is not None
            for part in (hidden_states, top_k_weights)
        ):
            raise UnsupportedUseError(
                "a loaded model has no forward-mode derivative, since its experts come and go; use "
                "backward() or torch.autograd.grad"
            )
        if torch.is_grad_enabled() and self._wants_gradient(hidden_states, top_k_weights):
            return differentiable_experts(self, hidden_states, top_k_index, top_k_weights)
        return self.forward_without_grad(hidden_states, top_k_index, top_k_weights)

    def _wants_gradient(self, hidden_TD: torch.Tensor, weights_TK: torch.Tensor) -> bool:
        if hidden_TD.requires_grad or weights_TK.requires_grad:
            return True
        return any(parameter.requires_grad for parameter in self.parameters())

    def forward_without_grad(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The output ``[T, D]``, without a graph."""
        out_RD = self.expert_outputs(hidden_states, top_k_index, top_k_weights)
        if self._norms_outputs:
            out_RD = self.get_submodule("post_expert_norm")(out_RD)
        return combine_assignments(out_RD, top_k_weights)

    def expert_outputs(
        self, hidden_TD: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The experts' outputs before the weighted sum: ``[T * K, D]``."""
        num_tokens, top_k = top_k_index.shape
        rows = self.rows_of(top_k_index)
        if self.listeners.routing_listeners:
            self._announce(rows, hidden_TD, top_k_index, top_k_weights)
        own_rows = rows if self.partition is None else self.partition.own_rows(self.layer, rows)
        rules = self.miss_rules
        if rules is not None:
            if rules.takes(num_tokens) and not self._wants_gradient(hidden_TD, top_k_weights):
                rows = own_rows = rules.without_light(own_rows, top_k_weights)
            else:
                rules = None
        num_rows = sum(map(len, rows.values()))
        # rows of skipped choices count in the sum, so they must be zero
        make = torch.empty if num_rows == num_tokens * top_k else torch.zeros
        out_RD = make(
            num_tokens * top_k, hidden_TD.shape[-1], dtype=hidden_TD.dtype, device=hidden_TD.device
        )
        if num_rows:
            keys, copies = [self._keys[expert] for expert in own_rows], []
            if rules is not None:
                keys, copies = rules.split(keys)
            routing = LayerRouting(self.layer, keys, hidden_TD, top_k_index, top_k_weights)
            activation = self._activation_now()
            run = partial(self._run_rows, routing, own_rows, activation, out_RD)
            self._lease_and_run(routing, run)
            if rules is not None and copies:
                self._run_rows(routing, own_rows, activation, out_RD, copies)
                missing = [key for key, _ in copies]
                rules.answered(missing, sum(len(own_rows[key.expert]) for key in missing))
        if num_rows and self.partition is not None:
            self.partition.exchange(self.layer, rows, out_RD)
        return out_RD

    def _announce(self, rows: Iterable[int], *routed: torch.Tensor) -> None:
        if not _is_recomputing():
            keys = [self._keys[expert] for expert in rows]
            for listener in self.listeners.routing_listeners:
                listener.routed(LayerRouting(self.layer, keys, *routed))

    def rows_of(self, top_k_index: torch.Tensor) -> dict[int, list[int]]:
        """The routed rows of each visited expert. Those with most rows come last; ties go by the
        last row."""
        groups: dict[int, list[int]] = {}
        ids_R = top_k_index.flatten().tolist()
        for row, expert in enumerate(ids_R):
            if 0 <= expert < self.num_experts:
                groups.setdefault(expert, []).append(row)
        if len(groups) == len(ids_R):  # one row per expert, already in order
            return groups
        return dict(sorted(groups.items(), key=lambda group: (len(group[1]), group[1][-1])))

    def each(
        self, experts: Iterable[int], num_tokens: int
    ) -> Generator[tuple[int, Callable[[torch.Tensor], torch.Tensor]]]:
        """Yields experts as they arrive, each with a differentiable function of its rows. Calls no
        listener. The generator holds a lease: close it."""
        assert self.store is not None
        keys = [self._keys[expert] for expert in experts]
        streaming = num_tokens > 1 and len(keys) > self.store.slots_of(self.layer)
        with self.store.lease(keys, streaming=streaming) as lease:
            for group in lease:
                for key, weights in group:
                    yield key.expert, partial(self._rows, key.expert, weights)

    def _activation_now(self) -> ExpertActivation:
        """The module's own activation if hooks observe it: kernels would not call it."""
        module = self._modules.get("act_fn")
        if module is None or not (
            is_observed(module) or torch.nn.modules.module._has_any_global_hook()
        ):
            return self._activation
        is_kernels = has_kernel(self._activation)
        return _own_activation(self.__dict__["replaced"]) if is_kernels else self._activation

    def end_leases(self) -> None:
        assert self.store is not None
        self.store.end_leases()

    def _make_step_kernel(self, weights: ExpertWeights) -> ExpertStep | None:
        if self._norms_outputs or not has_kernel(self._activation):
            return None
        return ExpertStep(weights.shape, self._activation)

    def _rows(self, expert: int, weights: ExpertWeights, x_RD: torch.Tensor) -> torch.Tensor:
        from moe_runtime.kernels.expert_mlp import frozen_expert

        adapters_R = None
        if self.adapters is not None and self.adapters.is_for_all:
            adapters_R = self.adapters.of_rows(len(x_RD), [expert], [len(x_RD)], ())
        y_RD = frozen_expert(x_RD, weights, self._activation_now(), adapters_R)
        return self.get_submodule("post_expert_norm")(y_RD) if self._norms_outputs else y_RD

    def _run_rows(
        self,
        routing: LayerRouting,
        rows: Mapping[int, list[int]],
        activation: ExpertActivation,
        out_RD: torch.Tensor,
        group: Sequence[tuple[ExpertKey, ExpertWeights]],
    ) -> None:
        found: list[ExpertWeights] = []
        counts: list[int] = []
        destinations: list[int] = []
        for key, weights in group:
            found.append(weights)
            counts.append(len(rows[key.expert]))
            destinations += rows[key.expert]
        num_choices = routing.ids_TK.shape[1]
        tokens = (
            [0] * len(destinations)
            if len(routing.ids_TK) == 1
            else [row // num_choices for row in destinations]
        )
        rows_of_experts = routing.hidden_TD, found, counts, tokens, destinations, out_RD
        step = self._step_kernel if activation is self._activation else None
        adapters_R = None
        if self.adapters is not None:
            experts = [key.expert for key, _ in group]
            adapters_R = self.adapters.of_rows(len(routing.ids_TK), experts, counts, tokens)
        if step is None or adapters_R is not None or not step.rows(*rows_of_experts):
            expert_ffn(*rows_of_experts, activation=activation, adapters_R=adapters_R)

    def _num_own(self) -> int:
        owns = None if self.partition is None else self.partition.owns
        return len(self._keys) if owns is None else sum(map(owns, self._keys))

    def _lease_and_run(self, routing: LayerRouting, use: Callable[[Any], None]) -> None:
        """Leases experts and calls ``use`` with groups of ``(key, weights)`` as they arrive."""
        assert self.store is not None
        streaming = len(routing.ids_TK) > 1 and len(routing.keys) > self.store.slots_of(self.layer)
        visits_all = streaming and len(routing.keys) >= _NEARLY_ALL * self._num_own()
        listeners = () if _is_recomputing() else self.listeners.demand_listeners
        with self.store.lease(routing.keys, streaming=streaming) as lease:
            is_later = lease.computes_residents_first
            for listener in () if is_later else listeners:
                listener.demanded(routing)
            for group in lease:
                if visits_all and lease.all_started:
                    owns = None if self.partition is None else self.partition.owns
                    self.store.read_ahead([*filter(owns, self._following)])
                if self._step_kernel is None:
                    self._step_kernel = self._make_step_kernel(group[0][1])
                use(group)
                for listener in listeners if is_later else ():
                    listener.demanded(routing)
                is_later = False


# the compiler would trace every read and thread
_call_uncompiled: Any = torch.compiler.disable(lambda forward, *inputs: forward(*inputs))


def _find_activation(experts: Any) -> ExpertActivation:
    """The name or formula of a module's activation if kernels have it, else its own function."""
    formula = activation_of(experts)
    own_values = any(value is not None for value in experts._parameters.values())
    if formula is None or (own_values and not has_usual_gate(experts)):
        return _own_activation(experts)
    return formula.function if formula.is_plain else formula


def has_kernel(activation: ExpertActivation) -> TypeGuard[ActivationName | ActivationSpec]:
    return isinstance(activation, (str, ActivationSpec))


def _own_activation(experts: Any) -> ActivationFn:
    def own_activation(gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
        if gate is None:
            return experts.act_fn(up)
        if experts.is_concatenated:
            return gate_of(experts)(torch.cat((gate, up), dim=-1))
        return gate_of(experts)(torch.stack((gate, up), dim=-1).flatten(-2))

    return own_activation


def _is_recomputing() -> bool:
    """Whether a backward pass runs; its recomputation is not a step."""
    return torch._C._current_graph_task_id() != -1


def differentiable_experts(
    experts: OffloadedExperts, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """The output ``[T, D]`` with gradients of hidden values, router weights and shared parameters.
    Raises UnsupportedUseError: in ``torch.func``, or for shared parameters in several processes."""
    require_plain_call()
    parameters = [parameter for parameter in experts.parameters() if parameter.requires_grad]
    if parameters and experts.partition is not None:
        raise UnsupportedUseError(
            f"parameters of the experts of layer {experts.layer} require gradients, which several "
            "processes cannot train; freeze them, or load the model in one process"
        )
    return cast(Tensor, _FrozenExperts.apply(experts, hidden_TD, ids_TK, weights_TK, *parameters))


_FIRST_ONLY = (
    "a loaded model's experts have first derivatives only; compute second ones with the model as "
    "transformers loads it"
)


class _FrozenExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        experts: OffloadedExperts,
        hidden_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.experts = experts
        ctx.save_for_backward(hidden_TD, ids_TK, weights_TK, *parameters)
        return experts.forward_without_grad(hidden_TD, ids_TK, weights_TK)

    @staticmethod
    @first_derivatives_only(_FIRST_ONLY, UnsupportedUseError)
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, ids_TK, weights_TK, *parameters = ctx.saved_tensors
        found: list[Tensor | None] = []
        try:
            with without_autocast(grad_TD.device.type):
                found = _gradients(ctx.experts, hidden_TD, ids_TK, weights_TK, parameters, grad_TD)
        finally:
            if not found:  # torch may run this on another thread than the pass
                ctx.experts.end_leases()
        grad_hidden_TD, grad_weights_TK, *rest = found
        return None, grad_hidden_TD, None, grad_weights_TK, *rest


def _gradients(
    experts: OffloadedExperts,
    hidden_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    parameters: Sequence[Tensor],
    grad_TD: Tensor,
) -> list[Tensor | None]:
    """Gradients of hidden values, router weights and parameters.

    All rows of an expert are computed together. Sums go by a token's choices, or by experts, so
    residency changes no bit.
    """
    num_tokens, top_k = ids_TK.shape
    dim = hidden_TD.shape[1]
    precise = torch.promote_types(hidden_TD.dtype, torch.float32)
    rows = experts.rows_of(ids_TK)
    own_rows = (
        rows if experts.partition is None else experts.partition.own_rows(experts.layer, rows)
    )
    # the last column has the gradient of the row's router weight
    grads_RX = grad_TD.new_zeros(num_tokens * top_k, dim + 1, dtype=precise)
    parts: dict[int, Sequence[Tensor | None]] = {}
    arriving = experts.each(own_rows, num_tokens)
    try:
        for expert, compute in arriving:
            rows_n = torch.tensor(own_rows[expert], device=hidden_TD.device)
            x_nD = hidden_TD[rows_n // top_k].requires_grad_()
            grad_nD = grad_TD[rows_n // top_k].to(precise)
            with torch.enable_grad():
                y_nD = compute(x_nD)
            grads_RX[rows_n, dim] = (grad_nD * y_nD.detach().to(precise)).sum(1)
            grad_nD = grad_nD * weights_TK.reshape(-1)[rows_n, None].to(precise)
            grad_x_nD, *parts[expert] = torch.autograd.grad(
                y_nD, (x_nD, *parameters), grad_nD.to(y_nD.dtype), allow_unused=True
            )
            grads_RX[rows_n, :dim] = grad_x_nD.to(precise)
    finally:
        arriving.close()
    if rows and experts.partition is not None:
        experts.partition.exchange(experts.layer, rows, grads_RX)
    found: list[Tensor | None] = [
        grads_RX[:, :dim].unflatten(0, (num_tokens, top_k)).sum(1).to(hidden_TD.dtype),
        grads_RX[:, dim].view_as(weights_TK).to(weights_TK.dtype),
    ]
    for grads in zip(*(parts[expert] for expert in sorted(parts)), strict=True):
        present = [grad for grad in grads if grad is not None]
        found.append(torch.stack(present).sum(0) if present else None)
    return found


_MOST_BOUND = 2048
"""Cached views of slots: a few megabytes."""


def bind_weights(experts: ExpertMap) -> Callable[[ExpertKey, torch.Tensor], ExpertWeights]:
    """A function that turns a filled slot into an expert's weights."""

    def bind(key: ExpertKey, slot: torch.Tensor) -> ExpertWeights:
        with torch.inference_mode(False):  # views are cached, and later calls may need gradients
            matrices = experts.matrices_in(key, slot)
        return ExpertWeights(gate=matrices.pop("gate", None), **matrices)

    return bind


def bind_slots(experts: ExpertMap) -> Callable[[ExpertKey, torch.Tensor], ExpertWeights]:
    """As ``bind_weights``, with cached views, for slots at fixed addresses.

    Making views takes as long as reading a small expert. Experts with the same layout share them.
    """
    bind = bind_weights(experts)
    forms: dict[object, int] = {}
    form_of: dict[ExpertKey, int] = {}
    bound: dict[tuple[int, int], ExpertWeights] = {}  # by a slot's address, and the form

    def bind_slot(key: ExpertKey, slot: torch.Tensor) -> ExpertWeights:
        form, address = form_of.get(key), slot.data_ptr()
        if form is None:
            packings = tuple(experts.packings[key.layer].items())
            described = experts.matrices[key.layer], packings, experts.layouts[key].form
            form = form_of[key] = forms.setdefault(described, len(forms))
        known = bound.get((address, form))
        if known is None:
            if len(bound) >= _MOST_BOUND:
                bound.clear()
            known = bound[address, form] = bind(key, slot)
        return known

    return bind_slot
