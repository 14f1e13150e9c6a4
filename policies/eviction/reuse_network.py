"""A small network that predicts from the last tokens' routing which experts return soon.

Ours. A request's context is a sum of vectors: of the experts that its present token visited so far,
of those that the token before visited in the layers still to come, and of older ones, which decay.
The context times a vector of each expert is the log odds that this expert is used soon. It is
trained on recorded requests; what changes while a model runs is learned by the regression that
takes these log odds as a feature (``reuse.py``).

Legend in ``prediction.base``; C width of the context, B tokens of a window.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Self

import numpy as np

from moe_runtime.policies.prediction.base import LayerRouted, Routes, Shape, StepBegins
from moe_runtime.policies.prediction.estimator import State, take_array, visits

WIDTH = 24
PAST_DECAYS = np.array([2**-0.5, 2 ** (-1 / 16)], np.float32)
"""Decay per token, with half-lives of 2 and 16 tokens."""
HORIZON = 16
DISCOUNT = 0.8  # the target: uses by the next tokens, each worth less than the one before
USE_DECAYS = np.array([0.8, 0.95, 0.99, 0.996, 0.9995], np.float32)
"""Decay per step of each average of uses: over about 5, 20, 100, 250 and 2,000 steps."""
FLOOR = 0.003
_WINDOW = 64
_RATE = 4e-3
_WEIGHT_DECAY = 1e-2
_BETAS = (0.9, 0.99)


@dataclass(frozen=True, eq=False)
class ReuseNetwork:
    """The weights, all float32."""

    current: np.ndarray  # ``[L, E, C]`` what a visit adds to the context
    past: np.ndarray  # ``[len(PAST_DECAYS), L, E, C]`` the same of older visits
    output: np.ndarray  # ``[L, C, E]``
    bias: np.ndarray  # ``[L, E]``

    @classmethod
    def from_state(cls, shape: Shape, state: State) -> Self | None:
        """The network in what was learned, if any."""
        if "network_output" not in state:
            return None
        layers, experts = shape.num_layers, shape.num_experts
        axes = {
            "current": (layers, experts, WIDTH),
            "past": (len(PAST_DECAYS), layers, experts, WIDTH),
            "output": (layers, WIDTH, experts),
            "bias": (layers, experts),
        }
        return cls(*(take_array(state, f"network_{n}", "<f4", axes[n]) for n in axes))

    def state(self) -> dict[str, np.ndarray]:
        return {f"network_{each.name}": getattr(self, each.name) for each in fields(self)}


@dataclass(slots=True, eq=False)
class _Request:
    """The last tokens of a request's steps."""

    path: np.ndarray  # ``[L, K]`` of the present one; E where not known
    path_before: np.ndarray
    now: np.ndarray  # ``[C]`` the present token so far
    last: np.ndarray  # ``[C]`` the one before
    part: np.ndarray  # ``[C]`` the same, up to the present layer
    decayed: np.ndarray  # ``[len(PAST_DECAYS), C]`` all before
    pending: np.ndarray  # ``[len(PAST_DECAYS), C]`` the present one


@dataclass(eq=False)
class RequestContexts:
    """The contexts of the running requests."""

    network: ReuseNetwork
    shape: Shape
    _requests: dict[int, _Request] = field(default_factory=dict)
    _running: list[tuple[_Request, int]] = field(default_factory=list)

    def begin(self, event: StepBegins) -> None:
        """The tokens of the last step become the previous ones."""
        self._running = []
        unknown = np.full((self.shape.num_layers, self.shape.top_k), self.shape.num_experts)
        for token, sequence in enumerate(event.sequences.tolist()):
            if token + 1 < len(event.sequences) and event.sequences[token + 1] == sequence:
                continue
            one = self._requests.get(sequence)
            if one is None:
                zeros = np.zeros((3 + 2 * len(PAST_DECAYS), WIDTH), np.float32)
                one = _Request(unknown, unknown, *zeros[:3], *np.split(zeros[3:], 2))
                self._requests[sequence] = one
            kept = PAST_DECAYS[:, None]
            one.decayed = kept * one.decayed + (1 - kept) * one.pending
            one.path_before, one.path, one.last = one.path, unknown.copy(), one.now
            one.now, one.part = np.zeros((2, WIDTH), np.float32)
            one.pending = np.zeros_like(one.pending)
            self._running.append((one, token))

    def route(self, event: LayerRouted) -> None:
        """Adds the experts of the last tokens of the step."""
        network, layer, num_experts = self.network, event.layer, self.shape.num_experts
        for one, token in self._running:
            before, ids = one.path_before[layer], event.expert_ids[token]
            one.path[layer, : len(ids)] = ids
            ids = ids[ids < num_experts]
            one.part += network.current[layer, before[before < num_experts]].sum(axis=0)
            one.now += network.current[layer, ids].sum(axis=0)
            one.pending += network.past[:, layer, ids].sum(axis=1)

    def log_odds(self, layer: int) -> np.ndarray:
        """``[E]`` that an expert is used soon by any of the requests."""
        odds = [
            self.network.bias[layer]
            + (one.now + one.last - one.part + one.decayed.sum(axis=0)) @ self.network.output[layer]
            for one, _ in self._running
        ]
        if len(odds) == 1:
            return odds[0]
        none = -np.log1p(np.exp(np.minimum(odds, 30.0))).sum(axis=0)
        none = np.minimum(none, -1e-6)
        return np.log(-np.expm1(none)) - none

    def finish(self, sequence: int) -> None:
        self._requests.pop(sequence, None)


def fit_network(
    routes: Routes,
    *,
    epochs: int = 4,
    seed: int = 0,
    on_progress: Callable[[float], None] = lambda share: None,
) -> ReuseNetwork:
    """Trains on whole requests, by Adam on the cross entropy of uses to come.

    While it trains, every layer also has weights for how often and how recently an expert was used,
    so that the network learns what these do not say. They are dropped at the end.

    Args:
        on_progress: called with the share of the work that is done.
    """
    shape, rng = routes.shape, np.random.default_rng(seed)
    layers, experts = shape.num_layers, shape.num_experts
    num_features = len(USE_DECAYS) + 3

    def drawn(*sizes: int) -> np.ndarray:
        return rng.normal(0, 0.1, sizes).astype(np.float32)

    network = ReuseNetwork(
        drawn(layers, experts, WIDTH),
        drawn(len(PAST_DECAYS), layers, experts, WIDTH),
        np.zeros((layers, WIDTH, experts), np.float32),
        np.zeros((layers, experts), np.float32),
    )
    auxiliary = np.zeros((layers, num_features), np.float32)
    parameters = [network.current, network.past, network.output, network.bias, auxiliary]
    moments = [(np.zeros_like(one), np.zeros_like(one)) for one in parameters]
    windows = _windows(routes)
    order = np.concatenate([rng.permutation(len(windows)) for _ in range(epochs)])
    for step, number in enumerate(order.tolist()):
        gradients = _gradients(windows[number], network, auxiliary)
        done = step / len(order)
        # a tenth of the steps warms up, the rest anneals to zero
        rate = _RATE * min(10 * done + 0.04, (1 - done) / 0.9)
        for one, gradient, (first, second) in zip(parameters, gradients, moments, strict=True):
            first += (1 - _BETAS[0]) * (gradient - first)
            second += (1 - _BETAS[1]) * (gradient * gradient - second)
            corrected = np.sqrt(second / (1 - _BETAS[1] ** (step + 1))) + 1e-8
            one -= rate * (first / (1 - _BETAS[0] ** (step + 1)) / corrected + _WEIGHT_DECAY * one)
        on_progress((step + 1) / len(order))
    return network


@dataclass(eq=False)
class _Window:
    """Consecutive tokens of a request, and the state before them."""

    used: np.ndarray  # ``[B, L, E]`` bool
    gates: np.ndarray  # ``[B, L, E]`` float16
    target: np.ndarray  # ``[B, L, E]`` float16
    before: np.ndarray  # ``[L, E]`` bool, the token before the first
    uses: np.ndarray  # ``[len(USE_DECAYS), L, E]`` float32
    older: np.ndarray  # ``[len(PAST_DECAYS), L, E]`` float32
    ages: np.ndarray  # ``[L, E]`` tokens since the last use


def _windows(routes: Routes) -> list[_Window]:
    """All windows of all requests, in order."""
    shape, found = routes.shape, list[_Window]()
    sizes = (shape.num_layers, shape.num_experts)
    uses = np.zeros((len(USE_DECAYS), *sizes), np.float32)
    ages = np.full(sizes, 1e4, np.float32)
    worth = (1 - DISCOUNT) * DISCOUNT ** np.arange(HORIZON)
    for sequence in range(routes.num_sequences):
        rows = routes.tokens_of(sequence)
        used = visits(routes.expert_ids[rows], shape.num_experts) > 0
        gates = np.zeros((*used.shape[:2], shape.num_experts + 1), np.float16)
        np.put_along_axis(gates, routes.expert_ids[rows], routes.gate_weights[rows], axis=2)
        target = np.zeros(used.shape, np.float16)
        for ahead, one in enumerate(worth, 1):
            target[:-ahead] += one * used[ahead:]
        older, before = np.zeros((len(PAST_DECAYS), *sizes), np.float32), np.zeros(sizes, bool)
        # the next uses of the last tokens are unknown
        for start in range(0, len(used) - HORIZON, _WINDOW):
            stop = min(start + _WINDOW, len(used) - HORIZON)
            part = slice(start, stop)
            window = _Window(
                *(used[part], gates[part, :, :-1], target[part], before, uses, older, ages)
            )
            found.append(window)
            averages, decayed, since = _known(window)
            uses, before, ages = averages[:, -1], used[stop - 1], since[-1]
            kept = PAST_DECAYS[:, None, None]
            older = kept * decayed[:, -1] + (1 - kept) * before
    return found


def _known(window: _Window) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Averages of uses after each token, decayed uses before each token, and ages after it."""
    used = window.used.reshape(len(window.used), -1).astype(np.float32)
    lags = np.subtract.outer(np.arange(len(used)), np.arange(len(used)))
    sizes = window.used.shape

    def averaged(kept: float, start: np.ndarray, delay: int) -> np.ndarray:
        weights = np.where(lags >= delay, (1 - kept) * kept ** np.maximum(lags - delay, 0), 0)
        held = kept ** (np.arange(len(used)) + 1 - delay)
        return (weights.astype(np.float32) @ used + np.outer(held, start)).reshape(sizes)

    uses = [averaged(k, s.ravel(), 0) for k, s in zip(USE_DECAYS, window.uses, strict=True)]
    older = [averaged(k, s.ravel(), 1) for k, s in zip(PAST_DECAYS, window.older, strict=True)]
    steps = np.arange(1, len(used) + 1, dtype=np.float32)[:, None, None]
    last = np.maximum.accumulate(np.where(window.used, steps, -window.ages), axis=0)
    return np.stack(uses), np.stack(older), (steps - last).astype(np.float32)


def _gradients(window: _Window, network: ReuseNetwork, auxiliary: np.ndarray) -> list[np.ndarray]:
    """Gradients of the mean cross entropy, by the network's weights in their order and the
    auxiliary ones."""
    uses, older, ages = _known(window)
    features = [*np.log(uses + FLOOR), np.log1p(ages), ages == 0, window.gates]
    features_BLEF = np.stack(features, axis=-1).astype(np.float32)
    now = window.used.astype(np.float32).swapaxes(0, 1)  # [L, B, E]
    last = np.concatenate([window.before[None], window.used[:-1]]).astype(np.float32)
    last = last.swapaxes(0, 1)
    entered, before = now @ network.current, last @ network.current  # [L, B, C]
    context = entered.cumsum(axis=0) + before.sum(axis=0) - before.cumsum(axis=0)
    flat = older.reshape(len(PAST_DECAYS), len(window.used), -1)
    context += sum(
        one @ weights.reshape(-1, WIDTH) for one, weights in zip(flat, network.past, strict=True)
    )
    odds = context @ network.output + network.bias[:, None]  # [L, B, E]
    odds += np.einsum("blef,lf->lbe", features_BLEF, auxiliary)
    error = 1 / (1 + np.exp(-odds)) - window.target.swapaxes(0, 1).astype(np.float32)
    error /= error.size / network.bias.shape[0]
    by_context = error @ network.output.swapaxes(1, 2)  # [L, B, C]
    later = by_context[::-1].cumsum(axis=0)[::-1]
    earlier = by_context.cumsum(axis=0) - by_context
    total = later[0]
    return [
        now.swapaxes(1, 2) @ later + last.swapaxes(1, 2) @ earlier,
        np.stack([(one.T @ total).reshape(network.current.shape) for one in flat]),
        context.swapaxes(1, 2) @ error,
        error.sum(axis=1),
        np.einsum("blef,lbe->lf", features_BLEF, error),
    ]
