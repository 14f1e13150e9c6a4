"""Parameters whose content stays in the checkpoint's files: only name, shape and dtype."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from moe_runtime.errors import UnsupportedUseError

_GRAD: Any = Tensor.grad
_REQUIRES_GRAD: Any = Tensor.requires_grad
_PROPERTIES = (
    *("shape", "dtype", "device", "ndim", "layout", "itemsize", "nbytes", "requires_grad"),
    *("grad", "grad_fn", "is_leaf", "is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized"),
    "_backward_hooks",
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "__len__"),
    *("is_floating_point", "is_complex", "is_inference", "is_contiguous", "storage_offset"),
    "get_device",
)
_DESCRIBING = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
        *(getattr(Tensor, name) for name in _METHODS),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    )
)
"""Calls that need only the description of a parameter."""

_SETTING_NO_GRADIENT = {
    Tensor.requires_grad_: [False],
    _REQUIRES_GRAD.__set__: [False],
    _GRAD.__set__: [None],
    _GRAD.__delete__: [],
}
"""Calls with values that leave a frozen parameter unchanged, as `zero_grad` makes them."""


class AbsentTensor(torch.Tensor):
    """Weights described in memory but stored elsewhere, such as the stacked experts of a layer.

    Whatever would need, copy, save or change its content raises an ``UnsupportedUseError``.
    """

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> AbsentTensor:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=dtype, device=device
        )

    @staticmethod
    def describes(func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a call needs only the description, or leaves a frozen parameter unchanged."""
        given = [*args[1:], *(kwargs or {}).values()]
        return func in _DESCRIBING or _SETTING_NO_GRADIENT.get(func) == given

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.describes(func, args, kwargs):
            # torch's own way to disable subclasses; no exception can leave it switched on
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        if func is Tensor.detach:
            return cls(args[0].shape, args[0].dtype, args[0].device)
        cls.refuse()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.refuse()

    @staticmethod
    def refuse() -> NoReturn:
        refuse_content()

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


class TrainedElsewhere(AbsentTensor):
    """An expert parameter held by the optimizer of offloaded training, with its gradient."""

    has_gradient: Callable[[], bool]  # whether a gradient waits for the optimizer's step

    @staticmethod
    def parameter(like: Tensor, has_gradient: Callable[[], bool]) -> Any:
        """Replaces a parameter whose content moves to host memory."""
        made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            TrainedElsewhere, like.shape, dtype=like.dtype, requires_grad=like.requires_grad
        )
        made.has_gradient, made._is_param = has_gradient, True
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = args[0] if args else None
        if isinstance(own, TrainedElsewhere):
            if func == _GRAD.__get__ and own.requires_grad and own.has_gradient():
                raise UnsupportedUseError(
                    "gradients of the experts are with the optimizer that offload_training "
                    "returned: take the step with its `step`, clip with AdamW(clip_norm=...), "
                    "and drop gradients with its `discard`; `training.attach(trainer)` has a "
                    "Trainer, an Accelerator or a GradScaler do so; from a command there is "
                    "`moe-runtime finetune`"
                )
            if func in (_REQUIRES_GRAD.__set__, Tensor.requires_grad_):
                given = [*args[1:], *(kwargs or {}).values(), True][0]
                if given != own.requires_grad:
                    raise UnsupportedUseError(
                        "whether experts are trained is read once, by offload_training: freeze "
                        "parameters, or add adapters to them, before it"
                    )
                return own
        return super().__torch_function__(func, types, args, kwargs)

    @staticmethod
    def refuse() -> NoReturn:
        raise UnsupportedUseError(
            "the experts are with the optimizer that offload_training or offload_zeroth_order "
            "returned, not in the model: their weights cannot be read, changed, copied or saved "
            "through it; the optimizer's `expert` and `stacked` copy them, its `write` saves a "
            "checkpoint, save_pretrained takes a state_dict with the experts, and `moe-runtime "
            "finetune` writes them expert by expert"
        )


def refuse_content() -> NoReturn:
    """Raises: expert weights are not in memory."""
    raise UnsupportedUseError(
        "the experts of a model from moe_runtime.load are in its checkpoint's files, not in "
        "memory: their weights cannot be read, changed, trained, exported or given adapters "
        "through the model; merge adapters on experts into the checkpoint first, train experts "
        "with `moe-runtime finetune`, write them with save_pretrained, or have them in memory with "
        "from_pretrained of transformers"
    )


def refuse_copy() -> NoReturn:
    """Raises: a loaded model, or a part of it with experts, cannot be copied."""
    raise UnsupportedUseError(
        "a model from moe_runtime.load cannot be copied or pickled, because its experts are in "
        "the checkpoint's files: call moe_runtime.load once more where it is wanted, or write it "
        "with save_pretrained"
    )


def require_unchanged(parameter: Tensor, fn: Callable[[Tensor], Tensor]) -> None:
    """Refuses a conversion that would give a parameter another dtype or device."""
    probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    converted = fn(probe)
    if converted.dtype != probe.dtype or converted.device != probe.device:
        raise UnsupportedUseError(
            f"a loaded model stays in {probe.dtype} on {probe.device}, with its experts: give "
            f"dtype and device to moe_runtime.load (here {converted.dtype} on {converted.device})"
        )


def convert_as_a_whole(model: nn.Module) -> None:
    """Makes all modules with absent parameters refuse a conversion before it changes anything."""
    for module in model.modules():
        if any(isinstance(part, AbsentParameters) for part in module.modules()):
            vars(module)["_apply"] = _whole_conversion(weakref.ref(module))


def _whole_conversion(reference: weakref.ref[nn.Module]) -> Callable[..., Any]:
    """The ``_apply`` of a module. It must not keep the module alive, since it is its attribute."""

    def apply(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        module = reference()
        assert module is not None
        for parameter in module.parameters() if recurse else ():
            if isinstance(parameter, AbsentTensor):
                require_unchanged(parameter, fn)
        return type(module)._apply(module, fn, recurse)

    return apply


class AbsentParameters(nn.Module):
    """A module some of whose parameters are absent; torch's walks over modules skip those."""

    _absent_names: tuple[str, ...] = ()
    _misses_absent = True  # whether a state without the absent parameters is incomplete

    def add_absent(
        self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Registers frozen absent parameters by name."""
        for name, shape in shapes.items():
            absent = nn.Parameter(AbsentTensor(shape, dtype, device), requires_grad=False)
            self.register_parameter(name, absent)
        self._absent_names = tuple(shapes)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(old := self.__dict__.get("_parameters", {}).get(name), AbsentTensor):
            old.refuse()
        super().__setattr__(name, value)

    @contextlib.contextmanager
    def _without_absent(self) -> Iterator[Mapping[str, Tensor]]:
        every = dict(self._parameters)
        absent = {n: p for n, p in every.items() if isinstance(p, AbsentTensor)}
        for name in absent:
            del self._parameters[name]
        try:
            yield absent
        finally:
            self._parameters.update(absent)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        with self._without_absent() as absent:
            for parameter in absent.values():
                require_unchanged(parameter, fn)
            return super()._apply(fn, recurse)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        with self._without_absent() as absent:
            super()._load_from_state_dict(
                cast(Any, state_dict), prefix, local_metadata, strict,
                missing_keys, unexpected_keys, error_msgs,
            )  # fmt: skip
        for name in absent:
            key = f"{prefix}{name}"
            if key in unexpected_keys:
                unexpected_keys.remove(key)
            if key not in state_dict:
                missing_keys.extend([key] if strict and self._misses_absent else [])
            elif not isinstance(state_dict[key], AbsentTensor):
                error_msgs.append(f"{key} is not in the model's memory and cannot be given")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()
