"""The policy `reuse`: its network against plain derivatives, its C form against its numpy form."""

from dataclasses import fields

import numpy as np
import pytest

from moe_runtime.policies.eviction import reuse, reuse_network
from moe_runtime.policies.eviction.reuse import CompiledReuse, ReuseEstimator, teach, watch
from moe_runtime.policies.eviction.reuse_network import ReuseNetwork
from moe_runtime.policies.prediction.base import (
    LayerRouted,
    Routes,
    Shape,
    StepBegins,
    most_learned_bytes,
)

SHAPE = Shape(num_layers=3, num_experts=13, top_k=2)

needs_compiled = pytest.mark.skipif(reuse.library() is None, reason="reuse.c was not built")


def drawn_network(shape: Shape, seed: int) -> ReuseNetwork:
    rng = np.random.default_rng(seed)
    layers, experts, width = shape.num_layers, shape.num_experts, reuse_network.WIDTH
    sizes = ((layers, experts, width), (2, layers, experts, width), (layers, width, experts))
    drawn = [rng.normal(0, 0.3, size).astype(np.float32) for size in (*sizes, sizes[0][:2])]
    return ReuseNetwork(*drawn)


def chained_routes(num_requests: int, length: int, seed: int = 0) -> Routes:
    """Tokens whose experts follow from those of the token before, nine times of ten."""
    rng = np.random.default_rng(seed)
    shape, num_states = SHAPE, 12
    homes = np.random.default_rng(99).permuted(
        np.tile(np.arange(shape.num_experts), (num_states, shape.num_layers, 1)), axis=2
    )[..., : shape.top_k]
    states = []
    for _ in range(num_requests):
        state = int(rng.integers(num_states))
        for _ in range(length):
            state = (5 * state + 1) % num_states if rng.random() < 0.9 else rng.integers(num_states)
            states.append(int(state))
    ids = homes[states]
    weights = np.tile(np.float32([0.7, 0.3]), (*ids.shape[:2], 1))
    return Routes(
        shape=shape,
        expert_ids=ids.astype(np.int64),
        gate_weights=weights,
        token_ids=np.full(len(ids), -1, np.int64),
        offsets=np.arange(num_requests + 1, dtype=np.int64) * length,
    )


def drawn_events(shape: Shape, num_steps: int, seed: int):
    """Prompts, single tokens and batches; requests end, slots are unused, tokens repeat."""
    rng = np.random.default_rng(seed)
    running, begun = [], 0
    for _ in range(num_steps):
        if not running or rng.random() < 0.1:
            running.append(begun)
            begun += 1
        if len(running) > 3:
            yield running.pop(0)
        counts = [int(rng.integers(2, 50)) if rng.random() < 0.05 else 1 for _ in running]
        sequences = np.repeat(running, counts)
        tokens = rng.integers(-1, 6, len(sequences))
        yield StepBegins(sequences=sequences, token_ids=tokens)
        for layer in range(shape.num_layers):
            scores = rng.random((len(sequences), shape.num_experts + 1))
            scores[np.arange(len(scores)), (tokens + layer) % shape.num_experts] += 1
            ids = np.argsort(-scores, axis=1)[:, : shape.top_k]
            gates = rng.random(ids.shape).astype(np.float32)
            yield LayerRouted(layer=layer, expert_ids=ids, gate_weights=gates)


@needs_compiled
@pytest.mark.parametrize(("has_network", "seed"), [(False, 0), (True, 1)])
def test_the_compiled_estimator_scores_as_the_one_in_numpy(has_network, seed):
    pair = [kind(SHAPE, memory=300, learn_every=2) for kind in (ReuseEstimator, CompiledReuse)]
    if has_network:
        for one in pair:
            one.take_network(drawn_network(SHAPE, seed))
    rng = np.random.default_rng(seed)
    for event in drawn_events(SHAPE, 250, seed):
        for one in pair:
            one.finish(event) if isinstance(event, int) else one.observe(event)
        if isinstance(event, LayerRouted) and rng.random() < 0.9:
            asked = int(rng.integers(SHAPE.num_layers)) if rng.random() < 0.2 else event.layer
            plain, compiled = (np.array(one.scores(asked)) for one in pair)
            # features are float32 sums of up to 128 terms; the regression amplifies them
            np.testing.assert_allclose(compiled, plain, rtol=2e-3, atol=2e-3)
    for name, value in pair[0].learned().items():
        np.testing.assert_allclose(pair[1].learned()[name], value, rtol=2e-3, atol=2e-3)


@needs_compiled
def test_what_is_learned_moves_between_both_forms():
    taught = ReuseEstimator(SHAPE)
    taught.take_network(drawn_network(SHAPE, 3))
    watch(taught, chained_routes(2, 60))
    pair = [kind(SHAPE) for kind in (ReuseEstimator, CompiledReuse)]
    for one in pair:
        one.restore(taught.learned())
    begins = StepBegins(sequences=np.array([7]), token_ids=np.array([1]))
    routed = LayerRouted(
        layer=0, expert_ids=np.array([[4, 2]]), gate_weights=np.float32([[0.6, 0.4]])
    )
    for one in pair:
        one.observe(begins)
        one.observe(routed)
    np.testing.assert_allclose(pair[1].scores(0), pair[0].scores(0), rtol=1e-4, atol=1e-4)


@needs_compiled
def test_a_request_may_end_within_a_step():
    estimator = CompiledReuse(SHAPE)
    estimator.take_network(drawn_network(SHAPE, 1))
    events = [e for e in drawn_events(SHAPE, 120, 2) if not isinstance(e, int)]
    rng = np.random.default_rng(0)
    for event in events:
        estimator.observe(event)
        if isinstance(event, StepBegins):
            sequences = event.sequences
        elif rng.random() < 0.2:
            estimator.finish(int(rng.choice(sequences)))
        assert np.isfinite(estimator.scores(int(rng.integers(SHAPE.num_layers)))).all()


@needs_compiled
@pytest.mark.parametrize(
    ("layer", "ids", "gates", "kind"),
    [
        (0, np.zeros((1, 2)), np.zeros((1, 2)), ValueError),
        (0, np.zeros((2, 3)), np.zeros((2, 3)), ValueError),
        (0, np.zeros((2, 2)), np.zeros((2, 1)), ValueError),
        (3, np.zeros((2, 2)), np.zeros((2, 2)), IndexError),
    ],
    ids=["tokens", "choices", "weights", "layer"],
)
def test_events_of_other_sizes_are_refused(layer, ids, gates, kind):
    estimator = CompiledReuse(SHAPE)
    estimator.observe(StepBegins(sequences=np.array([0, 1]), token_ids=np.array([1, 2])))
    with pytest.raises(kind):
        estimator.observe(LayerRouted(layer=layer, expert_ids=ids, gate_weights=gates))


def test_gradients_are_those_of_differences():
    routes = chained_routes(2, 100, seed=4)
    window = [*reuse_network._windows(routes)][1]
    network, auxiliary = drawn_network(SHAPE, 5), np.zeros((SHAPE.num_layers, 8), np.float32)
    arrays = [getattr(network, each.name) for each in fields(network)] + [auxiliary]
    doubles = [one.astype(np.float64) for one in arrays]

    def loss(values: list[np.ndarray]) -> float:
        current, past, output, bias, auxiliary = values
        uses, older, ages = reuse_network._known(window)
        features = [*np.log(uses + reuse_network.FLOOR), np.log1p(ages), ages == 0, window.gates]
        total = 0.0
        for token in range(len(window.used)):
            before = window.before if token == 0 else window.used[token - 1]
            for layer in range(SHAPE.num_layers):
                visited = np.concatenate([window.used[token, : layer + 1], before[layer + 1 :]])
                context = np.einsum("le,lec->c", visited, current)
                context += np.einsum("jle,jlec->c", older[:, token], past)
                odds = context @ output[layer] + bias[layer]
                odds += sum(
                    one[token, layer] * w for one, w in zip(features, auxiliary[layer], strict=True)
                )
                target = window.target[token, layer].astype(np.float64)
                total += (np.logaddexp(0, odds) - target * odds).sum()
        return total / (window.used.size / SHAPE.num_layers)

    gradients = reuse_network._gradients(window, network, auxiliary)
    rng = np.random.default_rng(6)
    for place, gradient in enumerate(gradients):
        direction = rng.normal(size=gradient.shape)
        step = 1e-4
        moved = [
            loss([v + sign * step * direction if i == place else v for i, v in enumerate(doubles)])
            for sign in (1, -1)
        ]
        # targets and gates are float16 in both; sums of the product are float32
        wanted = (moved[0] - moved[1]) / (2 * step)
        assert (gradient * direction).sum() == pytest.approx(wanted, rel=2e-3, abs=1e-4)


def test_a_network_learns_what_follows_what():
    learned, unseen = chained_routes(12, 200), chained_routes(4, 200, seed=1)
    few = ReuseEstimator(SHAPE)
    assert not teach(few, chained_routes(3, 50))
    assert few.learned() == {}
    missed = []
    for routes in (None, learned):
        estimator = ReuseEstimator(SHAPE)
        if routes is not None:
            teach(estimator, routes)
            assert "network_output" in estimator.learned()
        missed.append(misses(estimator, unseen))
    assert missed[1] < 0.9 * missed[0]


def misses(estimator: ReuseEstimator, routes: Routes) -> int:
    """Of caches that keep four of thirteen experts, the ones of highest score."""
    held = [set() for _ in range(SHAPE.num_layers)]
    count = 0
    for token in range(routes.num_tokens):
        estimator.observe(StepBegins(sequences=np.array([0]), token_ids=np.array([-1])))
        for layer in range(SHAPE.num_layers):
            ids, gates = routes.expert_ids[token, layer], routes.gate_weights[token, layer]
            event = LayerRouted(layer=layer, expert_ids=ids[None], gate_weights=gates[None])
            estimator.observe(event)
            scores = estimator.scores(layer)
            count += len(set(ids.tolist()) - held[layer])
            offered = sorted(held[layer] | set(ids.tolist()), key=lambda e: -scores[e])
            held[layer] = set(offered[:4])
    return count


def test_a_network_fits_what_a_learner_may_keep():
    shape = Shape(num_layers=48, num_experts=128, top_k=8)
    estimator = ReuseEstimator(shape)
    estimator.take_network(drawn_network(shape, 0))
    kept = sum(array.nbytes for array in estimator.learned().values())
    assert kept <= most_learned_bytes(shape)
