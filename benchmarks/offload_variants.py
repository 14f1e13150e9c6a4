"""Options of offloaded training that change numbers: bytes of a parameter, and what they cost.

`python benchmarks/offload_variants.py --save` trains a small language model on text of a random
Markov chain, once in full and once with each option, from the same weights on the same batches, and
compares the held-out loss and where the experts' parameters went: the distance between the two,
relative to the way that full training took. Bytes are those of a record of an expert of OLMoE's
shape, counted by its layout.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from harness.machine import commit, describe_machine, machine_name, versions
from torch import Tensor

from moe_runtime import AdamW, offload_training
from moe_runtime.files import write_text
from moe_runtime.models.lm.config import ExpertsConfig, LanguageModelConfig
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.training.offload.optimizers.adamw import bytes_of_step
from moe_runtime.training.offload.states.records import ExpertTensor, RecordLayout

RESULTS = Path(__file__).parent / "results"
VOCAB, CONTEXT, SEQUENCES = 64, 32, 16
HIDDEN, INTERMEDIATE, EXPERTS, LAYERS = 64, 96, 8, 2
RATE = 3e-3
OLMOE = (
    ExpertTensor("gate_up_proj", (2 * 1024, 2048), True),
    ExpertTensor("down_proj", (2048, 1024), True),
)
OLMOE_RANK = 128
FULL = AdamW(lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
VARIANTS = {
    "full": FULL,
    "bf16 moments": replace(FULL, moments="bf16"),
    "fp8 moments": replace(FULL, moments="fp8"),
    "GaLore": replace(FULL, galore_rank=8, galore_refresh=50),
    "GaLore, fp8 moments": replace(FULL, galore_rank=8, galore_refresh=50, moments="fp8"),
    "delayed update": replace(FULL, delayed_update_after=10),
    "sparse skip": replace(FULL, untouched="sparse_skip"),
}


def build() -> LanguageModel:
    torch.manual_seed(0)
    experts = ExpertsConfig(num_experts=EXPERTS, top_k=2, intermediate_size=INTERMEDIATE)
    return LanguageModel(
        LanguageModelConfig(
            hidden_size=HIDDEN,
            num_layers=LAYERS,
            num_heads=2,
            num_kv_heads=2,
            head_dim=HIDDEN // 2,
            max_positions=CONTEXT,
            vocab_size=VOCAB,
            moe=experts,
        )
    )


def text(seed: int) -> Tensor:
    """Tokens `[B, C + 1]` of a chain in which each token has a few likely successors."""
    chances = (
        torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)).mul(2).softmax(1)
    )
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(VOCAB, (SEQUENCES,), generator=generator)]
    for _ in range(CONTEXT):
        tokens.append(torch.multinomial(chances[tokens[-1]], 1, generator=generator)[:, 0])
    return torch.stack(tokens, 1)


def loss_of(model: LanguageModel, ids: Tensor) -> Tensor:
    losses = model.losses(ids[:, :-1], ids[:, 1:])
    return losses.cross_entropy + losses.auxiliary


def train(settings: AdamW, steps: int, folder: Path) -> tuple[float, list[Tensor], float]:
    """Held-out loss, the experts' parameters, and seconds."""
    model = build().train()
    training = offload_training(
        model, host_memory="1GiB", storage_dir=folder, optimizer=settings, activation_memory="64MiB"
    )
    started = time.perf_counter()
    for step in range(steps):
        ids = text(1000 + step)
        training.backward([lambda ids=ids: loss_of(model, ids)])
        training.step()
    seconds = time.perf_counter() - started
    with torch.no_grad():
        held_out = [model.losses(x[:, :-1], x[:, 1:]).cross_entropy for x in map(text, range(8))]
    experts = [t for layer in range(LAYERS) for t in training.stacked(layer).values()]
    training.close()
    return float(torch.stack(held_out).mean()), experts, seconds


def bytes_of(settings: AdamW) -> dict[str, float]:
    """Of one parameter of an expert of OLMoE's shape: in its tier, and moved in a step."""
    rank = OLMOE_RANK if settings.galore_rank else 0
    layout = RecordLayout(OLMOE, torch.float32, replace(settings, galore_rank=rank).state_format)
    read, written = bytes_of_step(layout, settings)
    return {
        "state_bytes": layout.state_bytes / layout.num_elements,
        "read_bytes": read / layout.num_elements,
        "written_bytes": written / layout.num_elements,
    }


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    pairs = zip(found, wanted, strict=True)
    return float(sum((a - b).double().square().sum() for a, b in pairs)) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--save", action="store_true", help="write the results file")
    arguments = parser.parse_args()
    # the model is so small that a second thread costs more than it saves
    torch.set_num_threads(1)
    first = [p.detach() for n, p in build().named_parameters() if ".experts." in n]
    rows: dict[str, dict[str, Any]] = {}
    full: tuple[float, list[Tensor]] = (0.0, [])
    for name, settings in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            loss, experts, seconds = train(settings, arguments.steps, Path(folder))
        if name == "full":
            full = loss, experts
        rows[name] = bytes_of(settings) | {
            "held_out_loss": loss,
            "loss_difference": loss - full[0],
            "distance": distance(experts, full[1]) / distance(first, full[1]),
            "seconds": seconds,
        }
        row = rows[name]
        print(
            f"{name:20} {row['state_bytes']:6.3f} bytes a parameter, held-out loss {loss:.4f} "
            f"({row['loss_difference']:+.4f}), distance {row['distance']:.4f}, {seconds:.1f} s",
            flush=True,
        )
    if arguments.save:
        machine = describe_machine()
        result = {
            "machine": machine,
            "versions": versions(),
            "commit": commit(Path(__file__).parent),
            "steps": arguments.steps,
            "settings": {name: asdict(settings) for name, settings in VARIANTS.items()},
            "rows": rows,
        }
        path = RESULTS / f"offload-variants-{machine_name(machine)}.json"
        write_text(path, json.dumps(result, indent=1) + "\n")
        print(f"written: {path.name}")


if __name__ == "__main__":
    main()
