"""Prediction of a model's routing: estimators, gates and prefetching."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from moe_runtime.config import PrefetchMode
from moe_runtime.errors import CheckpointError, MoERuntimeWarning, UnsupportedModelError
from moe_runtime.inference.expert_layer import OffloadedExperts
from moe_runtime.inference.steps import LayerRouting, Listener, Listeners, Step
from moe_runtime.kernels.decode_step.gate_ranking import MOST_TOKENS, GateRanking, NativeLookAhead
from moe_runtime.memory.prefetcher import Guesses, Prefetcher
from moe_runtime.memory.store import ExpertStore
from moe_runtime.policies.prediction import (
    Estimator,
    Guess,
    HiddenLookahead,
    LayerRouted,
    NextGate,
    Predictor,
    Routes,
    Shape,
    is_file_name,
    make_estimator,
    make_predictor,
)
from moe_runtime.policies.prediction.base import shape_of
from moe_runtime.policies.prediction.hidden import PRIOR, REMEMBERED, believed_at_first
from moe_runtime.policies.prefetch import PrefetchRules
from moe_runtime.types import ExpertKey, ModelSignature

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moe_runtime.inference.expert_partition import ExpertPartition
    from moe_runtime.inference.learning import KeptLearning


NEXT_GATE_RECALL = 0.64
"""Recall of `next-gate` in the top K of the next layer, on the pocket model. ``auto`` takes a
trained predictor only if its recall is higher."""
MOST_TABLES = 1 / 256
"""Most bytes of its tables, as a share of the experts' bytes: they take slots."""


def open_estimator(
    predictor: str | Path,
    model: torch.nn.Module,
    block_names: Sequence[str],
    signature: ModelSignature,
    checkpoint: Path,
    expert_bytes: int,
) -> tuple[Estimator, int]:
    """The named estimator, and the bytes of its tables; the fixed reserve covers untrained counts.

    ``auto`` takes a predictor that was trained on the model's own routing if its recall is higher
    than that of the gates. Otherwise it takes the gates, or counts if there are no known gates.
    Raises CheckpointError: the predictor's file is damaged or of another model. Raises ValueError:
    the name is unknown.
    """
    from moe_runtime.lab.traces.learned import learned_path, read_lesson, read_predictor

    if predictor == "auto":
        predictor = "next-gate" if _has_gates(model, block_names, signature) else "running-counts"
        lesson = read_lesson(signature, checkpoint)
        least = NEXT_GATE_RECALL if predictor == "next-gate" else 0.0
        if lesson is not None and lesson.recall > least:
            path = learned_path("predictor", signature, checkpoint)
            try:
                found = _with_bytes(read_predictor(path, signature))
                if found[1] <= MOST_TABLES * expert_bytes:
                    return found
            except CheckpointError as error:
                text = f"the predictor is {predictor}: {error}"
                warnings.warn(text, MoERuntimeWarning, stacklevel=2)
    if is_file_name(predictor):
        return _with_bytes(read_predictor(predictor, signature))
    return make_estimator(str(predictor), shape_of(signature)), 0


def _with_bytes(estimator: Estimator) -> tuple[Estimator, int]:
    return estimator, sum(array.nbytes for array in estimator.state().values())


def _has_gates(
    model: torch.nn.Module, block_names: Sequence[str], signature: ModelSignature
) -> bool:
    try:
        for name in block_names:
            find_gate(model, name, shape_of(signature))
    except UnsupportedModelError:
        return False
    return True


def find_gate(
    model: torch.nn.Module, block_name: str, shape: Shape
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A layer's gate: weight ``[E, D]``, and bias ``[E]`` or None.

    The gate is a module next to the experts, or a part of one, with a weight row per expert. Raises
    UnsupportedModelError: there is no such module, or several.
    """
    gates = [
        (weight, getattr(part, "bias", None))
        for child in model.get_submodule(block_name).children()
        for part in (child, *child.children())
        if isinstance(weight := getattr(part, "weight", None), torch.Tensor)
        and weight.ndim == 2
        and len(weight) == shape.num_experts
    ]
    if len(gates) != 1:
        raise UnsupportedModelError(
            f"{block_name}: found no gate with {shape.num_experts} rows beside the experts; use a "
            "predictor that needs routing only, such as running-counts"
        )
    weight, bias = gates[0]
    if isinstance(bias, torch.Tensor) and bias.shape == (shape.num_experts,):
        return weight.detach(), bias.detach()
    return weight.detach(), None


def find_gates(
    model: torch.nn.Module, block_names: Sequence[str], shape: Shape
) -> tuple[np.ndarray, np.ndarray]:
    """Copies of all gates for training: fp32 weights ``[L, E, D]`` and biases ``[L, E]``. Raises
    UnsupportedModelError: a layer has no gate, or gates differ in width."""
    found = [find_gate(model, name, shape) for name in block_names]
    if len({weight.shape for weight, _ in found}) != 1:
        raise UnsupportedModelError("the gates of this model differ in width between layers")
    no_bias = np.zeros(shape.num_experts, dtype=np.float32)
    biases = [no_bias if bias is None else as_numpy(bias) for _, bias in found]
    return np.stack([as_numpy(weight) for weight, _ in found]), np.stack(biases)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    # each of these calls takes as long as a small gate, even without effect
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype is not torch.float32 and tensor.dtype is not torch.int64:
        tensor = tensor.float()
    return tensor.numpy() if tensor.device.type == "cpu" else tensor.cpu().numpy()


def _bind_ranker(
    estimator: Estimator, model: torch.nn.Module, block_names: Sequence[str], place: torch.device
) -> list[list[GateRanking]]:
    """Binds an estimator of hidden states to the gates, on the device ``place``. Returns rankings
    by distance and layer; empty for other estimators."""
    if not isinstance(estimator, NextGate):
        return []
    if isinstance(estimator, HiddenLookahead):
        maps = torch.from_numpy(estimator.maps_DLEX).to(place)
        offsets = torch.from_numpy(estimator.offsets_DLE).to(place)
        gates = [
            list(zip(*of_distance, strict=True)) for of_distance in zip(maps, offsets, strict=True)
        ]
    else:
        own = [find_gate(model, name, estimator.shape) for name in block_names]
        gates = [own] * estimator.max_distance
    rankings = [
        [GateRanking(weight, bias, estimator.num_ranks) for weight, bias in of_distance]
        for of_distance in gates
    ]

    def rank(hidden_BD: torch.Tensor, distance: int, layer: int) -> list[list[int]]:
        return rankings[distance - 1][layer](hidden_BD)

    estimator.ranker = rank
    return rankings


class PrefetchListener(Listener):
    """Passes steps, and the routing of layers if wanted, to a prefetcher."""

    def __init__(
        self,
        prefetcher: Prefetcher,
        look_ahead: TokenLookAhead | None,
        *,
        needs_weights: bool,
        needs_hidden: bool,
    ) -> None:
        self._prefetcher = prefetcher
        self._look_ahead = look_ahead
        self._needs_weights = needs_weights
        self._needs_hidden = needs_hidden
        self._no_weights = np.zeros((0, 0), np.float32)

    def begin(self, step: Step) -> None:
        for request in step.ended:
            self._prefetcher.finish(request)
        has_drafts = getattr(step.cache, "is_one_text", False)
        self._prefetcher.step(step.requests, lambda: step.token_ids, has_drafts=has_drafts)
        self.wants_demands = self.follows_requests = self._prefetcher.wants_layers
        self.reads_ahead = self._prefetcher.predicts

    def demanded(self, routing: LayerRouting) -> None:
        prefetcher, look_ahead = self._prefetcher, self._look_ahead
        layer, keys, hidden_TD, ids_TK, weights_TK = routing
        if look_ahead is not None and look_ahead.takes(ids_TK, hidden_TD):
            prefetcher.tokens_routed(layer, keys, ids_TK, hidden_TD)
            return
        event = LayerRouted(
            layer=layer,
            expert_ids=as_numpy(ids_TK),
            gate_weights=as_numpy(weights_TK) if self._needs_weights else self._no_weights,
            hidden=hidden_TD if self._needs_hidden else None,
        )
        prefetcher.routed(event, keys)

    def forget(self) -> None:
        self._prefetcher.forget()


def open_prefetcher(
    model: torch.nn.Module,
    listeners: Listeners,
    block_names: Sequence[str],
    store: ExpertStore[Any],
    estimator: Estimator,
    mode: PrefetchMode,
    place: torch.device,
    partition: ExpertPartition | None = None,
    learning: KeptLearning | None = None,
) -> Prefetcher:
    """Opens a prefetcher that listens to every pass of a model. Raises UnsupportedModelError: the
    predictor needs gates, and the model has no known ones."""
    gates_DL = _bind_ranker(estimator, model, block_names, place)
    predictor: Predictor = make_predictor(estimator)
    begins_empty = [] if learning is None else learning.keep(predictor)
    if begins_empty and type(estimator).finish is not Estimator.finish:
        warnings.warn(
            f"{estimator.name} begins empty: it guesses from requests of this model that have "
            "ended, and keeps them for later runs",
            MoERuntimeWarning,
            stacklevel=2,
        )
    if partition is not None:
        from moe_runtime.inference.expert_partition import OwnGuesses

        predictor = OwnGuesses(predictor, partition)
    rules, shape = PrefetchRules(), estimator.shape
    look_ahead = None
    dtype = getattr(model, "dtype", torch.float32)
    is_native = all(gate.c_struct(dtype) is not None for gates in gates_DL for gate in gates)
    if isinstance(estimator, NextGate) and gates_DL and is_native:
        least_chance = rules.min_probability / 2  # less probable guesses have no effect
        look_ahead = TokenLookAhead(estimator, gates_DL, dtype, least_chance, partition)
    prefetcher = Prefetcher(
        Guesses(store),
        predictor,
        mode,
        num_layers=len(block_names),
        top_k=shape.top_k,
        rules=rules,
        token_look_ahead=look_ahead,
    )
    if learning is not None and mode is PrefetchMode.AUTO:
        learning.keep(prefetcher.controller)
    listeners.add(
        PrefetchListener(
            prefetcher,
            look_ahead,
            needs_weights=predictor.needs_history,
            needs_hidden=estimator.needs_hidden,
        )
    )
    return prefetcher


class TokenLookAhead:
    """Guesses from hidden states by the gates of the next layers, in native code. Equals
    ``LookaheadPredictor`` without improbable guesses."""

    def __init__(
        self,
        estimator: NextGate,
        gates_DL: Sequence[Sequence[GateRanking]],
        dtype: torch.dtype,
        least_chance: float,
        partition: ExpertPartition | None,
    ) -> None:
        shape = estimator.shape
        self._native = native = NativeLookAhead(
            gates_DL,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            dtype=dtype,
            prior=PRIOR,
            remembered=REMEMBERED,
            believed=believed_at_first(estimator.num_ranks, shape.top_k),
            least_chance=least_chance,
        )
        self._top_k, self._dim, self._dtype = shape.top_k, gates_DL[0][0].dim, dtype
        self._is_mine = None if partition is None else partition.owns
        keys = [
            ExpertKey(layer, expert)
            for layer in range(shape.num_layers)
            for expert in range(shape.num_experts)
        ]
        self._key = keys.__getitem__
        self.begin_step = native.begin_step
        self.take_counts = native.take_counts

    def takes(self, ids_TK: torch.Tensor, hidden_TD: torch.Tensor) -> bool:
        """Whether the native code supports these shapes and types."""
        return (
            ids_TK.shape[0] <= MOST_TOKENS
            and ids_TK.shape[1] == self._top_k
            and hidden_TD.shape[1] == self._dim
            and hidden_TD.dtype is self._dtype
            and hidden_TD.is_contiguous()
            and ids_TK.dtype is torch.int64
            and ids_TK.is_contiguous()
        )

    def look(
        self, layer: int, ids_TK: torch.Tensor, hidden_TD: torch.Tensor, horizon: int
    ) -> list[Guess]:
        """Records a layer's routing and guesses that of the next layers, nearest first."""
        native = self._native
        number = native.look(layer, ids_TK, hidden_TD, horizon)
        experts, chances = native.experts[:number], native.chances[:number]
        guesses = list(zip(map(self._key, experts), chances, strict=True))
        if self._is_mine is None:
            return guesses
        return [guess for guess in guesses if self._is_mine(guess[0])]


def record_hidden(
    model: PreTrainedModel,
    windows: Sequence[Sequence[int]],
    *,
    progress: Callable[[int], None] | None = None,
) -> tuple[Routes, np.ndarray]:
    """Runs a loaded model over texts. Returns the routes, and the inputs of each layer's gate,
    ``[T, L, D]`` float16."""
    shape = shape_of(cast(Any, model).moe.facts.signature)
    hidden: list[list[np.ndarray]] = [[] for _ in range(shape.num_layers)]
    ids: list[list[np.ndarray]] = [[] for _ in range(shape.num_layers)]
    weights: list[list[np.ndarray]] = [[] for _ in range(shape.num_layers)]

    class Keep(Listener):
        wants_routing = True

        def routed(self, routing: LayerRouting) -> None:
            hidden[routing.layer].append(routing.hidden_TD.half().cpu().numpy())
            ids[routing.layer].append(routing.ids_TK.cpu().numpy())
            weights[routing.layer].append(routing.weights_TK.float().cpu().numpy())

    with cast(Any, model)._steps.listeners.also(Keep()), torch.no_grad():
        for number, window in enumerate(windows):
            model(input_ids=torch.tensor([list(window)], device=model.device), use_cache=False)
            if progress is not None:
                progress(number + 1)
    routes = Routes(
        shape=shape,
        expert_ids=np.stack([np.concatenate(layer) for layer in ids], axis=1).astype(np.int64),
        gate_weights=np.stack([np.concatenate(layer) for layer in weights], axis=1),
        token_ids=np.concatenate([np.asarray(window, dtype=np.int64) for window in windows]),
        offsets=np.cumsum([0, *map(len, windows)]).astype(np.int64),
    )
    return routes, np.stack([np.concatenate(layer) for layer in hidden], axis=1)


def fit_lookahead(
    model: PreTrainedModel, routes: Routes, hidden_TLD: np.ndarray
) -> HiddenLookahead:
    """Trains the look-ahead from hidden states. Raises UnsupportedModelError: the model has no
    known gates."""
    estimator = HiddenLookahead(routes.shape)
    estimator.fit_hidden(routes, hidden_TLD, *_gates_of(model, routes.shape))
    return estimator


def next_gate(model: PreTrainedModel, shape: Shape) -> NextGate:
    """The look-ahead without training, with copies of a model's gates. Raises
    UnsupportedModelError: the model has no known gates."""
    estimator = NextGate(shape)
    estimator.set_gates(*_gates_of(model, shape))
    return estimator


def _gates_of(model: PreTrainedModel, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    found = [(m.layer, n) for n, m in model.named_modules() if isinstance(m, OffloadedExperts)]
    return find_gates(model, [name.rpartition(".")[0] for _, name in sorted(found)], shape)
