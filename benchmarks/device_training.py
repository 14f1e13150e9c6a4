"""LoRA fine-tuning on a GPU with slots for some of the experts, compared with all resident.

`python benchmarks/device_training.py --layers 4 --save` takes the same steps of `moe-runtime
finetune --lora` on layers of Qwen3-30B-A3B twice: with all experts on the GPU, and with as large a
part of them as 24 GB hold of the whole model's 60 GB. It measures tokens a second, bytes over the
link, waits, peak memory, and losses, which must agree. `--device cpu --tiny` is a rehearsal.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks.harness import gpu
from moe_runtime.benchmarks.harness.scripting import positive, run_script
from moe_runtime.benchmarks.suite import Metric, facts
from moe_runtime.benchmarks.synthetic.texts import language_reference
from moe_runtime.training.config_tree import build_tree
from moe_runtime.training.finetune.finetune_run import prepare, start
from moe_runtime.training.finetune.settings import FinetuneConfig

SHARE = 0.4
"""Share of the experts with slots: 24 GB of 60 GB."""
AIM = 0.5
"""Minimum speed relative to all experts resident."""
TOLERANCE = 1e-3
"""Between losses; gradients on a GPU are summed in no fixed order."""
METRICS = {
    "tokens_per_s": Metric("tokens/s", "more"),
    "step_s": Metric("s"),
    **facts("bytes", "copied_bytes", *gpu.MEMORY),
    **facts("s", "link_s", "stall_s"),
    **facts("nats", "loss"),
    **facts("count", "experts_with_slots", better="more"),
}


def main() -> int:
    options = gpu.parse_options(__doc__, _add_options)
    if options is None:
        return 2
    shape = gpu.shape_of("qwen3-30b-a3b", options.layers, is_tiny=options.tiny)
    rates = gpu.measure_rates(shape, options.device, 2**20 if options.tiny else 2**29)
    settings = {
        "model": shape.name,
        "layers": shape.num_layers,
        "shape": shape.describe(),
        "rates": rates._asdict(),
        "tokens_per_step": options.tokens,
        "sequences": options.tokens // options.context,
        **{name: getattr(options, name) for name in ("rank", "context")},
    }
    file = f"device-training-{shape.name}"
    results = gpu.GpuResults("device-training", file, options, settings, METRICS)
    with gpu.drawn_checkpoint(shape, options.device) as folder:
        (folder.parent / "text.txt").write_text(language_reference())
        for share in (1.0, SHARE):
            gpu.free_memory()
            results.add(f"{share:.0%} resident", measure(folder, share, options, rates))
    note_aims(results)
    return results.finish()


def measure(
    folder: Path, share: float, options: argparse.Namespace, rates: gpu.Rates
) -> gpu.Repetitions:
    """Time the steps of a run with slots for a share of the experts, without the first."""
    config = _config(folder, share, options)
    preparation = prepare(config if share == 1 else _with_share(config, share))
    memory: Any = preparation.memory
    trainer = start(preparation, resume=False)
    optimizer: Any = trainer.optimizer
    steps, before = gpu.Repetitions(), dict[str, float]()

    def note(record: Any) -> None:
        nonlocal before
        gpu.wait_for(options.device)
        stats, step = optimizer.stats(), {"loss": record.loss}
        now = {
            "step_s": time.perf_counter(),
            "copied_bytes": stats.link.to_device_bytes,
            "stall_s": stats.traffic.stall_s,
        }
        if steps:
            step |= {name: total - before[name] for name, total in now.items()}
            step["tokens_per_s"] = options.tokens / step["step_s"]
            if rates.link_bytes_s is not None:
                step["link_s"] = step["copied_bytes"] / rates.link_bytes_s
        steps.append(step)
        before = now

    trainer.train(should_stop=lambda: False, on_record=note)
    plan = memory.device or memory.host
    steps[0] |= {"experts_with_slots": plan.num_slots, **gpu.device_memory(memory.device)}
    trainer.close()
    return steps


def note_aims(results: gpu.GpuResults) -> None:
    (resident, steps), (partial, others) = results.systems.items()
    speed, whole = (results.value(name, "tokens_per_s") or 0.0 for name in (partial, resident))
    results.aim(partial, "speed beside resident", AIM, speed / whole)
    pairs: Any = zip(steps, others, strict=True)
    difference = max(abs(one["loss"] - other["loss"]) for one, other in pairs)
    results.aim(partial, "largest difference of losses", TOLERANCE, difference, at_most=True)
    peak, budget = (results.value(partial, f"{what}_bytes") for what in ("peak", "budget"))
    if peak and budget:
        results.aim(partial, "peak beside the budget", 1.0, peak / budget, at_most=True)


def _config(folder: Path, share: float, options: argparse.Namespace) -> FinetuneConfig:
    tree: dict[str, Any] = {
        "model": str(folder),
        "run": {
            "output": str(folder.parent / f"run-{share}"),
            "steps": options.steps + 1,  # one step is not counted; the clock starts at its end
            "precision": "bfloat16",
            "device": options.device,
            "host_memory": "auto",
            "checkpoint_every": 0,
        },
        "data": {
            "sources": {"text": {"files": [str(folder.parent / "text.txt")]}},
            "context": options.context,
            "tokens_per_step": options.tokens,
            "held_out_share": 0.0,
        },
        "optimizer": {"peak_rate": 1e-4},
        "lora": {"rank": options.rank},
    }
    return build_tree(FinetuneConfig, tree)


def _with_share(config: FinetuneConfig, share: float) -> FinetuneConfig:
    """The same run with a budget for a share of the experts."""
    preparation = prepare(config)
    memory: Any = preparation.memory
    plan = memory.device or memory.host
    num_slots = round(share * len(preparation.experts.layouts))
    budget = str(plan.dense_bytes + plan.reserve_bytes + num_slots * plan.slot_bytes)
    name = "host_memory" if memory.device is None else "device_memory"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **{name: budget}))


def _add_options(parser: argparse.ArgumentParser) -> None:
    for name, number, words in (
        ("--layers", 4, "of the model"),
        ("--steps", 3, "timed steps"),
        ("--tokens", 2048, "of a step"),
        ("--context", 512, "of a sequence"),
        ("--rank", 8, "of the adapters"),
    ):
        text = f"{words} (default: %(default)s)"
        parser.add_argument(name, type=positive, default=number, help=text)


if __name__ == "__main__":
    sys.exit(run_script(main))
