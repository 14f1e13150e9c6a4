"""The case ``training``: optimizer steps of a language model here, in transformers and in peers.

All start from the same weights and tokens. The losses of the first, untimed steps are compared.
"""

import mmap
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_runtime.benchmarks import suite
from moe_runtime.benchmarks.cases.expert_layers import FEW, OURS, PeerSystem
from moe_runtime.benchmarks.suite.energy import EnergyMeter
from moe_runtime.benchmarks.suite.peers import PeerProgram
from moe_runtime.benchmarks.synthetic.model_shapes import LayerSizes
from moe_runtime.config import format_bytes
from moe_runtime.models.lm.config import ExpertsConfig, LanguageModelConfig
from moe_runtime.models.lm.export import export_hugging_face
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.training.offload import AdamW
from moe_runtime.training.offload.entry import offload_training
from moe_runtime.training.optimizer import Optimizer
from moe_runtime.training.run_config import OptimizerConfig

_BLOCK_BYTES = 4 << 20
_NUM_THREADS = 4


def seconds_alone(file: Path, read: int, written: int) -> float | None:
    """Time reads and writes of whole blocks in random order, four at a time."""
    kinds = [True] * (read // _BLOCK_BYTES) + [False] * (written // _BLOCK_BYTES)
    if not kinds or file.stat().st_size < _BLOCK_BYTES:
        return None
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_DIRECT)
    except OSError:
        return None
    random.Random(0).shuffle(kinds)
    num_blocks = file.stat().st_size // _BLOCK_BYTES
    # Anonymous maps start at a page, as direct I/O requires.
    buffers = [mmap.mmap(-1, _BLOCK_BYTES) for _ in range(_NUM_THREADS)]
    for buffer in buffers:
        buffer.write(bytes(_BLOCK_BYTES))

    def move(thread: int) -> None:
        for index in range(thread, len(kinds), _NUM_THREADS):
            one = os.preadv if kinds[index] else os.pwritev
            one(descriptor, [buffers[thread]], index % num_blocks * _BLOCK_BYTES)

    try:
        begin = time.perf_counter()
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            list(threads.map(move, range(_NUM_THREADS)))
        return time.perf_counter() - begin
    finally:
        os.close(descriptor)


METRIC = "step_s"
_CPU = torch.device("cpu")
_VOCABULARY = 4096
# weight, gradient and two moments in fp32
_STATE_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    sizes: LayerSizes
    layers: int
    sequences: int
    context: int
    dtype: torch.dtype
    host_memory: int | None = None
    device: torch.device = _CPU

    def config(self) -> LanguageModelConfig:
        """The model: attention heads of width 64, no auxiliary loss."""
        width, sizes = self.sizes.dim_model, self.sizes
        heads = max(1, width // 64)
        experts = {"num_experts": sizes.num_experts, "top_k": sizes.top_k, "loss_weights": {}}
        attention: dict[str, Any] = {
            "num_heads": heads,
            "num_kv_heads": heads,
            "head_dim": width // heads,
        }
        return LanguageModelConfig(
            hidden_size=width,
            num_layers=self.layers,
            max_positions=self.context,
            vocab_size=_VOCABULARY,
            moe=ExpertsConfig(intermediate_size=sizes.dim_hidden, **experts),
            **attention,
        )

    def windows(self, step: int) -> Tensor:
        """Tokens ``[B, C + 1]`` of a step, with word-like frequencies."""
        generator = torch.Generator().manual_seed(step)
        shares = 1 / torch.arange(1, _VOCABULARY + 1, dtype=torch.float64)
        size = self.sequences * (self.context + 1)
        drawn = torch.multinomial(shares, size, replacement=True, generator=generator)
        return drawn.view(self.sequences, -1)

    def found(self, seconds: float) -> Mapping[str, suite.Number]:
        return {METRIC: seconds, "tokens_per_s": self.sequences * self.context / seconds}

    def peers(self) -> list[str]:
        """The implementations of transformers that take part."""
        return ["grouped_mm", "eager"] if self.sizes.num_experts <= 2 * FEW else ["grouped_mm"]

    def needed_bytes(self, num_programs: int = 0) -> int:
        """Bytes of weights, gradients and moments of all systems in memory."""
        with torch.device("meta"):
            one, two = (
                sum(part.numel() for part in LanguageModel(config).parameters())
                for config in (replace(self.config(), num_layers=count) for count in (1, 2))
            )
        count = one + (self.layers - 1) * (two - one)
        num_systems = 1 + len(self.peers()) + 2 * num_programs
        return _STATE_BYTES * count * num_systems + (self.host_memory or 0)


OFFLOADED = f"{OURS}:offloaded"
OFFLOADED_METRICS = {
    "storage_read_bytes": suite.Metric("bytes"),
    "storage_written_bytes": suite.Metric("bytes"),
    **suite.facts("s", "stall_s", "storage_alone_s"),
}
"""For each step: bytes moved, seconds of waiting, and the time of the same transfers alone."""
# Largest difference of losses that rounding explains. Logits of a model at its start lie within
# about 3: rounded to bf16 at two places they are 1e-2 apart, after sums in another order in fp32
# less than 1e-4.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
_COMPARED_STEPS = 3
_RATE, _DECAY, _BETAS = 3e-4, 0.1, (0.9, 0.95)


class TrainingSystem(suite.BenchSystem):
    """A model under training, whose losses are compared."""

    def __init__(
        self,
        name: str,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: Any,
        plan: TrainingPlan,
        expected: list[float],
    ) -> None:
        super().__init__(name)
        self._plan, self._expected, self._steps = plan, expected, 0
        self._loss, self._optimizer = loss, optimizer
        self._energy = EnergyMeter()

    def step(self) -> float:
        """Take one optimizer step on the next tokens; return the loss before the update."""
        device, found = self._plan.device, list[Tensor]()
        windows = self._plan.windows(self._steps).to(device)
        half = self._plan.dtype == torch.bfloat16

        def loss() -> Tensor:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
                found.append(self._loss(windows[:, :-1], windows[:, 1:]))
            return found[0]

        self._optimizer.backward([loss], rate=_RATE)
        self._optimizer.step(_RATE)
        self._steps += 1
        return float(found[0].detach())

    def repeat(self) -> Mapping[str, suite.Number]:
        """Time a step; before the first, compare losses."""
        with suite.peer_failures():
            if not self.compared:
                losses = [self.step() for _ in self._expected]
                # Offloaded training must equal training in memory to the bit, unless a GPU updates
                # one of them and a CPU the other.
                is_ours = self.name in (OURS, OFFLOADED) and self._plan.device.type == "cpu"
                bound = 0.0 if is_ours else TOLERANCE[self._plan.dtype]
                require_equal(self, losses, self._expected, bound)
            with self._energy.measured() as joules:
                begin = time.perf_counter()
                self.step()  # ends with the loss on the host, so all updates are done
                if self._plan.device.type == "cuda":
                    torch.cuda.synchronize(self._plan.device)
                seconds = time.perf_counter() - begin
        return {**self._plan.found(seconds), **joules}


class OffloadedSystem(TrainingSystem):
    """This project's training with experts and their states offloaded beyond a budget."""

    def __init__(self, plan: TrainingPlan, folder: Path, expected: list[float]) -> None:
        assert plan.host_memory is not None
        model = _first_model(plan)
        self.training = offload_training(
            model,
            host_memory=plan.host_memory,
            storage_dir=folder,
            optimizer=AdamW(betas=_BETAS, weight_decay=_DECAY),
        )
        super().__init__(OFFLOADED, _loss_of(model), self.training, plan, expected)
        self._folder, self._before = folder, self.training.stats().traffic

    def step(self) -> float:
        self._before = self.training.stats().traffic
        return super().step()

    def repeat(self) -> Mapping[str, suite.Number]:
        """Time a step and count its transfers, then time the same transfers alone."""
        found, now = super().repeat(), self.training.stats().traffic
        read = now.read_bytes - self._before.read_bytes
        written = now.written_bytes - self._before.written_bytes
        scratch = self._folder / "as-large"
        if not scratch.exists() and read + written:
            shutil.copyfile(next(self._folder.glob("experts-*")), scratch)
        alone_s = seconds_alone(scratch, read, written)
        return {
            **found,
            "storage_read_bytes": read,
            "storage_written_bytes": written,
            "stall_s": now.stall_s - self._before.stall_s,
            **({} if alone_s is None else {"storage_alone_s": alone_s}),
        }


class TrainingPeer(PeerSystem):
    """A peer that trains the model in a folder."""

    def __init__(
        self, program: PeerProgram, plan: TrainingPlan, expected: list[float], running: ExitStack
    ) -> None:
        super().__init__(program, running, rate=_RATE, betas=_BETAS, decay=_DECAY)
        self._plan, self._expected, self._steps = plan, expected, 0
        self._energy = EnergyMeter()

    def repeat(self) -> Mapping[str, suite.Number]:
        if self.process is None:
            self.process = self.begin()
            self.process.ask("load")
            losses = [self._step()["loss"] for _ in self._expected]
            require_equal(self, losses, self._expected, TOLERANCE[self._plan.dtype])
        with self._energy.measured() as joules:
            seconds = self._step()["seconds"]
        return {**self._plan.found(seconds), **joules}

    def _step(self) -> dict[str, Any]:
        assert self.process is not None
        windows = self._plan.windows(self._steps).tolist()
        self._steps += 1
        return self.process.ask("train", windows=windows)


def require_equal(
    system: suite.BenchSystem, losses: list[float], expected: list[float], bound: float
) -> None:
    """Compare losses and count those that agree."""
    far = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
    system.compared, system.equal = len(far), sum(one <= bound for one in far)
    if system.equal < system.compared:
        step = next(number for number, one in enumerate(far) if not one <= bound)
        raise suite.PeerFailedError(
            f"a loss differs by {max(far):.2g}, expected at most {bound:g}, first in step "
            f"{step + 1}: {losses[step]!r} instead of {expected[step]!r}; its times would be those "
            "of another training"
        )


def ours_in_memory(plan: TrainingPlan, expected: list[float]) -> TrainingSystem:
    """This project's training with everything in memory."""
    model = _first_model(plan)
    config = OptimizerConfig(peak_rate=_RATE, betas=_BETAS, weight_decay=_DECAY, clip_norm=0.0)
    return TrainingSystem(OURS, _loss_of(model), Optimizer(model, config), plan, expected)


def in_transformers(
    name: str, plan: TrainingPlan, folder: Path, expected: list[float]
) -> TrainingSystem:
    """The model in a folder, trained with transformers."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation=name
    )
    model: Any = loaded.to(plan.device).train()

    def loss(ids: Tensor, targets: Tensor) -> Tensor:
        logits = model(ids, use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return TrainingSystem(name, loss, FusedAdamW(model), plan, expected)


class FusedAdamW:
    """torch's fused AdamW with the interface of `Optimizer`; matrices decay, norms do not."""

    def __init__(self, model: nn.Module) -> None:
        parts = {decay: list[nn.Parameter]() for decay in (_DECAY, 0.0)}
        for part in model.parameters():
            parts[_DECAY if part.ndim > 1 else 0.0].append(part)
        groups = [{"params": found, "weight_decay": decay} for decay, found in parts.items()]
        self._adamw = torch.optim.AdamW(groups, lr=_RATE, betas=_BETAS, fused=True)

    def backward(self, parts: list[Callable[[], Tensor]], *, rate: float) -> None:
        """Accumulate the gradients of the losses; the rate is in the parameter groups."""
        del rate
        for part in parts:
            part().backward()

    def step(self, rate: float) -> None:
        del rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)


@contextmanager
def _systems(
    plan: TrainingPlan, folder: Path, programs: Sequence[PeerProgram]
) -> Iterator[list[suite.BenchSystem]]:
    # The reference losses come from a run of ours that ends before the others begin.
    reference = ours_in_memory(plan, [])
    expected = [reference.step() for _ in range(_COMPARED_STEPS)]
    del reference
    systems: list[suite.BenchSystem] = [ours_in_memory(plan, expected)]
    offloaded, running = None, ExitStack()
    export_hugging_face(_first_model(plan), folder / "model")
    systems += [in_transformers(one, plan, folder / "model", expected) for one in plan.peers()]
    if plan.host_memory is not None:
        (folder / "experts").mkdir()
        offloaded = OffloadedSystem(plan, folder / "experts", expected)
        systems.append(offloaded)
    model_of = {"model": str(folder / "model")}
    systems += [
        TrainingPeer(replace(one, settings=one.settings | model_of), plan, expected, running)
        for one in programs
    ]
    try:
        with running:
            yield systems
    finally:
        if offloaded is not None:
            offloaded.training.close()


def _first_model(plan: TrainingPlan) -> LanguageModel:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return LanguageModel(plan.config()).to(plan.device).train()


def _loss_of(model: LanguageModel) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda ids, targets: model.losses(ids, targets).cross_entropy


def measure_training(
    plan: TrainingPlan,
    rules: suite.Rules,
    settings: Mapping[str, Any],
    free_bytes: int,
    programs: Sequence[PeerProgram] = (),
) -> dict[str, Any]:
    needed = plan.needed_bytes(len(programs))
    if needed > free_bytes:
        raise ValueError(
            f"weights and states of all systems take {format_bytes(needed)}, and "
            f"{format_bytes(free_bytes)} are free; fewer --layers or a smaller --shape take less"
        )
    metrics = {METRIC: suite.Metric("s"), **suite.facts("tokens/s", "tokens_per_s", better="more")}
    metrics |= OFFLOADED_METRICS | suite.JOULES
    with tempfile.TemporaryDirectory() as folder, _systems(plan, Path(folder), programs) as systems:
        return suite.measure_systems("training", systems, metrics, rules, settings)
