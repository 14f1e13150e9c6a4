"""Replace a model's routing by a recorded trace, and compute what the hardware allows.

Each text of the benchmark takes a request of the trace from its first token. Reads and weights come
from the checkpoint; the chosen experts and their gate weights come from real text.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean, median

import numpy as np

from moe_runtime.benchmarks.cases.io import ReadPlan, make_read_systems
from moe_runtime.benchmarks.suite import Metric, Number, PeerFailedError, facts
from moe_runtime.checkpoints.expert_map import map_experts
from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint
from moe_runtime.inference.loading import signature_of
from moe_runtime.lab.replay.experiment import Experiment, policy_of
from moe_runtime.lab.replay.untimed import replay_demand
from moe_runtime.lab.traces.format import PHASES, Trace, write_trace
from moe_runtime.lab.traces.readers import read_any_trace
from moe_runtime.lab.traces.routes import UNKNOWN_MODEL, routes_of, shown_model, trace_of_routes
from moe_runtime.lab.traces.workload import workload_of
from moe_runtime.policies.prediction import Routes
from moe_runtime.types import ModelSignature

READS_AT_ONCE, READ_EXPERTS = 4, 32
ROUTED_METRICS = {
    "step_s": Metric("s"),
    **facts("s", "bound_s", "optimum_bound_s", "read_s", "lru_read_s", "optimum_read_s"),
    **facts("s", "computing_s", "stall_s", "predict_s"),
    **facts("share", "of_bound", better="more"),
    **facts("bytes", "step_read_bytes"),
    **facts("bytes/s", "disk_bytes_per_s", better="more"),
    **facts("share", "disk_from_storage"),
}
"""Means of a decode step of routed requests.

``read_s`` is what the bytes that were read take at the disk's measured speed, ``lru_read_s`` and
``optimum_read_s`` the same of those that LRU and Belady's optimum would have read with as many
slots. ``computing_s`` is a step whose experts are all resident. ``bound_s`` is the longer of reads
and computation, which no run that reads as much can beat; ``of_bound`` says how near the run is.
"""


@dataclass(frozen=True)
class TracedModel:
    """The model that a trace must match."""

    name: str
    signature: ModelSignature
    all_layers: int  # of the full shape


def take_routes(path: Path, asked: TracedModel, num_requests: int, num_tokens: int) -> Routes:
    """The first requests of a trace that are long enough, cut to that length.

    Raises:
        ValueError: the trace belongs to another model, or is too short.
    """
    routes = routes_of(read_layers(path, asked))
    lengths = np.diff(routes.offsets)
    fitting = np.flatnonzero(lengths >= num_tokens)[:num_requests]
    if len(fitting) < num_requests:
        raise ValueError(
            f"{path}: expected {num_requests} requests of {num_tokens} tokens, prompt and new ones "
            f"together, got {len(fitting)}; of its {len(lengths)} requests the longest has "
            f"{lengths.max(initial=0)}; ask for fewer tokens"
        )
    whole = routes.select(fitting.tolist())
    rows = (whole.offsets[:-1, None] + np.arange(num_tokens)).ravel()
    taken = {one: getattr(whole, one)[rows] for one in ("expert_ids", "gate_weights", "token_ids")}
    return replace(whole, offsets=np.arange(num_requests + 1) * num_tokens, **taken)


def read_layers(path: Path, asked: TracedModel) -> Trace:
    """Read a trace and keep the layers that the model has. Raises ValueError for another model."""
    trace, wanted = read_any_trace(path), asked.signature
    trace.require_choices(path)
    found = trace.signature
    is_named = found.model_type != UNKNOWN_MODEL
    whole = replace(wanted, num_layers=asked.all_layers)
    sizes = [(one.num_layers, one.num_experts, one.top_k) for one in (found, whole)]
    if sizes[0] != sizes[1] or (is_named and found.model_type != wanted.model_type):
        raise ValueError(
            f"{path}: is a trace of {shown_model(found)}; {asked.name} is {shown_model(whole)}"
        )
    return replace(
        trace,
        signature=wanted,
        expert_ids=trace.expert_ids[:, : wanted.num_layers],
        gate_weights=trace.gate_weights[:, : wanted.num_layers],
        token_id=(trace.token_id % wanted.vocab_size).astype(np.int32),
    )


def teach(trace: Path, asked: TracedModel, checkpoint: Path, cache: Path) -> None:
    """Train the network of ``reuse`` on a trace, for runs with this cache folder.

    Raises:
        PeerFailedError: nothing was learned.
    """
    cache.mkdir()
    write_trace(cache / "train.npz", read_layers(trace, asked))
    words = ["predictor", "teach", str(checkpoint), str(cache / "train.npz"), "--json"]
    program = ["env", f"XDG_CACHE_HOME={cache}", sys.executable, "-P", "-m", "moe_runtime.cli.main"]
    done = subprocess.run([*program, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerFailedError(f"--train {trace}: {done.stderr.strip().splitlines()[-1]}")
    if json.loads(done.stdout)["file"] is None:
        raise PeerFailedError(f"--train {trace}: teaches no network that misses less")


class RecordedRouting:
    """The requests of a benchmark by batch, with their routing and its bounds.

    Args:
        trace: recorded routing; its requests are taken in turn.
        all_layers: layers of the full shape, if the checkpoint has only the first ones.
        batches: request numbers of each text.
        num_prompt, num_new: tokens of a prompt and of its continuation.
    """

    def __init__(
        self,
        trace: Path,
        checkpoint: Path,
        all_layers: int | None,
        batches: Sequence[Sequence[int]],
        num_prompt: int,
        num_new: int,
    ) -> None:
        opened = open_checkpoint(checkpoint, "auto")
        experts = map_experts(build_on_meta(opened), opened)
        layouts, signature = experts.layouts, signature_of(opened, experts)
        self.asked = TracedModel(checkpoint.name, signature, all_layers or signature.num_layers)
        self._batches, self._num_prompt = batches, num_prompt
        num_requests = sum(map(len, batches))
        self._routes = take_routes(trace, self.asked, num_requests, num_prompt + num_new)
        self._expert_bytes = fmean(one.tensor_bytes for one in layouts.values())
        self._plan = ReadPlan(
            layouts=layouts,
            num_experts=min(READ_EXPERTS, len(layouts)),
            in_flight=min(READS_AT_ONCE, len(layouts)),
            io_threads=READS_AT_ONCE,
        )
        self._read_bytes: dict[tuple[str, int], float] = {}

    @property
    def token_ids(self) -> list[list[int]]:
        """The token ids of each request, prompt and continuation."""
        routes = self._routes
        return routes.token_ids.reshape(routes.num_sequences, -1).tolist()

    def saved(self, folder: Path) -> Path:
        """Write the routing for a process. Behind the requests stand those that repeat their first
        new token, whose experts stay resident."""
        path = folder / "routes.npz"
        routes, length = self._routes, int(self._routes.offsets[1])
        held = np.repeat(routes.offsets[:-1] + self._num_prompt, length)
        np.savez(
            path,
            ids=np.concatenate([routes.expert_ids, routes.expert_ids[held]]),
            weights=np.concatenate([routes.gate_weights, routes.gate_weights[held]]),
            tokens=np.concatenate([routes.token_ids, routes.token_ids[held]]),
            length=length,
        )
        return path

    def requests(self, number: int, *, held: bool = False) -> list[int]:
        """The requests of a text; with ``held``, those that repeat one token."""
        return [one + held * self._routes.num_sequences for one in self._batches[number]]

    def step_bytes(self, policy: str, num_slots: int) -> float:
        """Mean bytes that a decode step reads with a policy and a number of slots."""
        key = policy, num_slots
        if key not in self._read_bytes:
            num_experts = self.asked.signature.num_layers * self.asked.signature.num_experts
            share = min(1.0, num_slots / num_experts)
            experiment = Experiment(policies=[policy], capacities=[share])
            workload = workload_of(self._served)
            make = partial(policy_of, workload, experiment, policy, num_slots)
            replay = replay_demand(workload, make, num_slots)
            is_timed = self._is_timed[workload.step]
            misses = (workload.num_keys - replay.hits)[is_timed].sum()
            self._read_bytes[key] = misses * self._expert_bytes / self._is_timed.sum()
        return self._read_bytes[key]

    @cached_property
    def _served(self) -> Trace:
        """The steps of a repetition: the first text, untimed, then all texts."""
        routes, length = self._routes, int(self._routes.offsets[1])
        first = self._num_prompt
        steps = [np.arange(first), *np.arange(first, length - 1)[:, None]]
        rows, requests, count = list[np.ndarray](), list[np.ndarray](), 0
        for batch in (self._batches[0], *self._batches):
            starts, numbers = routes.offsets[list(batch)][:, None], count + np.arange(len(batch))
            rows += [(starts + places).ravel() for places in steps]
            requests += [np.repeat(numbers, len(places)) for places in steps]
            count += len(batch)
        whole, order = trace_of_routes(routes, self.asked.signature), np.concatenate(rows)
        phases = [PHASES.index("prefill"), *[PHASES.index("decode")] * (len(steps) - 1)]
        of_tokens = ("token_id", "token_position", "expert_ids", "gate_weights")
        return replace(
            whole,
            step_phase=np.tile(np.array(phases, np.uint8), 1 + len(self._batches)),
            step_start=np.cumsum([0, *map(len, rows)]),
            token_request=np.concatenate(requests).astype(np.int32),
            **{name: getattr(whole, name)[order] for name in of_tokens},
        )

    @cached_property
    def _is_timed(self) -> np.ndarray:
        """Whether a step is a timed decode step."""
        phases = self._served.step_phase
        behind = np.arange(len(phases)) >= len(phases) // (1 + len(self._batches))
        return behind & (phases == PHASES.index("decode"))

    def server_words(self, words: Sequence[str], folder: Path) -> list[str]:
        """The command of a server with recorded routing; ``words`` are `serve`'s arguments."""
        module = "moe_runtime.benchmarks.cases.routed_model"
        return [sys.executable, "-P", "-m", module, str(self.saved(folder)), *words]

    def measured_disk(self) -> Mapping[str, Number]:
        """Measure the speed of reading experts, as ``bench io`` does."""
        with make_read_systems(self._plan) as (ours, *_):
            return ours.repeat()

    def numbers(
        self,
        steps_s: Sequence[float],
        held_s: Sequence[float],
        counts: Sequence[Mapping[str, float]],
        num_slots: int,
    ) -> dict[str, Number]:
        """`ROUTED_METRICS` of a repetition.

        Args:
            steps_s: seconds of each decode step.
            held_s: seconds of steps with all experts resident.
            counts: ``bytes_read``, ``stall_s`` and ``predict_s`` of each text's decode steps.
            num_slots: number of expert slots.
        """
        disk = self.measured_disk()
        speed, step_s, computing_s = disk["bytes_per_s"], fmean(steps_s), median(held_s)
        assert isinstance(speed, float)
        of_step = {
            name: sum(one[name] for one in counts) / len(steps_s)
            for name in ("bytes_read", "stall_s", "predict_s")
        }
        reads = {
            "read_s": of_step["bytes_read"] / speed,
            "lru_read_s": self.step_bytes("lru", num_slots) / speed,
            "optimum_read_s": self.step_bytes("belady-bypass", num_slots) / speed,
        }
        bound_s = max(reads["read_s"], computing_s)
        return {
            "step_s": step_s,
            "bound_s": bound_s,
            "optimum_bound_s": max(reads["optimum_read_s"], computing_s),
            **reads,
            "computing_s": computing_s,
            "stall_s": of_step["stall_s"],
            "predict_s": of_step["predict_s"],
            "of_bound": bound_s / step_s,
            "step_read_bytes": of_step["bytes_read"],
            "disk_bytes_per_s": speed,
            "disk_from_storage": disk["from_storage"],
        }
