"""LoRA fine-tuning on a GPU with slots for a part of the experts, beside all of them resident.

`python benchmarks/device_training.py --layers 4 --save` takes the same steps of `moe-runtime
finetune --lora` on layers of Qwen3-30B-A3B twice: with all experts on the GPU, and with as large a
part of them as 24 GB hold of the whole model's 60 GB. It measures tokens a second, bytes over the
link, waits, peak memory, and losses, which must agree. `--device cpu --tiny` is a rehearsal.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from moe_runtime.benchmarks.harness.gpu import (
    MEMORY,
    GpuResults,
    Rates,
    Repetitions,
    add_options,
    device_memory,
    drawn_checkpoint,
    lacks_gpu,
    measure_rates,
    profiled,
    shape_of,
    wait_for,
)
from moe_runtime.benchmarks.harness.scripting import parser_of, positive, run_script
from moe_runtime.benchmarks.suite.results import Metric
from moe_runtime.benchmarks.synthetic.texts import language_reference
from moe_runtime.config import format_bytes
from moe_runtime.files import write_text
from moe_runtime.training.config_tree import build_tree
from moe_runtime.training.finetune.finetuning import prepare, start
from moe_runtime.training.finetune.settings import FinetuneConfig

SHAPE = "qwen3-30b-a3b"
SHARE = 0.4
"""Of the experts that have slots: 24 GB of 60 GB."""
AIM = 0.5
"""Of the speed with everything resident, at least."""
TOLERANCE = 1e-3
"""Between losses; sums of gradients have no fixed order on a GPU."""


METRICS = {
    "tokens_per_s": Metric("tokens/s", "more"),
    "step_s": Metric("s"),
    "copied_bytes": Metric("bytes", is_judged=False),
    "link_s": Metric("s", is_judged=False),
    "stall_s": Metric("s", is_judged=False),
    "loss": Metric("nats", is_judged=False),
    "experts_with_slots": Metric("count", "more", is_judged=False),
    **{name: Metric("bytes", is_judged=False) for name in MEMORY},
}


def main() -> int:
    options, began_s = _arguments(), psutil.Process().create_time()
    if lacks_gpu(options):
        return 2
    shape = shape_of(SHAPE, options.layers, is_tiny=options.tiny)
    rates = measure_rates(shape, options.device, 2**20 if options.tiny else 2**29)
    settings = {
        "model": shape.name,
        "layers": shape.num_layers,
        "shape": shape.describe(),
        "rates": rates._asdict(),
        "rank": options.rank,
        "tokens_per_step": options.tokens,
        "sequences": options.tokens // options.context,
        "context": options.context,
    }
    file, profiles = f"device-training-{shape.name}", list[str]()
    results = GpuResults("device-training", file, options, settings, METRICS)
    with drawn_checkpoint(shape, options.device) as folder:
        print(f"checkpoint after {time.time() - began_s:.1f} s", flush=True)
        (folder.parent / "text.txt").write_text(language_reference())
        for share in (1.0, SHARE):
            name = f"{share:.0%} resident"
            results.add(name, measure(folder, share, options, rates, profiles))
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
            print(line(results, name), flush=True)
            if options.profile is not None:
                write_text(options.profile, "\n".join(profiles) + "\n")
    note_aims(results)
    results.finish()
    print(f"done after {time.time() - began_s:.1f} s")
    return 0


def measure(
    folder: Path, share: float, options: argparse.Namespace, rates: Rates, profiles: list[str]
) -> Repetitions:
    """Steps of a run with slots for a share of the experts; the first one is not timed."""
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    config = _config(folder, share, options)
    if share < 1:
        config = _with_share(config, share)
    preparation = prepare(config)
    memory: Any = preparation.memory
    plan = memory.device or memory.host
    trainer = start(preparation, resume=False)
    optimizer: Any = trainer.optimizer
    steps, before = Repetitions(), dict[str, float]()

    def note(record: Any) -> None:
        nonlocal before
        wait_for(options.device)
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
    steps[0] |= {"experts_with_slots": plan.num_slots, **device_memory(memory.device)}
    if options.profile is not None:
        title = f"a step, {share:.0%} resident"
        profiles.append(profiled(title, trainer._take_step, options.device))
    trainer.close()
    return steps


def note_aims(results: GpuResults) -> None:
    (resident, steps), (partial, others) = results.systems.items()
    speed, whole = (results.value(name, "tokens_per_s") or 0.0 for name in (partial, resident))
    results.aim(partial, "speed beside resident", AIM, speed / whole)
    pairs: Any = zip(steps, others, strict=True)
    difference = max(abs(one["loss"] - other["loss"]) for one, other in pairs)
    results.aim(partial, "largest difference of losses", TOLERANCE, difference, at_most=True)
    peak, budget = (results.value(partial, f"{what}_bytes") for what in ("peak", "budget"))
    if peak and budget:
        results.aim(partial, "peak beside the budget", 1.0, peak / budget, at_most=True)
    results.write()


def line(results: GpuResults, name: str) -> str:
    found = {metric: results.value(name, metric) or 0.0 for metric in METRICS}
    text = f"{name} ({found['experts_with_slots']:.0f} experts) {found['tokens_per_s']:,.0f} "
    text += f"tokens/s, {format_bytes(round(found['copied_bytes']))} copied a step"
    if found["link_s"]:
        text += f" ({found['link_s']:.3f} s of the link)"
    text += f", waits {found['stall_s']:.3f} s, loss {found['loss']:.4f}"
    if found["peak_bytes"]:
        peak, budget = (format_bytes(round(found[f"{what}_bytes"])) for what in ("peak", "budget"))
        text += f", at most {peak} of {budget}"
    return text


def _config(folder: Path, share: float, options: argparse.Namespace) -> FinetuneConfig:
    tree: dict[str, Any] = {
        "model": str(folder),
        "run": {
            "output": str(folder.parent / f"run-{share}"),
            # one is not counted, and the clock begins with its end
            "steps": options.steps + 1,
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
    """The same run with a budget for a share of the experts, where they are computed."""
    preparation = prepare(config)
    memory: Any = preparation.memory
    plan = memory.device or memory.host
    num_slots = round(share * len(preparation.experts.layouts))
    budget = str(plan.dense_bytes + plan.reserve_bytes + num_slots * plan.slot_bytes)
    name = "host_memory" if memory.device is None else "device_memory"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **{name: budget}))


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_options(parser, "device-training-SHAPE")
    add("--layers", type=positive, default=4, help="(default: %(default)s)")
    add("--steps", type=positive, default=3, help="timed steps (default: %(default)s)")
    add("--tokens", type=positive, default=2048, help="of a step (default: %(default)s)")
    add("--context", type=positive, default=512, help="of a sequence (default: %(default)s)")
    add("--rank", type=positive, default=8, help="of the adapters (default: %(default)s)")
    add("--profile", type=Path, metavar="FILE", help="write where the time of a step goes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run_script(main))
