"""Masks of prompts that take no memory: they say which keys are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.kernels.decode_step.prompt_attention import Sight
from moe_runtime.kernels.native import native_library


class SeenKeys(torch.Tensor):
    """A mask ``[B, 1, Q, S]`` that allows (bool) or is added to scores.

    Attention that knows it takes ``sight``. Where anything else computes with it, it becomes a mask
    like others, which may then be changed, and ``sight`` is None.
    """

    sight: Sight | None
    _made: torch.Tensor

    @staticmethod
    def __new__(cls, shape: tuple[int, int, int, int], dtype: torch.dtype, sight: Sight) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)  # type: ignore[attr-defined]
        made.sight = sight
        return made

    def __repr__(self, **_: Any) -> str:
        return f"SeenKeys({list(self.shape)}, {self.dtype}, {self.sight})"

    def made(self) -> torch.Tensor:
        """The mask itself."""
        if self.sight is not None:
            allowed = self.sight.allows(*self.shape[2:])
            if self.dtype != torch.bool:
                lowest = torch.finfo(self.dtype).min
                allowed = torch.zeros_like(allowed, dtype=self.dtype).masked_fill(~allowed, lowest)
            self._made, self.sight = allowed.expand(self.shape).contiguous(), None
        return self._made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, cls.made, (args, kwargs or {}))
        return func(*args, **kwargs)


def as_seen_keys(make_mask: Callable[..., Any], *, adds: bool) -> Callable[..., Any]:
    """A function that makes masks for transformers as ``make_mask`` does, of prompts without
    padding as `SeenKeys`. ``adds`` says that they are added to scores."""

    def mask(*given: Any, **asked: Any) -> Any:
        seen = None if given else _seen_keys(asked, adds=adds)
        return make_mask(*given, **asked) if seen is None else seen

    return mask


def _seen_keys(asked: dict[str, Any], *, adds: bool) -> SeenKeys | None:
    num_new, num_keys = asked["q_length"], asked["kv_length"]
    first, first_key = asked.get("q_offset", 0), asked.get("kv_offset", 0)
    if num_new == 1 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if not (isinstance(first, int) and isinstance(first_key, int)) or native_library() is None:
        return None
    if torch.device(asked.get("device", "cpu")).type != "cpu" or first < first_key:
        return None
    is_plain, window = private.window_of_mask(asked.get("mask_function"))
    if not is_plain:
        return None
    padding, end = asked.get("attention_mask"), first + num_new
    if padding is not None and not (padding.shape[-1] >= end and bool(padding[..., :end].all())):
        return None
    if not adds and num_new == num_keys and (window is None or window >= num_keys):
        return None  # SDPA needs none
    dtype = asked["dtype"] if adds else torch.bool
    return SeenKeys(
        (asked["batch_size"], 1, num_new, num_keys), dtype, Sight(first - first_key, window)
    )
