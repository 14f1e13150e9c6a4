"""Training with experts on the disk beside the same training in memory.

`python benchmarks/offload_training.py` trains a language model of many experts in turn with
everything in memory and with a budget of a quarter of the experts' weights and fp32 states, and
compares tokens per second and losses (they must be equal). Activations are computed again in the
backward pass; beside that, training in memory keeps them. Shape `many` has over 2,000 tokens for
every expert in a step, so that computation is the limit. Shape `few` has eight, so that the disk
is; there the bound is the time that the same bytes take alone. Memory is measured in a process of
its own, by the kernel's highest resident size less what was resident before the model was built.

`--systems transformers,accelerate,deepspeed:cpu,deepspeed:nvme` trains the same first weights and
tokens in other systems, each in a process of its own; `--deepspeed-python` names the interpreter of
an environment that has DeepSpeed. These results are saved in a file of their own, as are those of
`--isa avx512` (or `avx2`), which holds products to the instructions of an older processor.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.arguments import positive
from harness.disk import mixed_seconds
from harness.machine import commit, describe_machine, machine_name, versions
from harness.older_isa import add_isa, hold_to
from torch import Tensor

from moe_runtime.config import format_bytes
from moe_runtime.files import write_text
from moe_runtime.inference.budget import peak_resident_bytes, resident_bytes
from moe_runtime.inference.libraries import set_up_libraries
from moe_runtime.models.lm.config import ExpertsConfig, LanguageModelConfig
from moe_runtime.models.lm.export import export_hugging_face
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.training.offload import AdamW, OffloadedTraining
from moe_runtime.training.offload.offloading import find_sites, offload_training
from moe_runtime.training.offload.states.initial import StreamedInit
from moe_runtime.training.optimizer import Optimizer
from moe_runtime.training.run_config import OptimizerConfig

RESULTS = Path(__file__).parent / "results"
RATE = 3e-4
STATE_BYTES = 12
"""Weight and two moments of a parameter, in fp32."""
IO_THREADS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and its batches.

    Attributes:
        hidden, intermediate, num_experts, top_k, num_layers, heads, vocab, context: sizes.
        sequences: of a step.
        activation_mib: set aside for activations; the peak shows whether it is enough.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_layers: int
    heads: int
    vocab: int
    context: int
    sequences: int
    activation_mib: int

    @property
    def expert_bytes(self) -> int:
        """Weights and states of all experts."""
        matrices = 3 * self.hidden * self.intermediate
        return STATE_BYTES * matrices * self.num_experts * self.num_layers

    def config(self, *, recompute: bool) -> LanguageModelConfig:
        return LanguageModelConfig(
            hidden_size=self.hidden,
            num_layers=self.num_layers,
            num_heads=self.heads,
            num_kv_heads=self.heads,
            head_dim=self.hidden // self.heads,
            max_positions=self.context,
            vocab_size=self.vocab,
            moe=ExpertsConfig(
                num_experts=self.num_experts,
                top_k=self.top_k,
                intermediate_size=self.intermediate,
                recompute=recompute,
                loss_weights={"load_balance": 0.01},
            ),
        )

    def model(self, *, recompute: bool) -> LanguageModel:
        return LanguageModel(self.config(recompute=recompute), recompute=recompute)

    @property
    def tokens_per_expert(self) -> float:
        return self.sequences * self.context * self.top_k / self.num_experts


SHAPES = {
    "many": Shape(128, 384, 32, 28, 7, 2, 256, 256, 9, 70),
    "few": Shape(256, 1024, 16, 4, 4, 4, 256, 32, 1, 40),
}


def windows(shape: Shape, step: int) -> Tensor:
    """Random tokens `[B, C + 1]`; the same for every system."""
    generator = torch.Generator().manual_seed(step)
    size = (shape.sequences, shape.context + 1)
    return torch.randint(shape.vocab, size, generator=generator)


class Runner:
    """Takes and times steps of one system."""

    def __init__(self, model: LanguageModel, optimizer: Optimizer | OffloadedTraining) -> None:
        self.model = model.train()
        self.optimizer = optimizer
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.first_cross_entropy = 0.0

    def step(self, ids: Tensor) -> None:
        found: list[Tensor] = []

        def part() -> Tensor:
            losses = self.model.losses(ids[:, :-1], ids[:, 1:])
            if not self.seconds:
                self.first_cross_entropy = float(losses.cross_entropy.detach())
            loss = losses.cross_entropy + losses.auxiliary
            found.append(loss.detach())
            return loss

        started = time.perf_counter()
        self.optimizer.backward([part], rate=RATE)
        self.optimizer.step(RATE)
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(float(found[0]))


def offloaded(shape: Shape, folder: Path) -> Runner:
    """The model with a budget of a quarter of its experts' weights and states."""
    torch.manual_seed(0)
    first = StreamedInit()
    with first:
        model = shape.model(recompute=True)
    training = offload_training(
        model,
        host_memory=shape.expert_bytes // 4,
        activation_memory=shape.activation_mib * 2**20,
        storage_dir=folder,
        optimizer=AdamW(betas=(0.9, 0.95), weight_decay=0.1),
        initial=partial(first.tensors_of, find_sites(model)),
        io_threads=IO_THREADS,
    )
    return Runner(model, training)


def in_memory(shape: Shape, *, recompute: bool) -> Runner:
    torch.manual_seed(0)
    model = shape.model(recompute=recompute)
    return Runner(model, Optimizer(model, OptimizerConfig(peak_rate=RATE, clip_norm=0.0)))


def compare(shape: Shape, steps: int, folder: Path) -> dict[str, Any]:
    """Steps in turn, the first not counted: offloaded, and in memory with and without recompute."""
    ours, resident = offloaded(shape, folder), in_memory(shape, recompute=True)
    keeping = in_memory(shape, recompute=False)
    training = ours.optimizer
    assert isinstance(training, OffloadedTraining)
    file, bounds = folder / "as-large", list[float]()
    shutil.copyfile(next(folder.glob("experts-*")), file)
    before = training.stats().traffic
    for step in range(steps + 1):
        if step == 1:
            before = training.stats().traffic
        ids, earlier = windows(shape, step), training.stats().traffic
        for runner in (resident, keeping, ours):
            runner.step(ids)
        moved = training.stats().traffic
        read = moved.read_bytes - earlier.read_bytes
        written = moved.written_bytes - earlier.written_bytes
        bounds.append(mixed_seconds(file, read, written, IO_THREADS))
    if not ours.losses == resident.losses == keeping.losses:
        raise SystemExit(
            f"the losses differ: {ours.losses}, {resident.losses} and {keeping.losses}"
        )
    after, stats = training.stats().traffic, training.stats()
    training.check()
    training.close()
    read = (after.read_bytes - before.read_bytes) // steps
    written = (after.written_bytes - before.written_bytes) // steps
    bound_s = statistics.median(bounds[1:])
    seconds = {
        "offloaded": statistics.median(ours.seconds[1:]),
        "in_memory": statistics.median(resident.seconds[1:]),
        "in_memory_keeping": statistics.median(keeping.seconds[1:]),
    }
    tokens = shape.sequences * shape.context
    return {
        "first_loss": ours.first_cross_entropy,
        "tokens_per_step": tokens,
        "tokens_per_expert": shape.tokens_per_expert,
        "tokens_per_s": {name: tokens / value for name, value in seconds.items()},
        "share_of_in_memory": seconds["in_memory"] / seconds["offloaded"],
        "share_of_in_memory_keeping": seconds["in_memory_keeping"] / seconds["offloaded"],
        "io_bound_s": bound_s,
        "share_of_io_bound": bound_s / seconds["offloaded"],
        "read_bytes_per_step": read,
        "written_bytes_per_step": written,
        "stall_share": (after.stall_s - before.stall_s) / sum(ours.seconds[1:]),
        "experts_in_memory": stats.resident_experts,
        "experts": stats.num_experts,
        "seconds": {
            "offloaded": ours.seconds[1:],
            "in_memory": resident.seconds[1:],
            "in_memory_keeping": keeping.seconds[1:],
            "io_bound": bounds[1:],
        },
    }


def measure_memory(shape: Shape, folder: Path) -> dict[str, int]:
    """Two steps in this process, and the memory that they took at most."""
    set_up_libraries(torch.float32)
    baseline = resident_bytes()
    runner = offloaded(shape, folder)
    for step in range(2):
        runner.step(windows(shape, step))
    runner.optimizer.close()
    return {
        "budget_bytes": shape.expert_bytes // 4,
        "peak_bytes": peak_resident_bytes() - baseline,
        "baseline_bytes": baseline,
    }


def beside(shape: Shape, system: str, steps: int, folder: Path, python: str) -> dict[str, Any]:
    """Steps of another system with the same first weights and tokens, in a process of its own."""
    torch.manual_seed(0)
    export_hugging_face(shape.model(recompute=False), folder / "model")
    ids = torch.stack([windows(shape, step) for step in range(steps + 1)])
    torch.save(ids, folder / "windows.pt")
    (folder / "storage").mkdir()
    peer = Path(__file__).parent / "harness" / "training_peer.py"
    command = [python, str(peer), system, *(str(folder / n) for n in ("model", "windows.pt"))]
    done = subprocess.run(
        [*command, str(folder / "storage")], capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"obstacle": f"ended with {done.returncode}: {last[:300]}"}
    found = json.loads(lines[-1])
    if "seconds" in found:
        tokens = shape.sequences * shape.context
        found["tokens_per_s"] = tokens / statistics.median(found["seconds"][1:])
    return found


def compare_systems(
    run: dict[str, Any], name: str, arguments: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """What the asked systems make of a shape; prints a line for each.

    Raises:
        SystemExit: a system's first loss is another than ours: it trains another model.
    """
    systems = {}
    for system in filter(None, arguments.systems.split(",")):
        python = arguments.deepspeed_python if system.startswith("deepspeed") else sys.executable
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            found = beside(SHAPES[name], system, arguments.steps, Path(folder), python)
        systems[system] = found
        if "obstacle" in found:
            print(f"{name}: {system}: {found['obstacle']}", flush=True)
            continue
        if abs(found["losses"][0] - run["first_loss"]) > 1e-4:
            raise SystemExit(f"{system} begins with {found['losses'][0]}, not {run['first_loss']}")
        print(
            f"{name}: {system}: {found['tokens_per_s']:,.0f} tokens/s, ours is "
            f"{run['tokens_per_s']['offloaded'] / found['tokens_per_s']:.2f} of it; at most "
            f"{format_bytes(found['peak_rss_bytes'])} resident",
            flush=True,
        )
    return systems


def main() -> None:
    arguments = _arguments()
    if arguments.isa:
        hold_to(arguments.isa)
    names = [arguments.shape] if arguments.shape else list(SHAPES)
    runs = {}
    for name in names:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            if arguments.memory_only:
                print(json.dumps(measure_memory(SHAPES[name], Path(folder))))
                return
            memory = _measured_memory(name, arguments.folder)
            print(_memory_line(name, memory), flush=True)
            run = compare(SHAPES[name], arguments.steps, Path(folder))
            print(_line(name, run), flush=True)
            runs[name] = {"shape": asdict(SHAPES[name]), **run, "memory": memory}
        runs[name]["systems"] = compare_systems(run, name, arguments)
    if arguments.save:
        machine = describe_machine()
        result = {
            "machine": machine,
            "versions": versions(),
            "commit": commit(Path(__file__).parent),
            "threads": torch.get_num_threads(),
            "runs": runs,
        }
        kind = "offload-training-systems" if arguments.systems else "offload-training"
        isa = f"{arguments.isa}-" if arguments.isa else ""
        path = RESULTS / f"{kind}-{isa}{machine_name(machine)}.json"
        write_text(path, json.dumps(result, indent=1) + "\n")
        print(f"written: {path.name}")


def _measured_memory(name: str, folder: Path | None) -> dict[str, int]:
    """Two steps in a process of their own."""
    command = [sys.executable, __file__, "--memory-only", "--shape", name]
    if folder is not None:
        command += ["--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _memory_line(name: str, memory: dict[str, int]) -> str:
    return (
        f"{name}: at most {format_bytes(memory['peak_bytes'])} over "
        f"{format_bytes(memory['baseline_bytes'])} before, budget "
        f"{format_bytes(memory['budget_bytes'])}; experts and states "
        f"{format_bytes(SHAPES[name].expert_bytes)}"
    )


def _line(name: str, run: dict[str, Any]) -> str:
    speed = run["tokens_per_s"]
    return (
        f"{name}: {run['tokens_per_expert']:,.0f} tokens an expert, "
        f"{speed['offloaded']:,.0f} tokens/s, "
        f"in memory {speed['in_memory']:,.0f} ({run['share_of_in_memory']:.2f} of it), "
        f"activations kept {speed['in_memory_keeping']:,.0f} "
        f"({run['share_of_in_memory_keeping']:.2f}); "
        f"{run['share_of_io_bound']:.2f} of the speed of the disk alone; "
        f"stall {run['stall_share']:.0%}, {format_bytes(run['read_bytes_per_step'])} read and "
        f"{format_bytes(run['written_bytes_per_step'])} written a step, "
        f"{run['experts_in_memory']} of {run['experts']} experts in memory"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, help="only this one")
    parser.add_argument("--steps", type=positive, default=5, help="timed steps of each system")
    parser.add_argument("--folder", type=Path, default=None, help="for the experts; a fast disk")
    parser.add_argument("--systems", default="", help="others to compare with, commas between")
    parser.add_argument(
        "--deepspeed-python", default=sys.executable, metavar="PYTHON", help="has DeepSpeed"
    )
    add_isa(parser)
    parser.add_argument("--save", action="store_true", help="write the results file")
    parser.add_argument("--memory-only", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
