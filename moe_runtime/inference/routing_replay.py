"""Router replay: passes that choose the experts which a server recorded.

A trained policy and its server compute different results where their routers choose different
experts. A replayed pass takes the recorded experts, with weights and gradients of its own router.

Source: Ma et al., "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
Routers" (R3, 2025).

Shape suffixes: B sequences, N tokens of one, T tokens, L layers, E experts, K top-k.
"""

from __future__ import annotations

import base64
import contextlib
import inspect
import io
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_runtime.checkpoints.absent import AbsentParameters
from moe_runtime.checkpoints.expert_map import find_experts
from moe_runtime.checkpoints.transformers_private import cache_name
from moe_runtime.errors import UnsupportedUseError
from moe_runtime.inference.steps import LayerRouting, Listener
from moe_runtime.layer import MoELayer

Recorded = np.ndarray | Tensor | Sequence[np.ndarray | Tensor]
_CURRENT: ContextVar[object] = ContextVar("replay", default=None)
_HEADER = re.compile(
    rb"\x93NUMPY(?:\x01\x00..|[\x02\x03]\x00....)"
    rb"\{'descr': '([<>|][iu][1248])', 'fortran_order': (True|False), "
    rb"'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\),? *\} *\n",
    re.DOTALL,
)
_INTEGERS = {torch.uint8, torch.uint16, torch.int8, torch.int16, torch.int32, torch.int64}


def encode_routing(ids_TLK: np.ndarray) -> str:
    """A NumPy file in base64, like vLLM's `routed_experts`."""
    with io.BytesIO() as file:
        np.save(file, ids_TLK, allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode()


def decode_routing(text: str) -> np.ndarray:
    """`[T, L, K]`, from the text of `encode_routing`. Raises ValueError: it is something else, such
    as SGLang's `sglext.routed_experts`."""
    if not isinstance(text, str):
        raise ValueError(
            f"routed_experts must be text, a NumPy file in base64, got {type(text).__name__}"
        )
    try:
        file = base64.b64decode(text, validate=True)
        if not file.startswith(np.lib.format.MAGIC_PREFIX):
            raise ValueError(
                "its bytes have no NumPy header. Ids of sglext have no shape: give routed_experts "
                "of choices"
            )
    except ValueError as error:
        raise ValueError(f"routed_experts is not a NumPy file in base64: {error}") from None
    if (head := _HEADER.match(file)) is None:  # NumPy would evaluate it, but it is not trusted
        raise ValueError(
            "routed_experts must be a NumPy file of integers of tokens, layers and choices, got "
            f"{file[:80]!r}"
        )
    kind, is_turned, *sizes = (group.decode() for group in head.groups())
    shape, data = tuple(map(int, sizes)), file[head.end() :]
    if len(data) != math.prod(shape) * np.dtype(kind).itemsize:
        raise ValueError(f"routed_experts of {list(shape)} {kind} has {len(data)} bytes")
    found = np.frombuffer(data, kind).reshape(shape, order="F" if is_turned == "True" else "C")
    return found.copy()


def require_routing(ids_NLK: Tensor, num_experts: int) -> None:
    """Refuses choices that cannot be replayed.

    A row, the choices of one token in one layer, has distinct experts, or only -1. With -1 in some
    places the router could choose an expert twice.

    Raises:
        ValueError: a row is different, or names an expert that does not exist.
    """
    if ids_NLK.numel() and int(ids_NLK.max()) >= num_experts:
        raise ValueError(
            f"routed_experts names expert {int(ids_NLK.max())}, the layers have {num_experts}"
        )
    ranked_NLK, is_left_NLK = ids_NLK.sort(dim=-1).values, ids_NLK < 0
    is_twice_NLK = (ranked_NLK[..., 1:] == ranked_NLK[..., :-1]) & (ranked_NLK[..., 1:] >= 0)
    is_mixed_NL = is_left_NLK.any(-1) & ~is_left_NLK.all(-1)
    for is_wrong_NL, what in (
        (is_twice_NLK.any(-1), "an expert twice"),
        (is_mixed_NL, "some of its experts; give all of them, or -1 for all"),
    ):
        for token, layer in is_wrong_NL.nonzero()[:1].tolist():
            row = ids_NLK[token, layer].tolist()
            raise ValueError(f"routed_experts of token {token}, layer {layer} names {what}: {row}")


class RoutingOfPass(Listener):
    """Keeps the experts of one pass; a long pass calls each layer once per piece."""

    wants_routing = True
    follows_requests = False

    def __init__(self, num_experts: int) -> None:
        self._type = np.uint8 if num_experts <= 256 else np.uint16
        self._layers: defaultdict[int, list[np.ndarray]] = defaultdict(list)

    def routed(self, routing: LayerRouting) -> None:
        self._layers[routing.layer].append(routing.ids_TK.cpu().numpy())

    def ids(self) -> np.ndarray:
        """`[T, L, K]` in uint8 or, for more than 256 experts, uint16; int16 if some are -1."""
        layers = [np.concatenate(self._layers[layer]) for layer in sorted(self._layers)]
        ids_TLK = np.stack(layers, axis=1)
        return ids_TLK.astype(np.int16 if ids_TLK.min(initial=0) < 0 else self._type)


@contextlib.contextmanager
def replay_routing(model: nn.Module, routed_experts: Recorded) -> Iterator[None]:
    """A `with` block in which a model's tokens go to recorded experts.

    Its passes have the recorded tokens. Experts keep their recorded order, so with the server's
    weights log-probabilities have the bits of a pass that chose by itself.

    Args:
        model: of transformers, from `load`, of `MoELayer`s, or after `offload_training`.
        routed_experts: `[B, N, L, K]`, or `[Ni, L, K]` per sequence, for its first tokens. The
            router chooses for rows of -1 and for tokens that are not recorded.

    Raises:
        ValueError: it has other layers, experts, or numbers of tokens or choices, or a row is
            incomplete.
        UnsupportedUseError: activation checkpointing is on, a gate does not choose by `topk`, or it
            has no weight for an expert outside its groups.
    """
    if not len(routed_experts):
        raise ValueError("routed_experts must be of one sequence at least, got none")
    names = experts_of(model)
    num_experts = min(int(cast(Any, model.get_submodule(name)).num_experts) for name in names)
    sequences = [torch.as_tensor(_signed(one)) for one in routed_experts]
    for ids_NLK in sequences:
        if ids_NLK.ndim != 3 or ids_NLK.shape[1] != len(names):
            raise ValueError(
                f"routed_experts must be [tokens, {len(names)} layers, choices] of each sequence, "
                f"got {list(ids_NLK.shape)}"
            )
        require_routing(ids_NLK, num_experts)
    checkpoints = getattr(model, "is_activation_checkpointing", None)  # its name from 5.20 on
    if checkpoints is None:
        checkpoints = getattr(model, "is_gradient_checkpointing", False)
    if model.training and checkpoints:
        raise UnsupportedUseError(
            "gradient checkpointing chooses experts again in the backward pass: switch it off to "
            "replay a routing"
        )
    mine = _Passes(inspect.signature(model.forward).parameters, cache_name(model.forward))
    token = _CURRENT.set(mine)
    with contextlib.ExitStack() as installed:
        installed.callback(_CURRENT.reset, token)
        hook = model.register_forward_pre_hook(mine.begin, prepend=True, with_kwargs=True)
        installed.callback(hook.remove)
        for layer, name in enumerate(names):
            experts = model.get_submodule(name)
            replay = _LayerReplay(mine, layer, cast(Any, experts).num_experts, sequences)
            block = model.get_submodule(name.rpartition(".")[0])
            for handle in (
                block.register_forward_pre_hook(replay.begin, prepend=True),
                block.register_forward_hook(replay.end, always_call=True),
                experts.register_forward_pre_hook(replay.compare, with_kwargs=True),
            ):
                installed.callback(handle.remove)
        yield
    longest = max(map(len, sequences))
    if 0 < mine.num_tokens < longest:
        raise ValueError(
            f"routed_experts has up to {longest} tokens of a sequence, the passes were of "
            f"{mine.num_tokens}"
        )


@dataclass
class _Passes:
    """The passes of one `with` block; a long call has several, joined by the cache.

    Attributes:
        names: parameters of the model's `forward`.
        num_cached: tokens of each sequence before the pass.
        num_tokens: of each sequence in all passes.
    """

    names: Iterable[str]
    cache_name: str
    num_cached: int = 0
    num_tokens: int = 0

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _CURRENT.get() is self:
            given = {**dict(zip(self.names, args, strict=False)), **kwargs}
            cache = given.get(self.cache_name)
            self.num_cached = 0 if cache is None else int(cache.get_seq_length())


@dataclass
class _LayerReplay:
    owner: _Passes
    layer: int
    num_experts: int
    sequences: Sequence[Tensor]
    is_outside: bool = False
    _modes: list[_Choices] = field(default_factory=list)

    @property
    def _is_mine(self) -> bool:
        return _CURRENT.get() is self.owner

    def begin(self, *_: Any) -> None:
        if self._is_mine:
            self._modes.append(_Choices(self))
            self._modes[-1].__enter__()

    def end(self, *_: Any) -> None:
        if self._is_mine and self._modes:
            self._modes.pop().__exit__(None, None, None)

    def compare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_mine:
            return
        _, ids_TK, weights_TK, *_ = (*args, *kwargs.values())
        if self.is_outside and bool(weights_TK.isnan().any()):
            raise UnsupportedUseError(
                f"layer {self.layer} with experts has no weights of recorded experts outside of "
                "the groups that its gate chose: replay a routing of the same weights"
            )
        recorded_TK = self.ids(ids_TK)
        if not bool(((ids_TK == recorded_TK) | (recorded_TK < 0)).all()):
            raise UnsupportedUseError(
                f"layer {self.layer} with experts did not take the recorded ones: its gate does "
                "not choose by topk, which replaying needs"
            )

    def ids(self, like_TK: Tensor) -> Tensor:
        """`[T, K]` int64: the recorded experts, -1 for the router's choice."""
        num_tokens, top_k = like_TK.shape
        length, rest = divmod(num_tokens, len(self.sequences))
        first, parts = self.owner.num_cached, []
        self.owner.num_tokens = max(self.owner.num_tokens, first + length)
        for ids_NLK in self.sequences:
            ids_NK = ids_NLK[first : first + length, self.layer]
            if rest or ids_NK.shape[1] != top_k:
                raise ValueError(
                    f"routed_experts has {len(self.sequences)} sequences and {ids_NK.shape[1]} "
                    f"choices; the pass has {num_tokens} tokens and {top_k}"
                )
            parts.append(nn.functional.pad(ids_NK, (0, 0, 0, length - len(ids_NK)), value=-1))
        return torch.cat(parts).to(like_TK.device)


class _Choices(TorchFunctionMode):
    """Replaces the router's choice, `topk` of `K` among `E` scores, by recorded ids."""

    def __init__(self, replay: _LayerReplay) -> None:
        super().__init__()
        self._replay, self._chose_groups = replay, False
        replay.is_outside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores = args[0] if args else (kwargs or {})["input"]
        top_k = self._replay.sequences[0].shape[2]
        if scores.shape[-1] != self._replay.num_experts or found.indices.shape[-1] != top_k:
            self._chose_groups = True
            return found
        recorded = self._replay.ids(found.indices.reshape(-1, top_k)).view_as(found.indices)
        ids = found.indices.where(recorded < 0, recorded)
        values = scores.gather(-1, ids)
        if self._chose_groups:
            # most gates weigh by other scores; `compare` finds those that weigh by these
            is_masked = (recorded >= 0) & ((values == 0) | values.isinf())
            values = values.masked_fill(is_masked, torch.nan)
            self._replay.is_outside = bool(is_masked.any())
        return torch.return_types.topk((values, ids))  # type: ignore[attr-defined]


def _signed(ids: np.ndarray | Tensor) -> np.ndarray | Tensor:
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu":
        return ids.astype(np.int64)
    if isinstance(ids, Tensor) and ids.dtype in _INTEGERS:
        return ids.long()
    kind = getattr(ids, "dtype", type(ids).__name__)
    raise ValueError(f"routed_experts must be arrays or tensors of integers, got {kind}")


def experts_of(model: nn.Module) -> list[str]:
    """Names of the modules with routed experts, in order."""
    absent, own = [], []
    for name, module in model.named_modules():
        if isinstance(module, AbsentParameters) and hasattr(module, "layer"):
            absent.append(name)
        elif isinstance(module, MoELayer):
            own.append(f"{name}.experts" if name else "experts")
    return absent or own or [found.name for found in find_experts(model)]
