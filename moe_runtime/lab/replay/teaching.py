"""Trains the network of the policy ``reuse``, and a predictor, on the recorded routing of a model.

The network is kept if it saves misses, the predictor if it finds more than counts. As a program,
with a file of kept routing and the checkpoint, the module does so in the background.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_runtime.files import locked, make_folders
from moe_runtime.lab.replay.evaluation import evaluate
from moe_runtime.lab.replay.experiment import usual_capacities
from moe_runtime.lab.replay.untimed import replay_demand
from moe_runtime.lab.traces.format import Trace, read_trace
from moe_runtime.lab.traces.learned import (
    Lesson,
    learned_path,
    read_lesson,
    write_learned,
    write_lesson,
    write_predictor,
)
from moe_runtime.lab.traces.recent import FILE_TOKENS, recent_path
from moe_runtime.lab.traces.routes import routes_of
from moe_runtime.lab.traces.workload import Workload, workload_of
from moe_runtime.policies.eviction import LRU, LayerShares, even_shares
from moe_runtime.policies.eviction.base import Maker
from moe_runtime.policies.eviction.reuse import LEAST_TOKENS, maker_of, new_estimator, teach
from moe_runtime.policies.prediction import RunningCounts
from moe_runtime.policies.prediction.base import shape_of
from moe_runtime.policies.prediction.trained import Combination

LEAST_KEPT_TOKENS = 2000
"""Fewest kept tokens that are taught from in the background."""
_LEAST_REQUESTS = 3
_HELD_OUT = 5  # the latest fifth of the steps is held out
_MOST_CELLS = 1 << 26
"""Tokens x layers x experts that are taught from in the background: each takes five bytes."""
_TIMED_EVENTS, _JUDGED_TOKENS = 2000, 1000
_NUM_LAST = 64  # tokens that mark the end of the last teaching in the kept routing


@dataclass(frozen=True, kw_only=True)
class TeachingResult:
    """Result of training, counted on held-out steps."""

    tokens: int
    held_out_tokens: int
    lesson: Lesson
    kept: Path | None  # where the network lies; None where it saves nothing


def teach_reuse(
    trace: Trace, checkpoint: Path, on_progress: Callable[[str], None] = lambda _: None
) -> TeachingResult:
    """Trains a network, counts its misses on the latest fifth of the steps, and may keep it.

    It is kept if it misses less than ``reuse`` without a network. Later runs of the checkpoint with
    the policy ``reuse`` begin with it, and ``auto`` goes by its misses. A predictor is trained on
    the same steps, and kept if it finds more than counts.

    Raises:
        ValueError: the trace has too few tokens.
        OSError: the network cannot be written.
    """
    signature, shape = trace.signature, shape_of(trace.signature)
    num_taught = trace.num_steps - trace.num_steps // _HELD_OUT
    learned = routes_of(trace.steps(0, num_taught))
    on_progress("training")
    estimator = new_estimator(shape)
    if not teach(estimator, learned):
        raise ValueError(
            f"{trace.num_tokens} tokens of {learned.num_sequences} requests are too few: expected "
            f"about {2 * LEAST_TOKENS} tokens in several requests; run the model more, or give "
            "traces of `run --trace`"
        )
    held_out = workload_of(trace.steps(num_taught, trace.num_steps))
    capacities = usual_capacities(signature, "per-layer")
    taught = estimator.learned()

    def misses(name: str, make: Callable[[], Maker]) -> list[int]:
        found = []
        for capacity in capacities:
            on_progress(f"replaying {name} at {capacity:.1%}")
            num_slots = round(capacity * signature.num_layers * signature.num_experts)
            shares, maker = even_shares(num_slots, signature.num_layers), make()
            replay = replay_demand(
                held_out, lambda _, m=maker, s=shares: LayerShares(m, s), num_slots
            )
            found.append(replay.num_accesses - replay.num_hits)
        return found

    def beginning() -> Maker:
        """The start of the next run: with the kept arrays, but no remembered tokens."""
        nonlocal estimator
        estimator = new_estimator(shape)
        estimator.restore(taught)
        return maker_of(estimator)

    counted = [
        misses("lru", lambda: LRU),
        misses("reuse", lambda: maker_of(new_estimator(shape))),
        misses("reuse with the network", beginning),
    ]
    path, saves = learned_path(estimator.name, signature, checkpoint), False
    if sum(counted[2]) < sum(counted[1]):
        saves = True
        write_learned(estimator, signature, path)
    on_progress("training the predictor")
    trained, counts = Combination(shape), RunningCounts(shape)
    trained.fit(learned)
    judged = routes_of(held_out.trace)
    _, ours, theirs = evaluate([trained, counts], judged, distances=(1,), max_tokens=_JUDGED_TOKENS)
    recall = ours.at(1).mean_at_k
    if recall > theirs.at(1).mean_at_k:
        write_predictor(learned_path("predictor", signature, checkpoint), trained, signature)
    else:
        recall = 0.0
    lesson = Lesson(
        tokens=trace.num_tokens,
        last_marks=_marks(trace)[-_NUM_LAST:],
        capacities=np.array(capacities),
        misses=np.array(counted, np.int64),
        is_kept=saves,
        policy_s=_policy_s(held_out, estimator),
        recall=recall,
    )
    write_lesson(lesson, signature, checkpoint)
    return TeachingResult(
        tokens=trace.num_tokens,
        held_out_tokens=held_out.trace.num_tokens,
        lesson=lesson,
        kept=path if saves else None,
    )


def _policy_s(workload: Workload, estimator: Any) -> float:
    """Seconds of a processor that an estimator takes of a layer of a step."""
    num_events, spent_s = min(workload.num_events, _TIMED_EVENTS), 0.0
    for number, (begins, routed) in enumerate(workload.routing(0, num_events)):
        start_s = time.process_time()
        if begins is not None:
            workload.begin(number, begins, [estimator])
        estimator.observe(routed)
        estimator.scores(routed.layer)
        spent_s += time.process_time() - start_s
    return spent_s / max(num_events, 1)


def is_due(trace: Trace, lesson: Lesson | None) -> bool:
    """Whether kept routing is worth teaching from: it has as many new tokens as the last teaching
    saw, or half of the largest file."""
    if trace.num_tokens < LEAST_KEPT_TOKENS:
        return False
    if len(np.unique(trace.token_request)) < _LEAST_REQUESTS:
        return False
    if lesson is None:
        return True
    num_new, width = trace.num_tokens, len(lesson.last_marks)
    if width <= trace.num_tokens:
        windows = np.lib.stride_tricks.sliding_window_view(_marks(trace), width)
        ends = np.flatnonzero((windows == lesson.last_marks).all(axis=1))
        if ends.size:
            num_new = trace.num_tokens - int(ends[-1]) - width
    return num_new >= min(lesson.tokens, FILE_TOKENS // 2)


def _marks(trace: Trace) -> np.ndarray:
    """``[T]`` int64: a hash of each token and its routing."""
    paths = trace.expert_ids.reshape(trace.num_tokens, -1).astype(np.int64)
    return (paths * np.arange(1, paths.shape[1] + 1)).sum(axis=1) * 2**32 + trace.token_id


def start_teaching(trace: Trace, checkpoint: Path) -> bool:
    """Starts a background process that teaches from the kept routing, if that is due.

    Returns:
        Whether it was started.
    """
    signature, checkpoint = trace.signature, checkpoint.resolve()
    if not sys.executable or not is_due(trace, read_lesson(signature, checkpoint)):
        return False
    command = ["env", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1"]
    command += [
        sys.executable,
        "-P",
        "-m",
        __name__,
        str(recent_path(signature, checkpoint)),
        str(checkpoint),
    ]
    # it outlives the object that started it
    with contextlib.suppress(OSError, RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        return True
    return False


def teach_kept(routing: Path, checkpoint: Path) -> bool:
    """Teaches from a file of kept routing, if that is due and no other process does.

    Returns:
        Whether a lesson was written.
    """
    trace = read_trace(routing)
    most = _MOST_CELLS // (trace.signature.num_layers * trace.signature.num_experts)
    first = int(np.searchsorted(trace.step_start, trace.num_tokens - most))
    trace = trace.steps(min(first, trace.num_steps - 1), trace.num_steps)
    lock = learned_path("lesson", trace.signature, checkpoint).with_suffix(".lock")
    make_folders(lock.parent)
    with contextlib.suppress(BlockingIOError), locked(lock):
        if is_due(trace, read_lesson(trace.signature, checkpoint)):
            # too few tokens in the requests that it would learn from: later
            with contextlib.suppress(ValueError):
                teach_reuse(trace, checkpoint)
                return True
    return False


def main(words: Sequence[str]) -> int:
    """The program: of the lowest priority, and it leaves no partial file when it is ended."""
    os.nice(19)
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    routing, checkpoint = map(Path, words)
    teach_kept(routing, checkpoint)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
