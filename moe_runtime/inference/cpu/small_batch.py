"""Dense layers that are fast in steps of few tokens, on a CPU and on a GPU.

Such a step is bound by reading weights and by the number of small operations. Linear layers use our
kernel; normalisations become one operation instead of six.
"""

from __future__ import annotations

from typing import Any, TypeGuard, cast

import torch

from moe_runtime.inference.known_classes import norm_form
from moe_runtime.kernels.linear import linear
from moe_runtime.kernels.prepared import PreparedLinear, PreparedRMSNorm
from moe_runtime.kernels.rms_norm import NormForm, rms_norm


def use_small_batch_layers(model: torch.nn.Module) -> None:
    """Replaces linear layers, normalisations, router weights, and steps of convolutions and
    recurrent layers of a model on the CPU."""
    replace_dense_layers(model)
    for module in model.modules():
        if is_router(module):
            module.weight = _SmallBatchWeight.of(cast(torch.nn.Parameter, module.weight))
        for child in module.children():
            if type(child) is torch.nn.Conv1d:
                from moe_runtime.inference.cpu.recurrent_steps import (
                    use_recurrent_steps,
                    use_shifted_products,
                )

                use_shifted_products(child)
                use_recurrent_steps(module)


def replace_dense_layers(model: torch.nn.Module) -> None:
    """Replaces linear layers, and normalisations that compute what our kernel does."""
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if is_plain_linear(child):
                setattr(module, name, SmallBatchLinear(child).train(child.training))
            elif (norm := as_rms_norm(child)) is not None:
                setattr(module, name, norm.train(child.training))


def is_plain_linear(module: Any) -> TypeGuard[torch.nn.Linear]:
    """Whether a module is torch's linear layer with a weight of torch's."""
    return type(module) is torch.nn.Linear and type(module.weight) is torch.nn.Parameter


def is_observed(*parts: torch.nn.Module) -> bool:
    """Whether hooks or replacements see or change what goes through parts of a layer."""
    for part in parts:
        own = part.__dict__
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or own["_modules"]  # a part of a part is a parametrization
            or "forward" in own
        ):
            return True
    return False


class SmallBatchLinear(torch.nn.Linear):
    """A linear layer that reads its weight at the speed of memory for few rows; on a GPU for one.
    Shares the parameters of the layer that it replaces."""

    def __init__(self, replaced: torch.nn.Linear) -> None:
        super().__init__(replaced.in_features, replaced.out_features, bias=False, device="meta")
        self.weight = replaced.weight
        self.bias = replaced.bias
        self._prepared = PreparedLinear()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        # past the module's own lookup of attributes, which takes longer than all that follows
        parameters = self._parameters
        if "weight" not in parameters or "bias" not in parameters:
            return super().forward(input)  # parametrized or pruned: computed for every call
        weight, bias = parameters["weight"], parameters["bias"]
        assert weight is not None
        y = None if input.is_cuda else self._prepared(input, weight, bias)
        return linear(input, weight, bias) if y is None else y


_EPS_NAMES = ("variance_epsilon", "eps")
"""What families call the number that keeps a norm from dividing by zero."""


class SmallBatchRMSNorm(torch.nn.Module):
    """Root-mean-square normalisation in one operation when there are few rows.

    Shares the weight of the layer that it replaces, which computes values of another type than the
    weight: families differ in what they round.
    """

    def __init__(self, replaced: torch.nn.Module, eps: float, form: NormForm) -> None:
        super().__init__()
        self.weight = cast(torch.nn.Parameter, replaced.weight)
        self.eps = eps
        self.form: NormForm = form
        self._prepared = PreparedRMSNorm(form)
        self.__dict__["replaced"] = replaced  # not registered: its weight is this one's

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalises ``[..., D]`` along its last dimension."""
        weight = self._parameters.get("weight")
        if weight is None:  # parametrized: computed for every call
            return rms_norm(hidden_states, self.weight, self.eps, form=self.form)
        normed = self._prepared(hidden_states, weight, self.eps)
        if normed is not None:
            return normed
        if hidden_states.dtype is weight.dtype:
            return rms_norm(hidden_states, weight, self.eps, form=self.form)
        replaced = self.__dict__["replaced"]
        replaced._parameters["weight"] = weight
        return replaced(hidden_states)

    def __getattr__(self, name: str) -> Any:
        if name in _EPS_NAMES and "eps" in self.__dict__:
            return self.__dict__["eps"]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _EPS_NAMES and "replaced" in self.__dict__:
            setattr(self.__dict__["replaced"], name, value)
            name = "eps"
        super().__setattr__(name, value)


class _SmallBatchWeight(torch.nn.Parameter):
    """A matrix that its module, a router, multiplies by ``torch.nn.functional.linear``."""

    prepared: PreparedLinear | None = None

    @staticmethod
    def of(weight: torch.nn.Parameter) -> torch.nn.Parameter:
        own = weight.detach().as_subclass(cast(Any, _SmallBatchWeight))
        return cast(torch.nn.Parameter, own.requires_grad_(weight.requires_grad))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and not kwargs:
            func = _multiply
        # torch's own way to leave subclasses aside: no exception can leave it switched on
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})


def _multiply(x: torch.Tensor, weight: Any, *bias: Any) -> torch.Tensor:
    if not isinstance(weight, _SmallBatchWeight):
        return linear(x, weight, *bias)
    if weight.prepared is None:
        weight.prepared = PreparedLinear()
    y = weight.prepared(x, weight, bias[0] if bias else None)
    return linear(x, weight, *bias) if y is None else y


def is_router(module: Any) -> bool:
    """Whether a module is a router whose own parameters are a matrix and perhaps a bias."""
    own = dict(module.named_parameters(recurse=False))
    is_linear = set(own) in ({"weight"}, {"weight", "bias"}) and own["weight"].ndim == 2
    return is_linear and type(module).__name__.endswith("Router")


def as_rms_norm(module: Any) -> SmallBatchRMSNorm | None:
    """The replacement of a module that computes what ``rms_norm`` does, else None."""
    weight, form = module._parameters.get("weight"), norm_form(module)
    if weight is None or form is None or "forward" in vars(module):
        return None
    return SmallBatchRMSNorm(
        module, next(vars(module)[n] for n in _EPS_NAMES if n in vars(module)), form
    )
