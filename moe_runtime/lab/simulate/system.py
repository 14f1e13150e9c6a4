"""Predicts serving and training of a whole model over many ranks, with failures and restarts.

Every rank has the dense weights, its experts, and its own sequences (data-parallel attention with
expert parallelism). All ranks take a step together. A step's time is that of its layers, which
`scaling.predict_layer` simulates.

Legend: P ranks, E experts, N requests.
"""

import csv
import functools
import heapq
import math
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from moe_runtime.errors import CapacityError
from moe_runtime.files import read_toml
from moe_runtime.lab.simulate.pipeline import most_held
from moe_runtime.lab.simulate.scaling import (
    Imbalance,
    LayerSchedule,
    LayerWorkload,
    check_numbers,
    expert_loads,
    placed,
    predict_layer,
)
from moe_runtime.parallel.cluster import Cluster
from moe_runtime.policies.placement import Placement, place_experts

WORKING_SHARE = 0.1
"""Share of a rank's memory for activations and buffers."""
KV_SHARE = 0.1
"""Share of a rank's memory that keys and values get before experts, if these can be on disk."""
MOST_RESTARTS = 100
"""Restarts in a row without a request that ended."""
MOST_TOKENS = 1_000_000
"""Largest recorded prompt or answer."""
OPTIMIZER_BYTES = 12
"""Bytes of each trained parameter: moments and a master copy in fp32."""
EVEN = Imbalance()


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedModel:
    """A model by its sizes.

    Attributes:
        dense_parameters: everything but the routed experts; a token passes all of them.
        kv_bytes_per_token: keys and values of all layers.
    """

    num_layers: int
    model_dim: int
    num_experts: int
    top_k: int
    expert_hidden: int
    dense_parameters: float
    kv_bytes_per_token: float
    bytes_per_weight: float = 2.0
    bytes_per_activation: float = 2.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} exceeds the {self.num_experts} experts")

    @property
    def expert_parameters(self) -> float:
        """Of one expert in one layer."""
        return 3.0 * self.model_dim * self.expert_hidden

    @property
    def parameters(self) -> float:
        routed = self.num_layers * self.num_experts * self.expert_parameters
        return self.dense_parameters + routed


def read_model(path: str | os.PathLike[str]) -> SimulatedModel:
    """Reads a model's sizes from a TOML file."""
    value, known = read_toml(path), set(SimulatedModel.__slots__)
    check_numbers(value, known, known - {"bytes_per_weight", "bytes_per_activation"}, path)
    try:
        return SimulatedModel(**value)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


class SimulatedSteps:
    """Seconds of a step of a model on a cluster, by the tokens of each rank.

    Weights are read once a step: an expert's by the rank that has it, if a token chose it. Experts
    that do not fit in a rank's memory come from its disk each time.
    """

    def __init__(
        self,
        cluster: Cluster,
        model: SimulatedModel,
        imbalance: Imbalance = EVEN,
        *,
        place: Callable[..., Placement] = place_experts,
    ) -> None:
        self.cluster, self.model = cluster, model
        num_ranks = cluster.num_ranks
        # every rank has as many slots
        replicas = imbalance.replicas_per_rank * num_ranks + -model.num_experts % num_ranks
        loads_E = expert_loads(model.num_experts, imbalance)
        placement = placed(cluster, loads_E, imbalance.algorithm, replicas, place)
        self._probability_E = loads_E / loads_E.sum()
        self._copies_E = placement.copies[0]
        self._experts_S = placement.expert_of_slot[0]
        self._rank_S = placement.gpu_of_slot
        self._straggler = imbalance.straggler
        slots = placement.num_slots / num_ranks
        self._slot_bytes = model.expert_parameters * model.bytes_per_weight
        self.expert_bytes = slots * model.num_layers * self._slot_bytes
        self.dense_bytes = model.dense_parameters * model.bytes_per_weight
        room = cluster.memory_bytes * (1 - WORKING_SHARE) - self.dense_bytes
        has_disk = math.isfinite(cluster.disk_bytes_per_s)
        # keys and values come first: without any, nothing is served
        aside = min(max(0.0, room), KV_SHARE * cluster.memory_bytes) if has_disk else 0.0
        self.resident_share = min(1.0, max(0.0, room - aside) / self.expert_bytes)
        if room < 0 or (self.resident_share < 1 and not has_disk):
            need = (self.dense_bytes + self.expert_bytes) / (1 - WORKING_SHARE)
            raise CapacityError(
                f"{num_ranks} ranks: each needs {need / 2**30:.1f} GiB for its weights, and has "
                f"{cluster.memory_bytes / 2**30:.1f}; give more ranks, or disk_bytes_per_s"
            )
        rest = max(aside, room - self.expert_bytes)
        self.kv_tokens = num_ranks * rest / model.kv_bytes_per_token
        """Tokens whose keys and values fit, on all ranks together."""
        self._known: dict[tuple[float, bool], float] = {}

    def step_s(self, tokens: float, context: float = 0.0, *, is_training: bool = False) -> float:
        """Seconds of a step of so many tokens on each rank.

        Args:
            tokens: of each rank.
            context: tokens of each rank whose keys and values are read.
            is_training: forward, forward again, and backward.
        """
        read_s = context * self.model.kv_bytes_per_token / self.cluster.memory_bytes_per_s
        if tokens <= 0:
            return 0.0
        # Between powers of two, time is nearly linear in the tokens.
        below = 2.0 ** math.floor(math.log2(tokens))
        first, last = self._layers_s(below, is_training), self._layers_s(2 * below, is_training)
        share = tokens / below - 1
        return first + (last - first) * share + read_s

    def _layers_s(self, tokens: float, is_training: bool) -> float:
        key = tokens, is_training
        if key not in self._known:
            schedules = [LayerSchedule()]
            if self.cluster.num_nodes > 1 and self.cluster.local_ranks > 1:
                schedules.append(LayerSchedule(hierarchical=True))
            # Training computes a layer, computes it again for the backward pass, and goes back with
            # twice the products; gradients travel as rows do.
            layers = {1: 2, 2: 1} if is_training else {1: 1}  # passes by their products
            seconds = sum(
                passes
                * min(
                    predict_layer(self.cluster, self._layer(tokens, products), one).layer_s
                    for one in schedules
                )
                for products, passes in layers.items()
            )
            self._known[key] = self.model.num_layers * seconds
        return self._known[key]

    def _layer(self, tokens: float, products: int) -> LayerWorkload:
        """One layer of a step, with so many products by each matrix; its gate is the dense part."""
        model, cluster, num_ranks = self.model, self.cluster, self.cluster.num_ranks
        choices = tokens * num_ranks * model.top_k
        rows_S = (self._probability_E / self._copies_E)[self._experts_S] * choices
        rows_P = np.bincount(self._rank_S, weights=rows_S, minlength=num_ranks)
        # rows of an expert are all on one copy or spread over them: each copy sees its share
        touched_S = -np.expm1(-rows_S)
        touched_P = np.bincount(self._rank_S, weights=touched_S, minlength=num_ranks)
        weights_s = (
            touched_P
            * self._slot_bytes
            * (
                self.resident_share / cluster.memory_bytes_per_s
                + (1 - self.resident_share) / cluster.disk_bytes_per_s
            )
        )
        flops = 2 * model.dense_parameters / model.num_layers * tokens
        dense_s = max(
            flops / cluster.flops_per_s,
            self.dense_bytes / model.num_layers / cluster.memory_bytes_per_s,
        )
        slowdown_P = np.ones(num_ranks)
        slowdown_P[0] = self._straggler
        return LayerWorkload(
            rows_PP=np.broadcast_to(rows_P / num_ranks, (num_ranks, num_ranks)),
            row_bytes=model.model_dim * model.bytes_per_activation,
            flops_per_row=products * 2 * model.expert_parameters,
            gate_s=products * dense_s,
            weights_s_P=products * weights_s,
            slowdown_P=slowdown_P,
        )


@dataclass(frozen=True, slots=True)
class Failures:
    """Seconds between two failures of one rank on average, and from a failure to the next step."""

    mean_s: float = math.inf
    restart_s: float = 0.0
    seed: int = 0


NEVER = Failures()


@dataclass(frozen=True, eq=False, slots=True)
class Arrivals:
    """``[N]`` seconds, prompt tokens and new tokens of requests, in order of time."""

    at_s: np.ndarray
    prompt: np.ndarray
    new: np.ndarray

    def faster(self, factor: float) -> "Arrivals":
        return Arrivals(self.at_s / factor, self.prompt, self.new)

    @property
    def rate(self) -> float:
        """Requests a second; infinite where all come at once."""
        seconds = float(self.at_s[-1] - self.at_s[0])
        return (len(self.at_s) - 1) / seconds if seconds else math.inf


def read_arrivals(path: str | os.PathLike[str]) -> Arrivals:
    """Reads a CSV file of TIMESTAMP, ContextTokens, GeneratedTokens, as Azure publishes them."""
    names = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    rows = []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        try:
            columns = reader.fieldnames or ()
            for row in reader if set(names) <= set(columns) else ():
                at = datetime.fromisoformat(row[names[0]][:26])
                # a time zone of this machine may have hours that come twice
                at_s = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
                prompt, new = (max(1, int(row[name])) for name in names[1:])
                if max(prompt, new) > MOST_TOKENS:
                    raise ValueError
                rows.append((at_s, prompt, new))
        except csv.Error as error:
            raise ValueError(f"{path}, after line {reader.line_num}: {error}") from None
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"{path}, line {reader.line_num}: expected a time and two counts up to "
                f"{MOST_TOKENS}"
            ) from None
    if not set(names) <= set(columns):
        raise ValueError(f"{path}: expected the columns {', '.join(names)}")
    if len(rows) < 2:
        raise ValueError(f"{path}: holds fewer than two requests")
    at_s, prompt, new = np.array(sorted(rows)).T
    return Arrivals(at_s - at_s[0], prompt.astype(np.int64), new.astype(np.int64))


def poisson_arrivals(
    num_requests: int, rate: float, prompt: int, new: int, *, seed: int = 0
) -> Arrivals:
    """Requests of one size at random times."""
    random = np.random.default_rng(seed)
    at_s = np.cumsum(random.exponential(1 / rate, num_requests))
    return Arrivals(at_s, np.full(num_requests, prompt), np.full(num_requests, new))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ServePrediction:
    """``[N]`` seconds to the first token and between later ones of each request, NaN where there
    are none; of all ranks."""

    first_s: np.ndarray
    between_s: np.ndarray
    tokens_per_s: float
    num_failures: int = 0

    def met(self, first_s: float, between_s: float) -> float:
        """Share of requests within both limits."""
        return float(((self.first_s <= first_s) & ~(self.between_s > between_s)).mean())


@dataclass(slots=True)
class _Pool:
    """A group of ranks that takes steps together."""

    times: SimulatedSteps
    step_tokens: int
    failures: Failures
    num_failures: int = 0

    def run(self, arrivals: Arrivals, read: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``[N]`` times of first and of last tokens; ``read`` are prompt tokens that are computed.

        Prompts are read in order, up to ``step_tokens`` of a rank in a step, together with all
        running answers. After a failure, all of these begin again.
        """
        num_ranks = self.times.cluster.num_ranks
        sizes = arrivals.prompt + arrivals.new
        room = self.times.kv_tokens
        if sizes.max() > room / num_ranks:
            raise CapacityError(
                f"{num_ranks} ranks: each has room for keys and values of "
                f"{room // num_ranks:.0f} tokens, and a request has {sizes.max()}; give more "
                "ranks, or memory_bytes"
            )
        first_s, last_s = np.zeros(len(read)), np.zeros(len(read))
        random = np.random.default_rng(self.failures.seed)
        mean_s = self.failures.mean_s / num_ranks
        fails_s = random.exponential(mean_s) if math.isfinite(mean_s) else math.inf
        waiting: deque[int] = deque()
        running: list[tuple[int, int]] = []  # the step that ends it, request
        begun: dict[int, int] = {}  # tokens read of prompts under way
        now, step, context, held, coming = 0.0, 0, 0.0, 0.0, 0
        order = np.argsort(arrivals.at_s, kind="stable")
        restarts = 0  # since a request ended
        while coming < len(order) or waiting or running:
            if not (waiting or running):
                now = max(now, float(arrivals.at_s[order[coming]]))
                now, fails_s = self._idle_until(now, fails_s, mean_s, random)
            while coming < len(order) and arrivals.at_s[order[coming]] <= now:
                waiting.append(int(order[coming]))
                coming += 1
            budget = self.step_tokens * num_ranks
            ended, tokens = [], len(running)
            while waiting and budget > 0:
                request = waiting[0]
                if request not in begun:
                    if held + sizes[request] > room:
                        break
                    held += sizes[request]
                    begun[request] = 0
                taken = min(budget, int(read[request]) - begun[request])
                begun[request] += taken
                budget -= taken
                tokens += max(taken, 1)
                if begun[request] < read[request]:
                    break
                ended.append(waiting.popleft())
            step += 1
            took_s = self.times.step_s(tokens / num_ranks, context / num_ranks)
            if now + took_s > fails_s:
                now = fails_s + self.failures.restart_s
                fails_s = now + random.exponential(mean_s)
                self.num_failures += 1
                restarts += 1
                if restarts > MOST_RESTARTS:
                    raise CapacityError(
                        f"{num_ranks} ranks: no request ended between {MOST_RESTARTS} failures, "
                        f"one in {mean_s:.3g} s; give fewer ranks, or rarer failures"
                    )
                again = sorted({*ended, *(one for _, one in running)})
                waiting.extendleft(reversed(again))
                running.clear()
                begun.clear()
                context, held = 0.0, 0.0
                continue
            now += took_s
            context += len(running)
            while running and running[0][0] <= step:
                _, request = heapq.heappop(running)
                restarts = 0
                last_s[request] = now
                context -= sizes[request]
                held -= sizes[request]
            for request in ended:
                del begun[request]
                first_s[request] = last_s[request] = now
                if arrivals.new[request] > 1:
                    heapq.heappush(running, (step + int(arrivals.new[request]) - 1, request))
                    context += int(arrivals.prompt[request]) + 1
                else:
                    held -= sizes[request]
                    restarts = 0
        return first_s, last_s

    def _idle_until(
        self, now: float, fails_s: float, mean_s: float, random: np.random.Generator
    ) -> tuple[float, float]:
        """The time at which a request that arrives now begins, and the next failure.

        The request waits for a restart under way. Failures before the last hundred are ignored.
        """
        restart_s = self.failures.restart_s
        since_s = min(now - fails_s, 100 * (mean_s + restart_s))
        wait_s = 0.0
        while since_s > 0:  # since a failure
            self.num_failures += 1
            wait_s = max(0.0, restart_s - since_s)
            since_s -= restart_s + random.exponential(mean_s)
        return now + wait_s, now - since_s


def simulate_serving(
    cluster: Cluster,
    model: SimulatedModel,
    arrivals: Arrivals,
    *,
    step_tokens: int = 256,
    prefill_ranks: int = 0,
    imbalance: Imbalance = EVEN,
    failures: Failures = NEVER,
    place: Callable[..., Placement] = place_experts,
    times: Callable[..., SimulatedSteps] = SimulatedSteps,
) -> ServePrediction:
    """Simulates a service step by step.

    Args:
        step_tokens: prompt tokens of a rank in a step.
        prefill_ranks: ranks that read prompts alone and send their keys and values to the others,
            which generate (Splitwise, DistServe); 0 for none. Each of both groups has all experts.
    """

    def pool(num_ranks: int, num_tokens: int) -> _Pool:
        group = replace(cluster, num_ranks=num_ranks)
        return _Pool(times(group, model, imbalance, place=place), num_tokens, failures)

    if not prefill_ranks:
        whole = pool(cluster.num_ranks, step_tokens)
        first_s, last_s = whole.run(arrivals, arrivals.prompt)
        num_failures = whole.num_failures
    else:
        if not prefill_ranks < cluster.num_ranks:
            raise ValueError(f"{prefill_ranks} of {cluster.num_ranks} ranks leave none to generate")
        readers = pool(prefill_ranks, step_tokens)
        one = np.ones_like(arrivals.new)
        first_s, _ = readers.run(replace(arrivals, new=one), arrivals.prompt)
        # A request's keys and values travel over the link of one rank.
        link = cluster.inter if cluster.num_nodes > 1 else cluster.intra
        sent_s = link.seconds(1, arrivals.prompt * model.kv_bytes_per_token)
        makers = pool(cluster.num_ranks - prefill_ranks, step_tokens)
        nothing = np.zeros_like(arrivals.prompt)
        rest = Arrivals(first_s + sent_s, arrivals.prompt, np.maximum(arrivals.new - 1, 1))
        _, last_s = makers.run(rest, nothing)
        last_s = np.where(arrivals.new > 1, last_s, first_s)
        num_failures = readers.num_failures + makers.num_failures
    return ServePrediction(
        first_s=first_s - arrivals.at_s,
        between_s=np.where(
            arrivals.new > 1, (last_s - first_s) / np.maximum(arrivals.new - 1, 1), np.nan
        ),
        tokens_per_s=float(arrivals.new.sum() / (last_s.max() - arrivals.at_s[0])),
        num_failures=num_failures,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainLayout:
    """How ranks divide a model in training.

    Attributes:
        stages: of the pipeline, each with as many layers and ranks.
        expert_ranks: that divide the experts of a stage's layers. A stage's other ranks have copies
            of these experts.
        tokens: of a micro-batch on each rank of a stage.
        micro_batches: of a step in each pipeline.
    """

    stages: int = 1
    expert_ranks: int
    tokens: int
    micro_batches: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainPrediction:
    """Seconds of a step by its parts, and the throughput that failures leave.

    Attributes:
        held_micro_batches: most micro-batches whose activations a stage holds at once.
    """

    layout: TrainLayout
    layers_s: float
    reduce_s: float
    optimizer_s: float
    tokens_per_s: float
    checkpoint_s: float
    checkpoint_every_s: float
    useful_share: float
    held_micro_batches: int = 1

    @property
    def step_s(self) -> float:
        return self.layers_s + self.reduce_s + self.optimizer_s


def simulate_training(
    cluster: Cluster,
    model: SimulatedModel,
    *,
    layout: TrainLayout,
    checkpoint_every_s: float | None = None,
    imbalance: Imbalance = EVEN,
    failures: Failures = NEVER,
    place: Callable[..., Placement] = place_experts,
    times: Callable[..., SimulatedSteps] = SimulatedSteps,
) -> TrainPrediction:
    """Predicts a training step, and the share of time that failures leave.

    A pipeline has one forward and one backward pass in turn (1F1B). Layers keep their inputs and
    compute the rest again. With ``host_bytes_per_s``, inputs that wait are offloaded (PipeOffload).

    Args:
        checkpoint_every_s: None for the interval that loses least.
    """
    num_ranks, stages = cluster.num_ranks, layout.stages
    of_stage = replace(
        model,
        num_layers=model.num_layers // stages,
        dense_parameters=model.dense_parameters / stages,
    )
    ranks = num_ranks // stages  # of a stage
    copies = ranks // layout.expert_ranks
    group = replace(cluster, num_ranks=layout.expert_ranks)
    steps = times(group, of_stage, imbalance, place=place)
    slowest = cluster.inter if cluster.num_nodes > 1 else cluster.intra
    forward_s = steps.step_s(layout.tokens)
    micro_batch_s = steps.step_s(layout.tokens, is_training=True)
    inputs = layout.tokens * model.model_dim * model.bytes_per_activation  # of a layer, bytes
    if stages > 1:
        handed_s = float(slowest.seconds(1, inputs))
        forward_s += handed_s
        micro_batch_s += 2 * handed_s
    layers_s = (layout.micro_batches + stages - 1) * micro_batch_s
    # Each rank updates a part of what it shares with others (ZeRO's first stage).
    dense, experts = of_stage.dense_parameters, steps.expert_bytes / model.bytes_per_weight
    held = dense / ranks + experts / copies
    kept = model.bytes_per_weight + model.bytes_per_activation
    transfer_s = math.inf
    if cluster.host_bytes_per_s is not None:
        transfer_s = of_stage.num_layers * inputs / cluster.host_bytes_per_s
    held_micro_batches = most_held(
        stages,
        layout.micro_batches,
        forward_s=forward_s,
        backward_s=micro_batch_s - forward_s,
        transfer_s=transfer_s,
    )
    # the first micro-batch is in the working share
    waiting = held_micro_batches - 1
    room = cluster.memory_bytes * (1 - WORKING_SHARE)
    room -= waiting * of_stage.num_layers * inputs
    # Where weights and gradients of the dense part have no room, ranks have parts of these too.
    is_whole = OPTIMIZER_BYTES * held + kept * (dense + experts) <= room
    needed = OPTIMIZER_BYTES * held + kept * (dense / ranks + experts)
    if not is_whole and needed > room:
        raise CapacityError(
            f"{num_ranks} ranks: each needs {needed / 2**30:.1f} GiB for weights, gradients and "
            f"optimizer, and has {room / 2**30:.1f}; give more ranks"
        )
    # A reduce-scatter and an all-gather over the slowest link; of parts, two all-gathers.
    reduce_s = 0.0
    for rounds, parameters, sharing in ((2 if is_whole else 3, dense, ranks), (2, experts, copies)):
        if sharing > 1:
            sent = rounds * parameters * model.bytes_per_activation * (sharing - 1) / sharing
            reduce_s += float(slowest.seconds(rounds * (sharing - 1), sent))
    per_parameter = 2 * (OPTIMIZER_BYTES + model.bytes_per_weight)
    optimizer_s = held * per_parameter / cluster.memory_bytes_per_s
    state = model.parameters * (OPTIMIZER_BYTES + model.bytes_per_weight) / num_ranks
    checkpoint_s = (
        state / cluster.disk_bytes_per_s if math.isfinite(cluster.disk_bytes_per_s) else 0.0
    )
    mean_s = failures.mean_s / num_ranks
    every_s = checkpoint_every_s or best_interval_s(checkpoint_s, mean_s)
    share = useful_share(every_s, checkpoint_s, failures.restart_s, mean_s)
    step_s = layers_s + reduce_s + optimizer_s
    return TrainPrediction(
        layout=layout,
        layers_s=layers_s,
        reduce_s=reduce_s,
        optimizer_s=optimizer_s,
        tokens_per_s=share * layout.tokens * layout.micro_batches * ranks / step_s,
        checkpoint_s=checkpoint_s,
        checkpoint_every_s=every_s,
        useful_share=share,
        held_micro_batches=held_micro_batches,
    )


def search_layouts(
    cluster: Cluster, model: SimulatedModel, *, tokens: int, micro_batches: int = 1, **options: Any
) -> list[TrainPrediction]:
    """Predicts every layout that fits, fastest first: a search over measured links and sizes, as in
    Galvatron (Miao et al. 2022) and Pipette (Yim et al. 2024).

    Args:
        tokens: of a step on each rank, divided by ``micro_batches``; a step has as many in every
            layout.
        options: of `simulate_training`.

    Raises:
        CapacityError: no layout fits.
    """
    num_ranks, found, fault = cluster.num_ranks, list[TrainPrediction](), None
    options["times"] = functools.cache(SimulatedSteps)  # experts are placed once for all sizes
    for stages in _divisors(math.gcd(num_ranks, model.num_layers)):
        ranks = num_ranks // stages
        for expert_ranks in _divisors(ranks):
            across = expert_ranks % cluster.local_ranks and cluster.local_ranks % expert_ranks
            if across or expert_ranks > model.num_experts:
                continue
            for power in range(-4, 3):
                size = tokens * 2.0**power
                number = tokens * micro_batches * stages / size
                if size != int(size) or number != int(number):
                    continue
                layout = TrainLayout(
                    stages=stages, expert_ranks=expert_ranks, tokens=int(size),
                    micro_batches=int(number),
                )  # fmt: skip
                try:
                    found.append(simulate_training(cluster, model, layout=layout, **options))
                except CapacityError as error:
                    fault = error
    if not found:
        raise CapacityError(f"{num_ranks} ranks: no layout fits; the last one: {fault}")
    return sorted(found, key=lambda one: -one.tokens_per_s)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def best_interval_s(checkpoint_s: float, mean_s: float) -> float:
    """Young's interval between checkpoints: their cost equals the loss by failures."""
    return math.sqrt(2 * max(checkpoint_s, 1.0) * mean_s) if math.isfinite(mean_s) else math.inf


def useful_share(every_s: float, checkpoint_s: float, restart_s: float, mean_s: float) -> float:
    """Share of time that is work, exactly, where failures come independently of each other (Daly).

    Work of ``every_s`` and a checkpoint are done in one piece, or begin again after a restart.
    """
    if not math.isfinite(mean_s):
        return 1.0 if not math.isfinite(every_s) else every_s / (every_s + checkpoint_s)
    piece = (every_s + checkpoint_s) / mean_s
    if piece > 700:
        return 0.0
    return every_s / ((mean_s + restart_s) * math.expm1(piece))
