"""The native look-ahead says what the object says that specifies it."""

import numpy as np
import pytest
import torch
from native_marks import needs_native

from moe_runtime.kernels.decode_step.gate_ranking import GateRanking, NativeLookAhead
from moe_runtime.policies.prediction import LayerRouted, NextGate, Shape, StepBegins
from moe_runtime.policies.prediction.hidden import (
    PRIOR,
    REMEMBERED,
    LookaheadPredictor,
    believed_at_first,
)

pytestmark = needs_native
SHAPE = Shape(num_layers=5, num_experts=9, top_k=2)
DIM = 20


def make_gates(estimator: NextGate, dtype: torch.dtype) -> list[list[GateRanking]]:
    generator = torch.Generator().manual_seed(3)
    gates = [
        torch.randn(SHAPE.num_experts, DIM, generator=generator).to(dtype)
        for _ in range(SHAPE.num_layers)
    ]
    rankings = [GateRanking(gate, None, estimator.num_ranks) for gate in gates]
    return [rankings] * estimator.max_distance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("least", [0.0, 0.3])
def test_it_says_what_the_predictor_says(dtype, least):
    estimator = NextGate(SHAPE)
    gates = make_gates(estimator, dtype)

    def rank(hidden: torch.Tensor, distance: int, layer: int) -> list[list[int]]:
        return [gates[distance - 1][layer](row)[0] for row in hidden.split(1)]

    estimator.ranker = rank
    predictor = LookaheadPredictor(estimator)
    native = NativeLookAhead(
        gates,
        num_experts=SHAPE.num_experts,
        top_k=SHAPE.top_k,
        dtype=dtype,
        prior=PRIOR,
        remembered=REMEMBERED,
        believed=believed_at_first(estimator.num_ranks, SHAPE.top_k),
        least_chance=least,
    )
    rng = np.random.default_rng(7)
    no_weights = np.zeros((0, 0), np.float32)
    counts = [0, 0, 0]
    for _ in range(60):
        tokens = int(rng.integers(1, 5))
        predictor.observe(
            StepBegins(sequences=np.arange(tokens), token_ids=np.ones(tokens, np.int64))
        )
        native.begin_step()
        expected: set[int] | None = None
        for layer in range(int(rng.integers(1, SHAPE.num_layers + 1))):  # steps may break off
            hidden = torch.from_numpy(rng.standard_normal((tokens, DIM))).to(dtype)
            right = [row[: SHAPE.top_k] for row in rank(hidden, 1, layer)]
            ids = [r if rng.random() < 0.6 else rng.permutation(9)[:2].tolist() for r in right]
            if expected is not None:
                visited = {expert for row in ids for expert in row}
                new = len(visited), len(expected), len(expected & visited)
                counts = [a + b for a, b in zip(counts, new, strict=True)]
            horizon = int(rng.integers(1, 5))
            predictor.observe(
                LayerRouted(
                    layer=layer, expert_ids=np.array(ids), gate_weights=no_weights, hidden=hidden
                )
            )
            made = predictor.predict(layer, horizon)
            said = native.look(layer, torch.tensor(ids), hidden, horizon)
            named = [divmod(e, SHAPE.num_experts) for e in native.experts[:said]]
            assert list(zip(named, native.chances[:said], strict=True)) == [
                (tuple(key), chance) for key, chance in made if chance >= least
            ]
            expected = {key.expert for key, _ in made if key.layer == layer + 1} or None
    assert native.take_counts() == tuple(counts)
    assert native.take_counts() == (0, 0, 0)


def test_gates_that_only_torch_knows_are_refused():
    gates = make_gates(NextGate(SHAPE), torch.float16)
    with pytest.raises(ValueError, match="float16"):
        NativeLookAhead(
            gates,
            num_experts=SHAPE.num_experts,
            top_k=SHAPE.top_k,
            dtype=torch.float16,
            prior=PRIOR,
            remembered=REMEMBERED,
            believed=believed_at_first(4, 2),
            least_chance=0.5,
        )
