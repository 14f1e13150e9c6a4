"""The eviction rule `reuse`: learns from the routing which expert is needed last.

Legend in ``prediction.base``; M remembered tokens, F features, C width of the network's context.
"""

import ctypes
import weakref
from collections import deque
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from moe_runtime.policies.eviction.base import Maker, Setting
from moe_runtime.policies.eviction.compiled import library
from moe_runtime.policies.eviction.learned import Scored, Scorer
from moe_runtime.policies.eviction.reuse_network import (
    DISCOUNT,
    FLOOR,
    HORIZON,
    USE_DECAYS,
    WIDTH,
    RequestContexts,
    ReuseNetwork,
    fit_network,
)
from moe_runtime.policies.prediction.base import (
    REMEMBERED_TOKENS,
    Event,
    LayerRouted,
    Routes,
    Shape,
    StepBegins,
)
from moe_runtime.policies.prediction.estimator import State, take_array

_WEIGHT_MEMORY = 0.95
_PRIOR_STRENGTH = 30.0
LEAST_TOKENS = 1000
"""Fewest tokens worth training on."""
_NUM_FEATURES = len(USE_DECAYS) + 6
_RECENCY = len(USE_DECAYS)
_KEPT = ("gram", "moment", "uses", "gates")
_FAR = 7.0  # moments that weigh less than e^-7 of the most similar one are left out
_SHARPNESS = 20.0  # full agreement weighs e^20 times as much as none
_NUM_FOLLOWERS = 8
_FOLLOWER_DISCOUNT = 0.7
"""Weight of each further token that followed; eight of them have 94 % of all weight."""
_LONGEST_STEP = 32
"""Tokens of a request that one step may add: a prompt must not fill the memory."""


@dataclass(slots=True)
class _Example:
    """Features of some experts at one moment, until their next uses are known."""

    step: int
    experts: np.ndarray
    features: np.ndarray


def make_reuse(setting: Setting) -> Maker:
    """Makes policies that share an estimator; with training it begins with a network."""
    estimator = new_estimator(setting.shape)
    if setting.training is not None:
        teach(estimator, setting.training)
    return maker_of(estimator)


def maker_of(estimator: Scorer) -> Maker:
    """Makes the policies of layers that share an estimator."""
    return partial(Scored, estimator, may_decline=True)


def new_estimator(shape: Shape) -> "ReuseEstimator | CompiledReuse":
    """A new estimator; the compiled one, if the library was built."""
    return ReuseEstimator(shape) if library() is None else CompiledReuse(shape)


def teach(estimator: "ReuseEstimator | CompiledReuse", routes: Routes) -> bool:
    """Trains a network on most requests, and shows the others to the estimator with it.

    Returns False, with the estimator unchanged, for too few tokens.
    """
    num_taught = routes.num_sequences - max(1, routes.num_sequences // 5)
    taught = routes.select(range(num_taught))
    if taught.num_tokens < LEAST_TOKENS:
        return False
    estimator.take_network(fit_network(taught))
    watch(estimator, routes.select(range(num_taught, routes.num_sequences)))
    return True


def watch(estimator: "ReuseEstimator | CompiledReuse", routes: Routes) -> None:
    """Shows an estimator recorded requests, one after another."""
    for sequence in range(routes.num_sequences):
        rows = routes.tokens_of(sequence)
        for token in range(rows.start, rows.stop):
            token_ids = routes.token_ids[token : token + 1]
            estimator.observe(StepBegins(sequences=np.array([-1]), token_ids=token_ids))
            for layer in range(routes.shape.num_layers):
                ids = routes.expert_ids[token : token + 1, layer]
                gates = routes.gate_weights[token : token + 1, layer]
                estimator.observe(LayerRouted(layer=layer, expert_ids=ids, gate_weights=gates))
                estimator.scores(layer)
        estimator.finish(-1)


def _prior(num_features: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A regression that starts as LRU: ``[F, F]`` products of features, ``[F]`` moments, ``[F]``
    weights."""
    weights = np.zeros(num_features)
    weights[_RECENCY] = -1.0
    gram = _PRIOR_STRENGTH * np.eye(num_features)
    return gram, gram @ weights, weights


def _restored(shape: Shape, state: State) -> tuple[ReuseNetwork | None, *tuple[np.ndarray, ...]]:
    """The network and the arrays of ``_KEPT``; ValueError where they are not sound."""
    network = ReuseNetwork.from_state(shape, state)
    features = _NUM_FEATURES + (network is not None)
    sizes = (shape.num_layers, shape.num_experts)
    axes = ((features,) * 2, (features,), (sizes[0], len(USE_DECAYS), sizes[1]), sizes)
    gram, moment, uses, gates = (
        take_array(state, name, dtype, one)
        for name, dtype, one in zip(_KEPT, ("<f8", "<f8", "<f4", "<f4"), axes, strict=True)
    )
    if min(uses.min(), gates.min()) < 0:
        raise ValueError("arrays 'uses' and 'gates' must hold averages, got negative numbers")
    np.linalg.cholesky(gram)  # raises if these cannot be products of features
    return network, gram, moment, uses, gates


class ReuseEstimator:
    """Scores experts by their expected discounted uses, as log odds.

    Ours. A logistic regression estimates Belady's order from how often, how recently and with what
    weight experts were used, and from what followed similar moments among the last ``memory``
    tokens. It is fitted online, to one of ``learn_every`` estimates, by iteratively reweighted
    least squares.
    """

    name = "reuse"

    def __init__(
        self, shape: Shape, *, memory: int = REMEMBERED_TOKENS, learn_every: int = 4
    ) -> None:
        self._shape = shape
        self._episodes = Episodes(shape, capacity=memory)
        self._contexts: RequestContexts | None = None
        self._learn_every = learn_every
        layers, experts = shape.num_layers, shape.num_experts
        self._uses = np.zeros((layers, len(USE_DECAYS), experts), np.float32)
        self._gates = np.zeros((layers, experts), np.float32)
        self._now_gates = np.zeros((layers, experts), np.float32)
        self._last_use = np.full((layers, experts), -(10**4), np.int64)
        self._step = np.zeros(layers, np.int64)
        self._recent: list[deque[np.ndarray]] = [deque(maxlen=HORIZON) for _ in range(layers)]
        self._examples: list[deque[_Example]] = [deque() for _ in range(layers)]
        self._scores: list[list[float] | None] = [None] * layers
        self._last_scores = [[0.0] * experts for _ in range(layers)]
        self._routed = -1
        self._num_estimates = self._num_learned = 0
        self._gram, self._moment, self._weights = _prior(_NUM_FEATURES)
        self._worth = (1 - DISCOUNT) * DISCOUNT ** np.arange(HORIZON)

    def observe(self, event: Event) -> None:
        if isinstance(event, StepBegins):
            self._episodes.begin(event)
            if self._contexts is not None:
                self._contexts.begin(event)
            return
        layer = event.layer
        self._episodes.route(event)
        if self._contexts is not None:
            self._contexts.route(event)
        self._routed = layer
        self._scores[layer] = None
        self._update(layer, event)
        self._learn(layer)

    def finish(self, sequence: int) -> None:
        self._episodes.finish(sequence)
        if self._contexts is not None:
            self._contexts.finish(sequence)

    def learned(self) -> State:
        """The regression and the averages of uses, without the remembered tokens.

        ``gram`` ``[F, F]`` and ``moment`` ``[F]`` float64, ``uses`` ``[L, decays, E]`` and
        ``gates`` ``[L, E]`` float32; empty before the first estimate was learned from.
        """
        network = {} if self._contexts is None else self._contexts.network.state()
        if not self._num_learned and not network:
            return {}
        arrays = (self._gram, self._moment, self._uses, self._gates)
        return dict(zip(_KEPT, arrays, strict=True)) | network

    def take_network(self, network: ReuseNetwork) -> None:
        """Starts a new regression with a network, whose log odds are one more feature."""
        self._contexts = RequestContexts(network, self._shape)
        self._gram, self._moment, self._weights = _prior(_NUM_FEATURES + 1)

    def restore(self, state: State) -> None:
        network, gram, moment, uses, gates = _restored(self._shape, state)
        self._contexts = None if network is None else RequestContexts(network, self._shape)
        self._weights = np.linalg.solve(gram, moment)
        self._gram, self._moment = gram.copy(), moment.copy()
        self._uses, self._gates = uses.copy(), gates.copy()

    def scores(self, layer: int) -> list[float]:
        """``[E]`` log odds of an early use; those of its last run for a layer still to run."""
        known = self._scores[layer]
        if known is None and layer == self._routed:
            features = self._features(layer)
            known = self._scores[layer] = (features @ self._weights).tolist()
            self._last_scores[layer] = known
            self._num_estimates += 1
            if self._num_estimates % self._learn_every == 0:
                self._remember(layer, features)
        return known or self._last_scores[layer]

    def _update(self, layer: int, event: LayerRouted) -> None:
        num_experts = self._shape.num_experts
        ids, gates = event.expert_ids.ravel(), event.gate_weights.ravel()
        if len(event.expert_ids) > 1:
            gates = np.bincount(ids, weights=gates, minlength=num_experts + 1)
            ids = np.unique(ids)
            gates = gates[ids] / len(event.expert_ids)
        if ids.size and ids.max() >= num_experts:
            ids, gates = ids[ids < num_experts], gates[ids < num_experts]
        self._step[layer] += 1
        uses = self._uses[layer]
        uses *= USE_DECAYS[:, None]
        uses[:, ids] += (1 - USE_DECAYS)[:, None]
        self._gates[layer] *= _WEIGHT_MEMORY
        self._gates[layer, ids] += (1 - _WEIGHT_MEMORY) * gates
        self._now_gates[layer] = 0
        self._now_gates[layer, ids] = gates
        self._last_use[layer, ids] = self._step[layer]
        self._recent[layer].append(ids)

    def _features(self, layer: int) -> np.ndarray:
        """``[E, F]`` float32."""
        ages = self._step[layer] - self._last_use[layer]
        features = np.empty((self._shape.num_experts, len(self._weights)), np.float32)
        features[:, :_RECENCY] = np.log(self._uses[layer] + FLOOR).T
        features[:, _RECENCY] = np.log1p(ages)
        features[:, _RECENCY + 1] = ages == 0
        features[:, _RECENCY + 2] = self._gates[layer]
        features[:, _RECENCY + 3] = self._now_gates[layer]
        features[:, _RECENCY + 4] = np.log(self._episodes.recall(layer) + 0.01)
        features[:, _RECENCY + 5] = 1.0
        if self._contexts is not None:
            features[:, _NUM_FEATURES] = self._contexts.log_odds(layer)
        return features

    def _remember(self, layer: int, features: np.ndarray) -> None:
        """Keeps the more recently used half of the experts: others are rarely held."""
        half = self._shape.num_experts // 2
        experts = np.argsort(-self._last_use[layer], kind="stable")[: half + 1]
        self._examples[layer].append(
            _Example(int(self._step[layer]), experts, features[experts].astype(np.float64))
        )

    def _learn(self, layer: int) -> None:
        examples = self._examples[layer]
        if not examples or examples[0].step + HORIZON > self._step[layer]:
            return
        example = examples.popleft()
        target = np.zeros(self._shape.num_experts)
        for worth, ids in zip(self._worth, self._recent[layer], strict=True):
            target[ids] += worth
        # One step of iteratively reweighted least squares at the present weights.
        features = example.features
        logits = features @ self._weights
        chance = 1 / (1 + np.exp(-logits))
        certainty = chance * (1 - chance) + 0.02
        wanted = logits + (target[example.experts] - chance) / certainty
        weighted = features * certainty[:, None]
        self._gram += weighted.T @ features
        self._moment += weighted.T @ wanted
        self._num_learned += 1
        if self._num_learned % 32 == 0:
            self._weights = np.linalg.solve(self._gram, self._moment)


@dataclass(slots=True)
class _Request:
    """One running request: its last remembered tokens, the youngest last."""

    rows: deque[int] = field(default_factory=lambda: deque(maxlen=_NUM_FOLLOWERS + 1))
    token_id: int = -1
    overlap: np.ndarray | None = None  # [M] of its last token with all remembered ones


class Episodes:
    """A ring of the latest tokens of all requests, with their paths and what followed.

    Moments are similar if their tokens, the tokens before, and the experts visited so far agree.
    The mean of what followed similar moments predicts what follows now.
    """

    def __init__(self, shape: Shape, *, capacity: int = REMEMBERED_TOKENS) -> None:
        self._shape = shape
        self._capacity = capacity
        self._visited = np.zeros((shape.num_layers, shape.num_experts + 1, capacity), np.uint8)
        self._followed = np.zeros((shape.num_layers, capacity, shape.num_experts + 1), np.float32)
        self._token_id = np.full(capacity, -1, np.int64)
        self._token_before = np.full(capacity, -1, np.int64)
        self._row_before = np.zeros(capacity, np.int64)
        # added to the likeness: only tokens whose followers are all known are recalled
        self._closed = np.full(capacity, -np.inf, np.float32)
        self._requests: dict[int, _Request] = {}
        self._next_row = 0
        self._weights = (1 - _FOLLOWER_DISCOUNT) * _FOLLOWER_DISCOUNT ** np.arange(
            _NUM_FOLLOWERS, dtype=np.float32
        )
        self._step: list[tuple[int, int, list[int], bool]] = []  # token, row, rows it follows, last
        self._queries: list[np.ndarray] = []
        self._before: list[np.ndarray] = []
        self._num_compared = 0

    def begin(self, event: StepBegins) -> None:
        self._step, self._queries, self._before = [], [], []
        self._num_compared = 0
        sequences = event.sequences
        for sequence in dict.fromkeys(sequences.tolist()):
            tokens = np.flatnonzero(sequences == sequence)[-_LONGEST_STEP:].tolist()
            request = self._requests.setdefault(sequence, _Request())
            for token in tokens:
                self._open_row(request, token, int(event.token_ids[token]), token == tokens[-1])

    def route(self, event: LayerRouted) -> None:
        """Notes the experts of the tokens, and compares their paths with all remembered ones."""
        layer, query = event.layer, 0
        visited, followed = self._visited[layer], self._followed[layer]
        self._num_compared += 1
        for token, row, followed_rows, is_last in self._step:
            experts = event.expert_ids[token]
            if is_last:
                self._queries[query] += visited[experts].sum(axis=0, dtype=np.uint8)
                query += 1
            visited[experts, row] = 1
            if followed_rows:
                weights = self._weights[: len(followed_rows), None]
                followed[np.array(followed_rows)[:, None], experts] += weights

    def recall(self, layer: int) -> np.ndarray:
        """``[E]`` float32: expected discounted uses by the next tokens, from similar moments.

        Summed over the running requests; one that visits an expert at every token adds 1.
        """
        total = np.zeros(self._shape.num_experts + 1, np.float32)
        num_agreements = self._num_compared * self._shape.top_k + 6
        full_path = self._shape.num_layers * self._shape.top_k
        for path, before in zip(self._queries, self._before, strict=True):
            likeness = path * np.float32(_SHARPNESS / num_agreements)
            likeness += before * np.float32(_SHARPNESS * 0.5 / full_path)
            likeness += self._closed
            highest = likeness.max()
            if np.isfinite(highest):
                likeness[likeness < highest - _FAR] = -np.inf
                weights = np.exp(likeness - highest)
                total += (weights @ self._followed[layer]) / weights.sum()
        return total[:-1]

    def finish(self, sequence: int) -> None:
        """Ends a request; its tokens stay remembered."""
        self._requests.pop(sequence, None)

    def _open_row(self, request: _Request, token: int, token_id: int, is_last: bool) -> None:
        row = self._next_row
        self._next_row = (row + 1) % self._capacity
        self._visited[:, :, row] = 0
        self._followed[:, row] = 0
        self._closed[row] = -np.inf
        rows_before = [r for r in reversed(request.rows) if r != row][:_NUM_FOLLOWERS]
        if len(rows_before) == _NUM_FOLLOWERS:
            # the step that begins completes what followed the oldest of them
            self._closed[request.rows[0]] = 0.0
        if is_last:
            agreement = 4.0 * (self._token_id == token_id) * (token_id >= 0)
            agreement += 2.0 * (self._token_before == request.token_id) * (request.token_id >= 0)
            self._queries.append(agreement.astype(np.float32))
            before = request.overlap
            self._before.append(
                np.zeros(self._capacity, np.float32) if before is None else before[self._row_before]
            )
            request.overlap = self._queries[-1]
        self._token_id[row] = token_id
        self._token_before[row] = request.token_id
        self._row_before[row] = request.rows[-1] if request.rows else row
        request.rows.append(row)
        request.token_id = token_id
        self._step.append((token, row, rows_before, is_last))


class CompiledReuse:
    """``ReuseEstimator`` in C (``reuse.c``): equal but for the order of sums, and much faster."""

    name = ReuseEstimator.name

    def __init__(
        self, shape: Shape, *, memory: int = REMEMBERED_TOKENS, learn_every: int = 4
    ) -> None:
        self._shape, self._library = shape, library()
        self._sizes = (shape.num_layers, shape.num_experts, shape.top_k, memory, learn_every)
        self._scores: list[list[float] | None] = [None] * shape.num_layers
        self._num_tokens = 0  # of the running step
        self._begin(None, *_prior(_NUM_FEATURES))

    def observe(self, event: Event) -> None:
        if isinstance(event, StepBegins):
            sequences = np.ascontiguousarray(event.sequences, np.int64)
            token_ids = np.ascontiguousarray(event.token_ids, np.int64)
            if self._library.moe_reuse_begin(
                *(self._state, sequences.ctypes.data, token_ids.ctypes.data, len(sequences))
            ):
                raise MemoryError(f"no memory for a step of {len(sequences)} tokens")
            self._num_tokens = len(sequences)
            return
        layer, ids = event.layer, np.ascontiguousarray(event.expert_ids, np.int64)
        gates = np.ascontiguousarray(event.gate_weights, np.float32)
        num_tokens, top_k = ids.shape
        fits = num_tokens >= self._num_tokens and top_k <= self._shape.top_k
        if not fits or gates.size not in (0, ids.size):
            raise ValueError(
                f"expected ids and weights of {self._num_tokens} tokens, at most "
                f"{self._shape.top_k} each, got {ids.shape} and {gates.shape}"
            )
        self._scores[layer] = None  # refuses a layer that there is not
        gates_at = gates.ctypes.data if gates.size else None
        self._library.moe_reuse_route(
            self._state, layer, ids.ctypes.data, gates_at, num_tokens, top_k
        )

    def finish(self, sequence: int) -> None:
        self._library.moe_reuse_finish(self._state, sequence)

    def learned(self) -> State:
        network = {} if self._network is None else self._network.state()
        if not self._library.moe_reuse_num_learned(self._state) and not network:
            return {}
        return {name: self._array(name).copy() for name in _KEPT} | network

    def take_network(self, network: ReuseNetwork) -> None:
        """Starts a new regression with a network, whose log odds are one more feature."""
        self._begin(network, *_prior(_NUM_FEATURES + 1))

    def restore(self, state: State) -> None:
        network, gram, moment, uses, gates = _restored(self._shape, state)
        self._begin(network, gram, moment, np.linalg.solve(gram, moment))
        self._array("uses")[:], self._array("gates")[:] = uses, gates

    def scores(self, layer: int) -> list[float]:
        """``[E]`` log odds of an early use; those of its last run for a layer still to run."""
        known = self._scores[layer]
        if known is None:
            found = self._library.moe_reuse_scores(self._state, layer)
            known = self._scores[layer] = found[: self._shape.num_experts]
        return known

    def _begin(self, network: ReuseNetwork | None, *regression: np.ndarray) -> None:
        """Starts with a network and a regression, and no memory of tokens."""
        self._state = self._library.moe_reuse_new(*self._sizes)
        if not self._state:
            raise MemoryError("no memory for the policy 'reuse'")
        if hasattr(self, "_free"):
            self._free()
        self._free = weakref.finalize(self, self._library.moe_reuse_free, self._state)
        self._network = network
        if network is not None:
            arrays = (network.current, network.past, network.output, network.bias)
            places = (one.ctypes.data for one in arrays)
            if self._library.moe_reuse_take_network(self._state, WIDTH, *places):
                raise MemoryError("no memory for the network of the policy 'reuse'")
        for name, values in zip(("gram", "moment", "weights"), regression, strict=True):
            self._array(name)[:] = values

    def _array(self, name: str) -> np.ndarray:
        """A view of an array of the C state."""
        layers, experts = self._shape.num_layers, self._shape.num_experts
        features = _NUM_FEATURES + (self._network is not None)
        sizes = {
            "gram": (features, features),
            "moment": (features,),
            "uses": (layers, len(USE_DECAYS), experts),
            "gates": (layers, experts),
            "weights": (features,),
        }
        kind = ctypes.c_float if name in ("uses", "gates") else ctypes.c_double
        found = self._library.moe_reuse_array(self._state, [*sizes].index(name))
        return np.ctypeslib.as_array(ctypes.cast(found, ctypes.POINTER(kind)), sizes[name])
