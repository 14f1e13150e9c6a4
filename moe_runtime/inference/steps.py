"""Calls of a loaded model, their forward passes, and listeners of these.

Shape suffixes: T tokens, K top-k, D model width.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, StaticCache

from moe_runtime.checkpoints.transformers_private import cache_name
from moe_runtime.errors import (
    CLOSED,
    FORKED,
    CapacityError,
    MoERuntimeError,
    UnsupportedUseError,
)
from moe_runtime.inference.known_classes import can_share_a_pass
from moe_runtime.inference.kv_cache import cache_of, give_room
from moe_runtime.memory.store import ExpertStore
from moe_runtime.types import ExpertKey


class Step:
    """The T tokens of one forward pass, sequence by sequence.

    Attributes:
        num_new: new tokens of each sequence.
        cache: of keys and values, or None.
        first_request: number of the first sequence's request.
        begun: requests that begin with this step.
        ended: requests that ended before this step.
    """

    def __init__(self, inputs: Mapping[str, Any], shape: tuple[int, int]) -> None:
        """``inputs`` are the arguments of ``forward``; ``shape`` is sequences and new tokens."""
        self.num_sequences, self.num_new = shape
        # the cache of continuous batching has no length
        self.cache = cache if hasattr(cache := cache_of(inputs), "get_seq_length") else None
        self.first_request = 0
        self.begun: Sequence[int] = ()
        self.ended: Sequence[int] = ()
        self._ids: torch.Tensor | None = inputs.get("input_ids")
        self._positions: torch.Tensor | None = inputs.get("position_ids")

    @cached_property
    def num_cached(self) -> int:
        """Cached tokens of a sequence. A static cache counts on the device: this waits for it."""
        return 0 if self.cache is None else int(self.cache.get_seq_length())

    @property
    def phase(self) -> str:
        """``"prefill"`` or ``"decode"``."""
        return "decode" if self.num_new == 1 and self.num_cached else "prefill"

    @cached_property
    def token_ids(self) -> np.ndarray:
        """``[T]``; -1 if the input is embeddings."""
        if self._ids is None:
            return np.full(self.num_sequences * self.num_new, -1)
        return self._ids.cpu().numpy().reshape(-1)

    @cached_property
    def positions(self) -> np.ndarray:
        """``[T]`` positions within the sequences."""
        shape, given = (self.num_sequences, self.num_new), self._positions
        if given is not None and given.shape == shape:
            return given.cpu().numpy().reshape(-1)
        return np.tile(np.arange(self.num_cached, self.num_cached + self.num_new), shape[0])

    @cached_property
    def sequences(self) -> np.ndarray:
        """``[T]`` numbers of the sequences in the batch."""
        return np.repeat(np.arange(self.num_sequences), self.num_new)

    @cached_property
    def requests(self) -> np.ndarray:
        """``[T]`` numbers of the requests."""
        return self.sequences + self.first_request


class LayerRouting(NamedTuple):
    """The routing of a step's tokens in one layer.

    Attributes:
        layer: index among the layers with experts.
        keys: experts that this process computes, those with most rows last.
        hidden_TD: input of the router.
        ids_TK: experts of each token; ids outside the layer's experts are skipped.
        weights_TK: router weights.
    """

    layer: int
    keys: Sequence[ExpertKey]
    hidden_TD: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor


class Listener:
    """Follows a model's forward passes; subclasses override what they need.

    Attributes:
        wants_routing: ``routed`` is called; read after ``begin``.
        wants_demands: ``demanded`` is called.
        reads_ahead: ``demanded`` may start reads, which run while the layer computes.
        follows_requests: steps need the numbers of their requests.
    """

    wants_routing = wants_demands = reads_ahead = False
    follows_requests = True

    def allow(self, step: Step) -> None:
        """Raises an error to refuse a pass."""

    def begin(self, step: Step) -> None:
        """A pass begins; all listeners have allowed it."""

    def routed(self, routing: LayerRouting) -> None:
        """Called once per layer, before its experts are leased."""

    def demanded(self, routing: LayerRouting) -> None:
        """Called once per layer, after its reads are queued or all its experts were resident."""

    def end(self) -> None:
        """The pass succeeded."""

    def forget(self) -> None:
        """The pass failed; its state is void. May be called twice."""


class Listeners:
    """All listeners of a model, in order."""

    def __init__(self) -> None:
        self._requests = RequestNumbers()
        self._set(())

    def add(self, listener: Listener, *, is_first: bool = False) -> None:
        self._set((listener, *self._all) if is_first else (*self._all, listener))

    def remove(self, listener: Listener) -> None:
        self._set(tuple(one for one in self._all if one is not listener))

    @contextmanager
    def also(self, listener: Listener) -> Iterator[None]:
        """Adds a listener for a ``with`` block."""
        self.add(listener)
        try:
            yield
        finally:
            self.remove(listener)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Calls no listener in a ``with`` block."""
        everyone = self._all
        self._set(())
        try:
            yield
        finally:
            self._set(everyone)

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Calls the listeners for a pass with these inputs. Raises MoERuntimeError: a listener
        refuses the pass."""
        tokens = inputs.get("input_ids")
        if tokens is None:
            tokens = inputs.get("inputs_embeds")
        if tokens is None or not self._all:  # the model itself raises the error
            return
        step = Step(inputs, tokens.shape[:2])
        for listener in self._all:
            listener.allow(step)
        # num_cached waits for a GPU, so decode steps avoid it
        if step.num_new > 1 or self._following:
            self._requests.begin(step)
        for listener in self._all:
            listener.begin(step)
        self._set(self._all)

    def end(self) -> None:
        for listener in self._all:
            listener.end()

    def forget(self) -> None:
        for listener in self._all:
            listener.forget()

    def _set(self, listeners: tuple[Listener, ...]) -> None:
        self._all = listeners
        self._following = [one for one in listeners if one.follows_requests]
        self.routing_listeners = tuple([one for one in listeners if one.wants_routing])
        self.demand_listeners = tuple([one for one in listeners if one.wants_demands])


class Steps:
    """Runs one forward pass at a time.

    Listeners keep state of the running pass, so threads take turns; a pass may call the model
    again. After any end of a pass, Ctrl-C included, other threads can go on, torch has its threads
    back, and no lease is open.

    Attributes:
        turn: the lock of a pass.
    """

    def __init__(self, stores: Sequence[ExpertStore[Any]], names: Sequence[str] = ()) -> None:
        self.listeners = Listeners()
        self._names = tuple(names)
        self._stores = list(stores)
        self.turn = threading.RLock()
        self._is_passing = False
        self._known = threading.local()  # threads that are known to have torch's own threads
        self._known.is_known = True

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Mutes the listeners in a ``with`` block; other threads wait."""
        with self.turn, self.listeners.muted():
            yield

    def require_open(self) -> None:
        """Raises MoERuntimeError: the model is closed, or this process is a fork."""
        if self._stores[0].is_forked:
            raise MoERuntimeError(FORKED)
        if self._stores[0].is_closed:
            raise MoERuntimeError(CLOSED)

    def run(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs ``call`` as a pass when it is this thread's turn. Raises MoERuntimeError: as
        ``require_open``."""
        self.require_open()
        with self.turn:
            is_inner, is_done = self._is_passing, False
            num_threads = self._num_threads()
            try:
                self._is_passing = True
                self.listeners.begin({**kwargs, **dict(zip(self._names, args, strict=False))})
                result = call(*args, **kwargs)
                self.listeners.end()
                is_done = True
                return result
            finally:
                self._is_passing = is_inner
                if torch.get_num_threads() != num_threads:
                    torch.set_num_threads(num_threads)
                if not is_done:
                    for store in () if is_inner else self._stores:
                        store.end_leases()
                    self.listeners.forget()

    def _num_threads(self) -> int:
        """The number of torch's threads for this thread.

        A thread inherits the number at its first use of torch. If that was during another thread's
        pass, it has one thread, and gets the number of a new thread instead.
        """
        found = torch.get_num_threads()
        if not hasattr(self._known, "is_known"):
            if found == 1:
                with ThreadPoolExecutor(1) as fresh:
                    found = fresh.submit(torch.get_num_threads).result()
                torch.set_num_threads(found)
            self._known.is_known = True
        return found


# locks and listeners are not part of a graph; layers inside may be
_outside_graphs: Any = torch.compiler.disable(
    recursive=False,
    reason="the experts of a loaded model come and go: export the model that from_pretrained has",
)


class CalledInSteps:
    """Mixin of a model's class: its calls are passes of ``_steps``."""

    _steps: Steps
    _drafts: Any
    _pieces: Any

    @_outside_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch; threads take turns. Raises UnsupportedUseError: torch traces the call, or
        transforms it with ``torch.func``."""
        require_plain_call()
        if cast(Any, self).training:
            _require_something_to_train(self, args, kwargs)
        passes = partial(self._steps.run, cast(Any, super()).__call__)
        if self._pieces is not None:
            passes = partial(self._pieces.call, self, passes)
        if self._drafts is None:
            return passes(*args, **kwargs)
        self._steps.require_open()
        return self._drafts.call(passes, args, kwargs)


def _require_something_to_train(model: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    if kwargs.get("labels") is None or not torch.is_grad_enabled():
        return
    given = chain(args, kwargs.values(), model.parameters())
    if not any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in given):
        raise UnsupportedUseError(
            "a loaded model is frozen, so this loss would train nothing: set requires_grad on "
            "parameters beside the experts, add adapters to them with PEFT, or train experts with "
            "`moe-runtime finetune`; to measure the loss alone, call eval() first"
        )


_FUNCTORCH: Any = torch._C._functorch  # type: ignore[attr-defined]
_INSTEAD_OF_TRANSFORM = {
    "Vmap": "call it on a batch",
    "Grad": "use backward() or torch.autograd.grad",
    "Jvp": "use backward() or torch.autograd.grad",
}
# modes in which tensors have no content
_TRACING_MODES = tuple(torch._C._TorchDispatchModeKey.__members__.values())  # type: ignore[attr-defined]


def require_plain_call() -> None:
    """Raises UnsupportedUseError: torch traces, or a transform of ``torch.func`` is active."""
    if torch._C._get_tracing_state() is not None:
        refuse_tracing("torch.jit.trace")
    if any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING_MODES):
        refuse_tracing("a tracer of torch (make_fx, fake tensors)")
    transform = _FUNCTORCH.peek_interpreter_stack()
    if transform is not None:
        name = transform.key().name
        instead = _INSTEAD_OF_TRANSFORM.get(name, "call it outside of the transform")
        raise UnsupportedUseError(
            f"torch.func cannot transform a loaded model ({name.lower()}), since its experts come "
            f"and go: {instead}"
        )


def refuse_tracing(who: str) -> NoReturn:
    """Raises UnsupportedUseError: a loaded model cannot be traced."""
    raise UnsupportedUseError(
        f"{who} cannot follow a loaded model, since its experts come and go: use torch.compile, "
        "which makes graphs between them, or give it the model that from_pretrained of "
        "transformers has in memory"
    )


class TokenLimit(Listener):
    """Refuses passes with more than ``max_tokens`` cached and new tokens, all places of a static
    cache included, or with more than ``in_pass`` sequences."""

    def __init__(self, max_tokens: int, in_pass: int | None = None) -> None:
        self._max_tokens, self._in_pass = max_tokens, in_pass or max_tokens
        self.follows_requests = False

    def allow(self, step: Step) -> None:
        """Raises CapacityError: the pass needs more memory than is reserved."""
        places = [getattr(layer, "max_cache_len", 0) for layer in getattr(step.cache, "layers", ())]
        length = max(step.num_new, *places) if any(places) else step.num_cached + step.num_new
        if step.num_sequences * length > self._max_tokens:
            raise too_long(step.num_sequences, length, self._max_tokens)
        if step.num_sequences > self._in_pass:
            raise CapacityError(
                f"a pass has memory for {self._in_pass} sequences, got {step.num_sequences}; give "
                "fewer at a time"
            )


def too_long(num_sequences: int, length: int, max_tokens: int) -> CapacityError:
    asked = f"{length} tokens" if num_sequences == 1 else f"{num_sequences} sequences of {length}"
    return CapacityError(
        f"{asked} need room for {num_sequences * length} tokens, but memory is set aside for "
        f"{max_tokens}; load the model with max_tokens={num_sequences * length}, or ask for fewer"
    )


class RequestNumbers:
    """Numbers requests as they begin. They end when their thread begins others, or ends itself."""

    def __init__(self) -> None:
        self.next = 0
        self._running: dict[int | None, range] = {}  # by thread

    def begin(self, step: Step) -> None:
        """Numbers the requests of a step. A server's caches have numbers of their own."""
        if (number := getattr(step.cache, "number_requests", None)) is not None:
            return number(self, step)
        me = threading.current_thread().ident
        if not step.num_cached:
            gone = self._running.keys() - {t.ident for t in threading.enumerate() if t.ident != me}
            step.ended = sorted(number for one in gone for number in self._running.pop(one))
            step.begun = self._running[me] = range(self.next, self.next + step.num_sequences)
            self.next = step.begun.stop
        step.first_request = self._running.get(me, range(0)).start
        if getattr(step.cache, "is_one_text", False):
            step.requests = np.full(step.num_sequences, step.first_request)


class OneThread:
    """Limits torch to one thread during a model's forward passes."""

    _before: int | None = None

    def hold(self, model: Any) -> None:
        model.register_forward_pre_hook(self.begin)
        model.register_forward_hook(self.end, always_call=True)

    def begin(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._before = torch.get_num_threads()
        torch.set_num_threads(1)

    def end(self, *_: Any) -> None:
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None


PASS_TOKENS = 2048
"""Most tokens of a pass: enough rows for every expert, and little memory for activations."""
_WHOLE_FAMILIES = frozenset(
    ("diffusion_gemma", "jamba", "minimax", "qwen3_omni_moe", "qwen3_omni_moe_thinker")
)
"""Families that cannot continue a prompt from their cache, states or positions."""
_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})
"""RoPE types whose angles depend on the length of the whole prompt."""
ANSWERS_MORE = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Settings that add outputs to the logits."""
_BY_TOKEN = ("input_ids", "inputs_embeds")
_AS_THEY_ARE = ("return_dict", "tokenizer", "assistant_tokenizer")
_OF_PICTURES = ("pixel_values", "image_", "mm_encoder_outputs")
_PICTURE_MARKS = [f"{kind}_token_{end}" for kind in ("image", "video") for end in ("id", "index")]
_KINDS = ("mm_token_type_ids", "token_type_ids")


def most_in_pass(model: PreTrainedModel, device: torch.device) -> int | None:
    """Most tokens of a pass on a ``device``; None if any prompt is one pass."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    is_whole = (
        device.type != "cpu"
        or not model.can_generate()
        or config.model_type in _WHOLE_FAMILIES
        or bool(kinds & _ROPE_BY_LENGTH)
        or not can_share_a_pass(config)
    )
    return None if is_whole else PASS_TOKENS


class Pieces:
    """Cuts long calls of a model into several passes.

    Tokens of a piece attend to earlier pieces through the cache, as in a conversation. The first
    piece ends after the last picture. A call with gradients, a loss or hidden states stays one
    pass; it may take more memory than is reserved. Other calls that cannot be cut are refused.
    Router logits come without their loss.
    """

    def __init__(self, model: Any, most_tokens: int, max_tokens: int) -> None:
        """``most_tokens`` is the limit of a pass, ``max_tokens`` that of cached and new tokens."""
        self.most_tokens, self._max_tokens = most_tokens, max_tokens
        self._names = [*inspect.signature(model.forward).parameters]
        self._cache_name = cache_name(model.forward)

    def call(self, model: Any, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The model's output; ``run`` computes a pass. Raises CapacityError: the call needs more
        memory than is reserved, or cannot be cut."""
        given = {**kwargs, **dict(zip(self._names, args, strict=False))}
        given = {name: value for name, value in given.items() if value is not None}
        if not given.get("mm_encoder_outputs", True):  # empty for texts without pictures
            del given["mm_encoder_outputs"]
        tokens = next((given[name] for name in _BY_TOKEN if name in given), None)
        if tokens is None or tokens.shape[0] * tokens.shape[1] <= self.most_tokens:
            return run(*args, **kwargs)
        first, cache = self._first_end(model, given), given.pop(self._cache_name, None)
        is_cut = isinstance(first, int)
        num_cached = int(cache.get_seq_length()) if is_cut and cache is not None else 0
        if isinstance(first, int) and not _has_positions(model, given, num_cached):
            first = "pictures whose places are unknown"
        if not isinstance(first, int):
            if first:
                raise CapacityError(
                    f"more than {self.most_tokens} new tokens with {first} would be one pass, for "
                    "which no memory is set aside: give fewer at a time"
                )
            return run(*args, **kwargs)
        num_sequences, num_new = tokens.shape[:2]
        most = max(self.most_tokens // num_sequences, 1)
        ends = [*range(max(most, first), num_new, most), num_new]
        if num_sequences * (num_cached + num_new) > self._max_tokens:
            raise too_long(num_sequences, num_cached + num_new, self._max_tokens)
        text = model.config.get_text_config(decoder=True)
        is_cached = given.pop("use_cache", getattr(text, "use_cache", True))
        keep = given.pop("logits_to_keep", 0)
        keep = keep if keep > 0 else max(num_new + keep, 0)  # a negative number drops the first
        if cache is None:
            cache = DynamicCache(config=model.config)
            give_room(cache, model)
        given |= {"use_cache": True, self._cache_name: cache}
        out, kept, routed = None, [], []
        for begin, end in pairwise((0, *ends)):
            part = dict(self._part(given, begin, end, num_cached))
            num_kept = min(end - begin, keep - num_new + end)
            if "logits_to_keep" in self._names:
                part["logits_to_keep"] = max(num_kept, 1)
            out = run(**part)
            if num_kept > 0:
                kept.append(out.logits[:, -num_kept:])
            if out.get("router_logits") is not None:
                routed.append(out["router_logits"])
        assert out is not None
        left_out = () if is_cached else (self._cache_name,)
        answer = {name: value for name, value in out.items() if name not in left_out}
        if routed:
            layers = zip(*routed, strict=True)
            answer["router_logits"] = tuple(_joined(parts, num_sequences) for parts in layers)
            answer.pop("aux_loss", None)  # it belongs to the last piece only
        kept = kept or [out.logits[:, :0]]
        return type(out)(**(answer | {"logits": kept[0] if len(kept) == 1 else torch.cat(kept, 1)}))

    def _first_end(self, model: Any, given: Mapping[str, Any]) -> int | str:
        """Tokens up to the end of the last picture; or the reason not to cut the call. An empty
        reason means one pass that may take more memory than is reserved."""
        cache, mask = given.get(self._cache_name), given.get("attention_mask")
        config = model.config.get_text_config(decoder=True)
        more = [name for name in ANSWERS_MORE if given.get(name, getattr(config, name, False))]
        has_gradients = torch.is_grad_enabled() and any(
            isinstance(one, torch.Tensor) and one.requires_grad
            for one in chain(given.values(), model.parameters())
        )
        is_served = hasattr(cache, "number_requests")  # the server cuts prompts itself
        if is_served or has_gradients or "labels" in given or "output_hidden_states" in more:
            return ""
        if "output_attentions" in more:
            return "output_attentions"
        if cache is not None and type(cache) not in (DynamicCache, StaticCache):
            return f"a {type(cache).__name__}"
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
            return "an attention mask for each pair of tokens"
        if not isinstance(given.get("logits_to_keep", 0), int):
            return "logits_to_keep as a tensor"
        if given.get("return_dict") is False:
            return "return_dict=False"
        known = {*_BY_TOKEN, *_AS_THEY_ARE, *ANSWERS_MORE, self._cache_name, "attention_mask"}
        known |= {"use_cache", "logits_to_keep", "position_ids", "cache_position"}
        rest = [name for name in given if name not in known and not name.endswith("type_ids")]
        if unknown := [name for name in rest if not name.startswith(_OF_PICTURES)]:
            return unknown[0]
        if not rest:
            return 0
        kinds = next((given[name] for name in _KINDS if name in given), None)
        if kinds is None:
            marks = [getattr(model.config, name, None) for name in _PICTURE_MARKS]
            marks = [one for one in marks if one is not None]
            if not marks or "input_ids" not in given:
                return "pictures whose places are unknown"
            kinds = torch.isin(given["input_ids"], torch.tensor(marks))
        places = kinds.any(0).nonzero()
        return int(places[-1]) + 1 if len(places) else 0

    def _part(
        self, given: Mapping[str, Any], begin: int, end: int, num_cached: int
    ) -> Iterator[tuple[str, Any]]:
        for name, value in given.items():
            if name in _BY_TOKEN:
                yield name, value[:, begin:end]
            elif name == "attention_mask":
                yield name, value[:, : num_cached + end]
            elif name in ("position_ids", "cache_position") or name.endswith("type_ids"):
                if not (begin and name in _KINDS):
                    yield name, value[..., begin:end]
            elif not (begin and name.startswith(_OF_PICTURES)):
                yield name, value


def _joined(parts: Sequence[torch.Tensor], num_sequences: int) -> torch.Tensor:
    """Joins router logits of pieces: ``[B, T, E]``, or ``[B * T, E]`` as in most families."""
    if parts[0].ndim > 2:
        return torch.cat([*parts], -2)
    return torch.cat([part.unflatten(0, (num_sequences, -1)) for part in parts], 1).flatten(0, 1)


def _has_positions(model: Any, given: dict[str, Any], num_cached: int) -> bool:
    """Adds ``position_ids`` of the whole prompt if the model counts positions of pictures its own
    way. Returns whether pieces then have right positions."""
    owner: Any = next((m for m in model.modules() if hasattr(m, "get_rope_index")), None)
    if owner is None or "position_ids" in given:
        return True
    if num_cached:  # the model continues from the cache, as for a whole call
        return owner.rope_deltas is not None or not any(n.startswith(_OF_PICTURES) for n in given)
    if "input_ids" not in given:
        return False
    ids, names = given["input_ids"], ("image_grid_thw", "attention_mask")
    told = [given[name] for name in _KINDS if name in given and "image_grid_thw" in given]
    kinds = told[0] if told else torch.zeros_like(ids)
    known = {name: given[name] for name in names if name in given}
    found = owner.get_rope_index(input_ids=ids, mm_token_type_ids=kinds, **known)
    given["position_ids"], owner.rope_deltas = found
    return True
