"""Speed of training beside transformers: `python benchmarks/train.py`.

One training loop, that of `moe-runtime train`, over two models with the same weights and the same
batches: ours, and `Qwen3MoeForCausalLM` with its `grouped_mm` experts. They take turns step by
step, the first steps are not timed, medians count. The losses of both are compared, and a
difference beyond rounding ends the benchmark without a number: so both balance each layer alone,
as Switch Transformer does, where transformers' own loss balances the mean over all layers.
`--isa avx512` (or `avx2`) holds products to the instructions of an older processor, in a results
file of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness.arguments import positive
from harness.machine import commit, describe_machine, machine_name, versions
from harness.older_isa import add_isa, hold_to
from torch import Tensor, nn
from torch.nn import functional as F

from moe_runtime.files import write_text
from moe_runtime.kernels.expert_mlp.op import IMPLS
from moe_runtime.models.lm.config import ExpertsConfig, LanguageModelConfig
from moe_runtime.models.lm.export import export_hugging_face
from moe_runtime.models.lm.model import LanguageModel, Losses
from moe_runtime.training.optimizer import Optimizer
from moe_runtime.training.run_config import OptimizerConfig

RESULTS = Path(__file__).parent / "results"
BALANCE = 1e-3
PEERS = ("grouped_mm", "eager", "batched_mm")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Largest difference of the losses (which lie near 9) that rounding explains: sums in another order
# in fp32, products rounded to 2^-9 at other places in bf16.
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and a batch.

    Attributes:
        hidden, intermediate, num_experts, top_k, num_layers, heads, kv_heads, vocab: sizes.
        sequences, context: of a step.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_layers: int
    heads: int
    kv_heads: int
    vocab: int
    sequences: int
    context: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.context


SHAPES = {
    "pocket": Shape(256, 128, 16, 2, 6, 4, 2, 4096, 4, 512),
    "small": Shape(512, 256, 64, 8, 2, 8, 2, 8192, 4, 512),
    # The experts of `few` in offload_training.py: 32 tokens a step.
    "few": Shape(256, 1024, 16, 4, 4, 4, 4, 256, 1, 32),
    "300m": Shape(512, 512, 64, 4, 6, 8, 4, 8192, 4, 256),
    "qwen3-30b-layers": Shape(2048, 768, 128, 8, 2, 32, 4, 32768, 4, 2048),
}


class TransformersModel:
    """The same model out of transformers, trained as its users train it."""

    def __init__(self, model: Any, top_k: int) -> None:
        self.model: Any = model
        self._top_k = top_k

    def losses(self, ids_BC: Tensor, targets_BC: Tensor) -> Losses:
        """Cross-entropy of the float32 logits, and the balance loss over all layers."""
        outputs = self.model.model(ids_BC, output_router_logits=True, use_cache=False)
        logits = self.model.lm_head(outputs.last_hidden_state).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets_BC.reshape(-1))
        balance = torch.stack([self._balance(scores_TE) for scores_TE in outputs.router_logits])
        return Losses(loss, BALANCE * balance.mean())

    def _balance(self, scores_TE: Tensor) -> Tensor:
        """Switch Transformer's loss of one layer (Fedus et al., 2021, equation 4)."""
        share_TE = scores_TE.float().softmax(dim=-1)
        num_experts = share_TE.shape[1]
        chosen = share_TE.topk(self._top_k, dim=-1).indices.flatten()
        counts_E = torch.bincount(chosen, minlength=num_experts)
        return num_experts * (counts_E / len(chosen) * share_TE.mean(dim=0)).sum()


class Runner:
    """Takes and times the steps of one model."""

    def __init__(self, module: nn.Module, model: Any, device: torch.device, dtype: str) -> None:
        self._model = model
        self._optimizer = Optimizer(module.train(), OptimizerConfig(peak_rate=3e-4))
        self._device, self._dtype = device, DTYPES[dtype]
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, windows: Tensor) -> None:
        """One optimizer step on windows `[B, C + 1]`."""
        self._synchronise()
        started = time.perf_counter()
        is_half = self._dtype != torch.float32
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=is_half):
            losses = self._model.losses(windows[:, :-1], windows[:, 1:])
        self._optimizer.backward(
            [lambda loss=losses.cross_entropy + losses.auxiliary: loss], rate=1.0
        )
        self._optimizer.step(3e-4)
        self._synchronise()
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(losses.cross_entropy.item())

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def build(
    shape: Shape, device: torch.device, dtype: str, peers: Sequence[str], impl: str
) -> dict[str, Runner]:
    """Our model and each peer's, with the same weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = LanguageModelConfig(
        hidden_size=shape.hidden,
        num_layers=shape.num_layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_positions=shape.context,
        vocab_size=shape.vocab,
        moe=ExpertsConfig(
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            intermediate_size=shape.intermediate,
            impl=impl,
            loss_weights={"load_balance": BALANCE},
        ),
    )
    ours = LanguageModel(config).to(device)
    runners = {"ours": Runner(ours, ours, device, dtype)}
    with tempfile.TemporaryDirectory() as folder:
        export_hugging_face(ours, Path(folder))
        for name in peers:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, experts_implementation=name
            )
            model = loaded.to(device)
            runners[f"transformers {name}"] = Runner(
                model, TransformersModel(model, shape.top_k), device, dtype
            )
    return runners


def batches(shape: Shape, count: int, device: torch.device) -> list[Tensor]:
    """Windows of tokens that are as unevenly frequent as words are."""
    generator = torch.Generator().manual_seed(1)
    frequencies = 1 / torch.arange(1, shape.vocab + 1, dtype=torch.float64)
    size = shape.sequences * (shape.context + 1)
    return [
        torch.multinomial(frequencies, size, replacement=True, generator=generator)
        .view(shape.sequences, -1)
        .to(device)
        for _ in range(count)
    ]


def measure(arguments: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Trains all models in turn; the summary of one precision."""
    shape, device = SHAPES[arguments.shape], torch.device(arguments.device)
    runners = build(shape, device, dtype, arguments.peers, arguments.impl)
    for windows in batches(shape, arguments.warmup + arguments.steps, device):
        for runner in runners.values():
            runner.step(windows)
    ours = runners["ours"].losses
    difference = max(
        abs(mine - theirs)
        for runner in runners.values()
        for mine, theirs in zip(ours, runner.losses, strict=True)
    )
    if difference > TOLERANCE[dtype]:
        raise SystemExit(f"{dtype}: the losses differ by {difference:.2g}; nothing was compared")
    speeds: dict[str, float] = {}
    for name, runner in runners.items():
        timed = runner.seconds[arguments.warmup :]
        speeds[name] = shape.tokens / statistics.median(timed)
    return {
        "dtype": dtype,
        "tokens_per_s": speeds,
        "ratio": {name: speeds["ours"] / speed for name, speed in speeds.items() if name != "ours"},
        "seconds": {name: runner.seconds for name, runner in runners.items()},
        "largest_loss_difference": difference,
    }


def main() -> None:
    arguments = _arguments()
    if arguments.isa:
        hold_to(arguments.isa)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    for dtype in arguments.dtypes:
        run = measure(arguments, dtype)
        for name, speed in run["tokens_per_s"].items():
            ratio = run["ratio"].get(name)
            ours_over = "" if ratio is None else f"  ours is {ratio:.2f} times as fast"
            print(f"{arguments.shape} {dtype} {name:>24} {speed:10,.0f} tokens/s{ours_over}")
        if arguments.save:
            save(arguments, run)


def save(arguments: argparse.Namespace, run: dict[str, Any]) -> None:
    """Writes one precision into this machine's results file; other precisions in it stay."""
    machine = describe_machine()
    name = f"{arguments.shape}-{arguments.isa}" if arguments.isa else arguments.shape
    isa = f" --isa {arguments.isa}" if arguments.isa else ""
    peers = "" if arguments.peers == ["grouped_mm"] else f" --peers {' '.join(arguments.peers)}"
    path = RESULTS / f"train-{name}-{machine_name(machine)}.json"
    kept = json.loads(path.read_text())["runs"] if path.exists() else []
    runs = [other for other in kept if other["dtype"] != run["dtype"]]
    runs.append(run | {"commit": commit(Path(__file__).parent)})
    result = {
        "command": f"python benchmarks/train.py --shape {arguments.shape}{peers}{isa} --save",
        "machine": machine,
        "versions": versions(),
        "shape": {"name": arguments.shape, **asdict(SHAPES[arguments.shape])},
        "device": arguments.device,
        "threads": torch.get_num_threads(),
        "runs": sorted(runs, key=lambda run: list(DTYPES).index(run["dtype"])),
    }
    write_text(path, json.dumps(result, indent=1) + "\n")
    print(f"written: {path.name}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["grouped_mm"])
    parser.add_argument("--impl", choices=IMPLS, default="auto", help="what computes our experts")
    parser.add_argument("--steps", type=positive, default=5, help="timed steps of each model")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--threads", type=int, default=0, help="torch's threads; 0 leaves them")
    parser.add_argument("--device", default="cpu")
    add_isa(parser)
    parser.add_argument("--save", action="store_true", help="write the results file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
