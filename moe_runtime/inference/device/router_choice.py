"""Routers on a GPU in steps of few tokens: one kernel behind their product.

A router is recognised by what it computes for samples on the CPU, never by its name.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_runtime.inference.cpu.small_batch import is_router
from moe_runtime.kernels.expert_choice import (
    SCORES,
    ChoiceForm,
    choose_experts,
)
from moe_runtime.kernels.expert_choice.op import MOST_CHOICES, MOST_EXPERTS, ChoiceImpl
from moe_runtime.kernels.expert_mlp.decode import MAX_TOKENS
from moe_runtime.kernels.linear import linear
from moe_runtime.kernels.triton_support import is_interpreted

_SAMPLES = 64
_LARGE, _LOW = (30.0, 1e3), -46.0
"""Factors of hidden values whose logits show what is clipped; and the mean of logits that do."""
_LEAST_SUMS = 0.0, 1e-20
_OF_MODULES = frozenset(vars(torch.nn.Module()))
_CONSTANTS = (bool, int, float, str, type(None))


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _narrow(multiply: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return multiply(x, weight, bias)


def _widened(multiply: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return multiply(x, weight, bias).float()


def _wide(multiply: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return multiply(x.float(), weight.float(), None if bias is None else bias.float())


_PRODUCTS = _narrow, _widened, _wide
"""What logits may be: in the type of the model, widened, or products of wide numbers."""


class RouterForm(NamedTuple):
    """What a router computes.

    Attributes:
        product: logits by a function that multiplies, of rows, a weight and a bias.
        choice: of experts, by the logits.
        num_choices: of each row.
        keeps_dtype: whether weights have the type of the rows; else they are fp32.
        takes_batches: whether rows may come as ``[B, Q, D]`` too.
    """

    product: Callable[..., Tensor]
    choice: ChoiceForm
    num_choices: int
    keeps_dtype: bool
    takes_batches: bool


def fuse_routers(model: torch.nn.Module) -> None:
    """Gives the routers of a model on a GPU that qualify one kernel behind their product."""
    known: dict[Any, RouterForm | None] = {}
    for module in model.modules():
        if is_router(module) and not module._modules and "forward" not in vars(module):
            fused = FusedRouter(module, known)
            if fused.form is not None:
                cast(Any, module).forward = fused


class FusedRouter:
    """The ``forward`` of a router, with a way of its own for few tokens.

    Attributes:
        form: what it computes; None where that is nothing known.
    """

    def __init__(self, module: torch.nn.Module, known: dict[Any, RouterForm | None]) -> None:
        """Finds out what a router computes.

        Args:
            module: the router; the object may take the place of its method.
            known: what routers compute, by their classes and settings.
        """
        self._module: Any = module
        self._own = type(module).forward
        self._settings = self._settings_now()
        self._shapes = self._shapes_now()
        self.form: RouterForm | None = None
        if not all(isinstance(value, _CONSTANTS) for value in self._settings.values()):
            return
        key = type(module), (*self._settings.items(),), self._shapes, module.weight.dtype
        if key not in known:
            known[key] = _form_of(module, self._settings)
        self.form = known[key]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Logits ``[T, E]``, weights ``[T, K]`` and ids ``[T, K]`` of hidden values."""
        if len(args) == 1 and not kwargs and self._may_fuse(args[0]):
            form, tensors = self.form, _tensors_of(self._module)
            assert form is not None
            return _compute(form, args[0], tensors, "triton")
        return self._own(self._module, *args, **kwargs)

    def _may_fuse(self, hidden: Any) -> bool:
        module, form = self._module, self.form
        return (
            form is not None
            and type(hidden) is Tensor
            and (hidden.ndim == 2 or (hidden.ndim == 3 and form.takes_batches))
            and 0 < hidden.numel() <= MAX_TOKENS * hidden.shape[-1]
            and (hidden.is_cuda or is_interpreted())
            and hidden.dtype is module.weight.dtype
            and not torch.is_grad_enabled()
            and forward_ad._current_level < 0
            and not torch.is_autocast_enabled(hidden.device.type)
            and not torch.compiler.is_compiling()
            and type(module).forward is self._own
            and not module._modules
            and self._settings_now() == self._settings
            and self._shapes_now() == self._shapes
        )

    def _shapes_now(self) -> tuple[Any, ...]:
        """The names of its tensors, each of which has its part in what it computes."""
        return tuple((name, each.shape) for name, each in _tensors_of(self._module).items())

    def _settings_now(self) -> dict[str, Any]:
        """Everything that a router knows beside its tensors, but for this object."""
        own = vars(self._module)
        names = own.keys() - _OF_MODULES | {"training"}
        return {name: own[name] for name in sorted(names) if name != "forward"}


def _tensors_of(module: torch.nn.Module) -> dict[str, Any]:
    tensors = {**module._parameters, **module._buffers}
    return {name: each for name, each in tensors.items() if each is not None}


def _compute(
    form: RouterForm, hidden: Tensor, tensors: dict[str, Any], impl: ChoiceImpl
) -> tuple[Tensor, Tensor, Tensor]:
    """As the router does; what is neither its weight nor its bias is added for the choice alone."""
    rows_TD = hidden.reshape(-1, hidden.shape[-1])
    multiply: Product = torch.nn.functional.linear if impl == "reference" else linear
    logits_TE = form.product(multiply, rows_TD, tensors["weight"], tensors.get("bias"))
    more = [each for name, each in tensors.items() if name not in ("weight", "bias")]
    ids_TK, weights_TK = choose_experts(
        logits_TE, form.num_choices, form.choice, bias_E=more[0] if more else None,
        dtype=hidden.dtype if form.keeps_dtype else torch.float32, impl=impl,
    )  # fmt: skip
    return logits_TE, weights_TK, ids_TK


@torch.no_grad()
def _form_of(module: Any, settings: dict[str, Any]) -> RouterForm | None:
    """What a router computes in fp32 and in bf16, where roundings show."""
    num_experts, dim = module.weight.shape
    tensors = _tensors_of(module)
    more = [each.shape for name, each in tensors.items() if name not in ("weight", "bias")]
    if (
        not all(each.is_floating_point() for each in tensors.values())
        or len(inspect.signature(type(module).forward).parameters) != 2
        or num_experts > MOST_EXPERTS
        or more not in ([], [(num_experts,)])
    ):
        return None
    sample = copy.deepcopy(module).cpu().float().eval()
    generator = torch.Generator().manual_seed(0)
    for name, each in _tensors_of(sample).items():
        each.normal_(std=2 * dim**-0.5 if name == "weight" else 0.5, generator=generator)
    rows_TD = torch.randn(_SAMPLES, dim, generator=generator)
    likeness: dict[RouterForm, float] = {}
    with contextlib.suppress(Exception):  # code that nobody knows may fail in any way
        for router in (sample, copy.deepcopy(sample).bfloat16()):
            found = _likeness(router, rows_TD.to(router.weight.dtype), settings)
            likeness = {
                form: min(each, likeness.get(form, each))
                for form, each in found.items()
                if router is sample or form in likeness
            }
    return max(likeness, key=lambda form: likeness[form], default=None)


def _likeness(router: Any, rows_TD: Tensor, settings: dict[str, Any]) -> dict[RouterForm, float]:
    """The forms that a router may have, and what part of its weights they have to the bit."""
    logits_TE, weights_TK, ids_TK = outputs = router(rows_TD)
    tensors, num_choices = _tensors_of(router), ids_TK.shape[1]
    if num_choices > MOST_CHOICES or ids_TK.dtype != torch.int64:
        return {}
    scores = ("sigmoid",) if tensors.keys() - {"weight", "bias"} else SCORES
    numbers = {float(each) for each in settings.values() if type(each) in (int, float)}
    takes_more = _takes_batches(router, rows_TD, outputs)
    found: dict[RouterForm, float] = {}
    for product, keeps_dtype in itertools.product(_PRODUCTS, (True, False)):
        rows = rows_TD, tensors["weight"], tensors.get("bias")
        logits = product(torch.nn.functional.linear, *rows)
        dtype = rows_TD.dtype if keeps_dtype else torch.float32
        if weights_TK.dtype != dtype or not _same(logits, logits_TE):
            continue
        factors = [1.0, *sorted(numbers - {1.0})]
        for choice in itertools.product(scores, (False, True), factors, _LEAST_SUMS):
            if choice[3] and not choice[1]:
                continue  # nothing is divided
            form = RouterForm(product, ChoiceForm(*choice), num_choices, keeps_dtype, takes_more)
            ours = _by_logits(*_compute(form, rows_TD, tensors, "reference"))
            theirs = _by_logits(logits_TE, weights_TK, ids_TK)
            # the order of a sum may move a rounding; what is rounded elsewhere differs more often
            bound, least = (1e-6, 0.4) if dtype == torch.float32 else (torch.finfo(dtype).eps, 0.98)
            is_equal = torch.eq(ours[1], theirs[1]).float().mean().item()
            if (
                torch.equal(ours[0], theirs[0])
                and torch.allclose(ours[1], theirs[1], rtol=bound, atol=0)
                and is_equal >= least
                and _is_so_at_the_ends(router, form, rows_TD, bound)
            ):
                found[form] = is_equal
    return found


def _is_so_at_the_ends(router: Any, form: RouterForm, rows_TD: Tensor, bound: float) -> bool:
    """Whether weights are the same, whoever of equals comes first, of logits that are large, and of
    those that leave next to nothing of every sigmoid."""
    low = copy.deepcopy(router)
    low.weight.abs_().neg_()
    rows_low_TD = rows_TD.abs()
    rows_low_TD *= _LOW / (rows_low_TD @ low.weight.T).float().mean()
    ends = [(router, rows_TD * by) for by in _LARGE] + [(low, rows_low_TD)]
    for one, rows in ends:
        logits_TE, weights_TK, _ = one(rows)
        ours_TE, ours_TK, _ = _compute(form, rows, _tensors_of(one), "reference")
        ours, theirs = (weights.sort(dim=1).values for weights in (ours_TK, weights_TK))
        least = torch.finfo(weights_TK.dtype).tiny  # of what is nearly 0 nobody sees how near
        is_equal = torch.allclose(ours, theirs, rtol=bound, atol=least, equal_nan=True)
        if not (is_equal and _same(ours_TE, logits_TE)):
            return False
    return True


def _takes_batches(router: Any, rows_TD: Tensor, outputs: tuple[Tensor, ...]) -> bool:
    """Whether rows may come as ``[B, Q, D]`` too."""
    with contextlib.suppress(Exception):
        found = router(rows_TD.view(2, -1, rows_TD.shape[1]))
        return all(map(_same, found, outputs))
    return False


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _by_logits(logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The logits that were chosen and their weights, in the order of the logits."""
    chosen, order = logits.gather(1, ids).sort(dim=1)
    return chosen, weights.gather(1, order)
