"""Eviction with drafted tokens: `python benchmarks/looking_ahead.py TRACE --train TRACE`.

The policy `reuse`, taught by other requests, is replayed; it is also told the ids of the next
tokens, each right with some probability if the ones before are. What the trained predictor expects
of these tokens is weighed by that probability, and by how soon they come. A control is told where
the next tokens really go. Results are the shares of the way from LRU to the optimum.

With ``--queue`` they are the reads of a server's steps, which decode some requests and read a piece
of the next prompt. LRU is told which experts the next piece needs: all that its tokens, by those of
other requests, visit with a chance of 0.99, or those that it visits. They are not evicted for
others.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moe_runtime.benchmarks import prefetch_matrix
from moe_runtime.benchmarks.harness.scripting import ScriptResults, option, script
from moe_runtime.benchmarks.suite import facts
from moe_runtime.inference.drafts import MOST_DRAFTED
from moe_runtime.lab.replay.untimed import replay_demand
from moe_runtime.lab.traces.format import Trace
from moe_runtime.lab.traces.readers import read_any_trace
from moe_runtime.lab.traces.routes import routes_of, trace_of_routes
from moe_runtime.lab.traces.workload import Workload, workload_of
from moe_runtime.policies.eviction import LRU, Evictable, LayerShares, even_shares
from moe_runtime.policies.eviction.base import Maker
from moe_runtime.policies.eviction.reuse import CompiledReuse, ReuseEstimator, maker_of
from moe_runtime.policies.eviction.reuse_network import DISCOUNT
from moe_runtime.policies.prediction import Estimator, Routes, contexts_of, make_estimator
from moe_runtime.policies.prediction.base import Event, StepBegins
from moe_runtime.policies.prediction.estimator import popularity_of, sigmoid, visits
from moe_runtime.policies.prediction.trained import TokenTable
from moe_runtime.types import ExpertKey

STEPS = (1, 4), (1, 16), (4, 16), (4, 64)
"""Requests that decode in a step, and prompt tokens of the step."""
CERTAIN = 0.99
METRICS = facts("share", "of_lru_to_optimum", "hits", better="more")
QUEUE_METRICS = facts("count", "reads") | facts("share", "of_lru")


class Ahead:
    """The estimate of `reuse`, corrected by the likely experts of the next tokens.

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
    """Drafted ids of the next tokens, ``[N, T]``; after a wrong one all are wrong."""
    rng, num_tokens = np.random.default_rng(0), routes.num_tokens
    ends = np.repeat(routes.offsets[1:], np.diff(routes.offsets))
    drafted = routes.token_ids[rng.integers(num_tokens, size=(MOST_DRAFTED, num_tokens))]
    right = np.ones(num_tokens, bool)
    for ahead, ids in enumerate(drafted, 1):
        place = np.arange(num_tokens) + ahead
        right &= (rng.random(num_tokens) < acceptance) & (place < ends)
        ids[right] = routes.token_ids[place[right]]
    return drafted


def recalled(routes: Routes, drafted_NT: np.ndarray) -> np.ndarray:
    """The experts of each drafted id's last token in the request: ``[N, T, L, K]``."""
    sizes = *drafted_NT.shape, *routes.expert_ids.shape[1:]
    found = np.full(sizes, routes.shape.num_experts)
    for sequence in range(routes.num_sequences):
        rows, seen = routes.tokens_of(sequence), dict[int, int]()
        for token in range(rows.start, rows.stop):
            seen[int(routes.token_ids[token])] = token
            for ahead, drafted in enumerate(drafted_NT[:, token].tolist()):
                if drafted in seen:
                    found[ahead, token] = routes.expert_ids[seen[drafted]]
    return found


def expected(routes: Routes, drafted_NT: np.ndarray, predictor: Estimator) -> np.ndarray:
    """Probabilities ``[N, T, L, E]`` of the drafted tokens' experts, once a token is routed."""
    (now,) = contexts_of(routes, max_rows=routes.num_tokens)
    following = now.rows(np.minimum(np.arange(routes.num_tokens) + 1, routes.num_tokens - 1))
    unknown = np.full_like(now.path, routes.shape.num_experts)
    before, path = routes.token_ids, now.path
    found = list[np.ndarray]()
    for ids, last in zip(drafted_NT, recalled(routes, drafted_NT), strict=True):
        contexts = replace(
            following,
            **{"token_ids": ids, "previous_token_ids": before, "previous": path},
            **{"recalled": last, "path": unknown, "path_weights": np.zeros_like(unknown, "<f4")},
            memo={},
        )
        layers = range(routes.shape.num_layers)
        found.append(np.stack([predictor.estimate(contexts, -1, at) for at in layers], axis=1))
        before, path = ids, unknown
    return np.stack(found)


class Queue:
    """The experts that the next step certainly needs, known when a step begins."""

    def __init__(self, needed: Sequence[frozenset[ExpertKey]]) -> None:
        self._needed, self.keys = iter(needed), frozenset[ExpertKey]()

    def observe(self, event: Event) -> None:
        if isinstance(event, StepBegins):
            self.keys = next(self._needed)

    def finish(self, sequence: int) -> None:
        """Needs belong to steps, not to sequences."""


class Told(LRU[ExpertKey]):
    """LRU that evicts no expert the queue needs for one it does not need."""

    may_decline = True
    rule = None

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self.watcher = self._queue = queue

    def victim(self, evictable: Evictable, incoming: ExpertKey) -> ExpertKey | None:
        others = super().victim(lambda k: evictable(k) and k not in self._queue.keys, incoming)
        return others or super().victim(evictable, incoming)

    def declines(self, incoming: ExpertKey, victim: ExpertKey) -> bool:
        return victim in self._queue.keys and incoming not in self._queue.keys


def side_by_side(routes: Routes, num_decoding: int, num_prompt: int) -> tuple[np.ndarray, int]:
    """The rows ``[S, N]`` of each step (the second half of the first requests, then prompt tokens
    of the others), and the number of decoding rows."""
    lengths = np.diff(routes.offsets)
    first = (routes.offsets[:-1] + lengths // 2)[:num_decoding]
    behind = routes.offsets[num_decoding]
    num_steps = min(*(lengths[:num_decoding] // 2), (routes.num_tokens - behind) // num_prompt)
    steps = np.arange(num_steps)[:, None]
    prompts = behind + num_prompt * steps + np.arange(num_prompt)
    return np.concatenate([first + steps, prompts], axis=1), num_decoding


def needs(chances_SLE: np.ndarray) -> list[frozenset[ExpertKey]]:
    """The certain experts of the step after each."""
    found = [
        frozenset(ExpertKey(*key) for key in np.argwhere(chance_LE >= CERTAIN).tolist())
        for chance_LE in chances_SLE
    ]
    return [*found[1:], frozenset()]


def reads_of(served: Workload, make: Maker, num_slots: int) -> float:
    shares = even_shares(num_slots, served.trace.signature.num_layers)
    replay = replay_demand(served, lambda _: LayerShares(make, shares), num_slots)
    return (replay.num_accesses - replay.num_hits) / served.trace.num_steps


def measure_queue(served: Trace, learned: Routes, results: ScriptResults) -> None:
    """Reads of steps, by what is known of the next prompt tokens."""
    routes, shape = routes_of(served), learned.shape
    tables = TokenTable.count(learned, learned.token_ids)
    visited, usual = visits(routes.expert_ids, shape.num_experts), popularity_of(learned)
    for num_decoding, num_prompt in STEPS:
        rows, decoded = side_by_side(routes, num_decoding, num_prompt)
        whole = trace_of_routes(routes, served.signature)
        names = ("token_id", "token_position", "token_request", "expert_ids", "gate_weights")
        columns = {name: getattr(whole, name)[rows.ravel()] for name in names}
        starts, phases = np.arange(len(rows) + 1) * rows.shape[1], whole.step_phase[: len(rows)]
        trace = replace(whole, step_start=starts, step_phase=phases, **columns)
        work, prompts = workload_of(trace), rows[:, decoded:]
        told = {
            "what tokens visit": np.stack(
                [1 - np.prod(1 - tables.share(routes.token_ids[one], usual), 0) for one in prompts]
            ),
            "where they go": visited[prompts].max(1),
        }
        for share in prefetch_matrix.SHARES:
            num_slots = round(share * shape.num_layers * shape.num_experts)
            found = {"LRU": reads_of(work, LRU, num_slots)}
            for name, chances in told.items():
                queue = Queue(needs(chances))
                found[f"told {name}"] = reads_of(work, lambda q=queue: Told(q), num_slots)
            for name, reads in found.items():
                where = f"{num_decoding} + {num_prompt} tokens; {share:.1%} resident"
                results.add(f"{where}; {name}", [{"reads": reads, "of_lru": reads / found["LRU"]}])


@script(
    **prefetch_matrix.TRACES,
    steps=option(200, "of each request"),
    acceptance=option(0.6, "of each drafted token"),
    queue=option(False, "the reads of a server's steps"),
)
def main(options: Namespace) -> int:
    settings = {"trace": options.trace.name, "train": options.train.name}
    if options.queue:
        results = ScriptResults("queue-ahead", options, settings, QUEUE_METRICS)
        learned = read_any_trace(options.train)
        measure_queue(read_any_trace(options.trace), routes_of(learned), results)
        return results.finish()
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
    sys.exit(main())
