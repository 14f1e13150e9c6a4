"""Evictions that know drafted tokens: `python benchmarks/looking_ahead.py TRACE --train TRACE`.

The policy `reuse`, taught by other requests, is replayed; it is also told the ids of the next
tokens, each right with some probability if the ones before are. What the trained predictor expects
of these tokens is weighed by that probability, and by how soon they come. A control is told where
the next tokens really go. Results are the shares of the way from LRU to the optimum.
"""

import sys
from dataclasses import replace

import numpy as np

from moe_runtime.benchmarks import prefetch_matrix
from moe_runtime.benchmarks.harness.scripting import ScriptResults, run_script
from moe_runtime.benchmarks.suite import facts
from moe_runtime.inference.draft_models import MOST_DRAFTED
from moe_runtime.lab.replay.untimed import replay_demand
from moe_runtime.lab.traces.routes import routes_of
from moe_runtime.policies.eviction import LRU, LayerShares, even_shares
from moe_runtime.policies.eviction.base import Maker
from moe_runtime.policies.eviction.reuse import CompiledReuse, ReuseEstimator, maker_of
from moe_runtime.policies.eviction.reuse_network import DISCOUNT
from moe_runtime.policies.prediction import Estimator, Routes, contexts_of, make_estimator
from moe_runtime.policies.prediction.base import Event, StepBegins
from moe_runtime.policies.prediction.estimator import sigmoid, visits

METRICS = facts("share", "of_lru_to_optimum", "hits", better="more")


class Ahead:
    """What `reuse` estimates of a token, moved towards what the next tokens are to visit.

    Args:
        chances_NTLE: of the experts of the N next tokens; the nearest first.
        belief: how sure the next token is, and each further one if those before are right.
    """

    name = ReuseEstimator.name

    def __init__(
        self, reuse: ReuseEstimator | CompiledReuse, chances_NTLE: np.ndarray, belief: float
    ) -> None:
        self._reuse, self._chances_NTLE = reuse, chances_NTLE
        ahead = np.arange(len(chances_NTLE))
        self._weights_N = (1 - DISCOUNT) * DISCOUNT**ahead * belief ** (ahead + 1)
        self._token, self._scores = -1, dict[int, list[float]]()
        self.finish, self.learned = reuse.finish, reuse.learned

    def observe(self, event: Event) -> None:
        self._reuse.observe(event)
        if isinstance(event, StepBegins):
            self._token += 1
            return
        chance_E = sigmoid(np.array(self._reuse.scores(event.layer)))
        known_NE = self._chances_NTLE[:, self._token, event.layer]
        self._scores[event.layer] = (chance_E + self._weights_N @ (known_NE - chance_E)).tolist()

    def scores(self, layer: int) -> list[float]:
        return self._scores[layer]


def draft(routes: Routes, acceptance: float) -> np.ndarray:
    """Ids of the next tokens, ``[N, T]``; behind a wrong one all are wrong."""
    rng, num_tokens = np.random.default_rng(0), routes.num_tokens
    ends = np.repeat(routes.offsets[1:], np.diff(routes.offsets))
    drafted = routes.token_ids[rng.integers(num_tokens, size=(MOST_DRAFTED, num_tokens))]
    right = np.ones(num_tokens, bool)
    for ahead, ids in enumerate(drafted, 1):
        place = np.arange(num_tokens) + ahead
        right &= (rng.random(num_tokens) < acceptance) & (place < ends)
        ids[right] = routes.token_ids[place[right]]
    return drafted


def expected(routes: Routes, drafted_NT: np.ndarray, predictor: Estimator) -> np.ndarray:
    """Chances ``[N, T, L, E]`` of the drafted tokens' experts, as known once a token is routed."""
    (now,) = contexts_of(routes, max_rows=routes.num_tokens)
    following = now.rows(np.minimum(np.arange(routes.num_tokens) + 1, routes.num_tokens - 1))
    unknown = np.full_like(now.path, routes.shape.num_experts)
    before, path = routes.token_ids, now.path
    found = list[np.ndarray]()
    for ids in drafted_NT:
        contexts = replace(
            following,
            **{"token_ids": ids, "previous_token_ids": before, "previous": path},
            **{"recalled": unknown, "path": unknown, "path_weights": np.zeros_like(unknown, "<f4")},
            memo={},
        )
        layers = range(routes.shape.num_layers)
        found.append(np.stack([predictor.estimate(contexts, -1, at) for at in layers], axis=1))
        before, path = ids, unknown
    return np.stack(found)


def main() -> int:
    parser = prefetch_matrix.traces_parser(__doc__, steps=200)
    parser.add_argument("--acceptance", type=float, default=0.6, help="of each drafted token")
    options = parser.parse_args()
    served, learned = prefetch_matrix.served_and_learned(options)
    routes, new_taught = routes_of(served.trace), prefetch_matrix.taught(learned)
    predictor = make_estimator("combined", learned.shape)
    predictor.fit(learned)
    visited = visits(routes.expert_ids, learned.shape.num_experts)
    ahead = np.arange(routes.num_tokens) + np.arange(1, MOST_DRAFTED + 1)[:, None]
    ways = {
        "drafted": (
            expected(routes, draft(routes, options.acceptance), predictor),
            options.acceptance,
        ),
        "routed": (visited[np.minimum(ahead, routes.num_tokens - 1)], 1.0),
    }
    settings = {"trace": options.trace.name, "train": options.train.name}
    settings |= {"acceptance": options.acceptance, "steps": options.steps}
    results = ScriptResults("looking-ahead", options, settings, METRICS)
    for share in prefetch_matrix.SHARES:
        num_slots = round(share * learned.shape.num_layers * learned.shape.num_experts)
        shares = even_shares(num_slots, learned.shape.num_layers)

        def hits(make: Maker, num_slots: int = num_slots, shares: list[int] = shares) -> float:
            return replay_demand(served, lambda _: LayerShares(make, shares), num_slots).hit_rate

        least, most = hits(LRU), prefetch_matrix.optimum(served, num_slots).hit_rate
        kinds: dict[str, ReuseEstimator | CompiledReuse | Ahead] = {"past only": new_taught()}
        for name, (chances, belief) in ways.items():
            for number in (1, 2, 4, 8):
                kinds[f"{number} next tokens {name}"] = Ahead(
                    new_taught(), chances[:number], belief
                )
        for name, estimator in kinds.items():
            rate = hits(maker_of(estimator))
            gained = (rate - least) / (most - least)
            results.add(
                f"{share:.1%} resident; {name}", [{"of_lru_to_optimum": gained, "hits": rate}]
            )
    return results.finish()


if __name__ == "__main__":
    sys.exit(run_script(main))
