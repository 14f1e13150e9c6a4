"""LoRA fine-tuning on a GPU with slots for a part of the experts, beside all of them resident.

One command: `python benchmarks/device_training.py --layers 4 --save`. Makes a checkpoint of whole
layers of Qwen3-30B-A3B with random weights and takes the same steps of `moe-runtime finetune
--lora` twice: with all experts on the GPU, and with a `device_memory` that holds as large a part of
them as 24 GB hold of the whole model's 60 GB. Measured are tokens a second in the median of the
steps but the first, bytes over the link and the time that they take alone, waits for experts, the
most memory that torch had on the GPU beside the budget, and the losses, which must agree.
`--device cpu --tiny` is a rehearsal without a GPU: there the host's memory takes the part.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from gpu_parts.device_rates import measure_rates, wait_for
from harness.arguments import positive
from harness.drawn_checkpoints import drawn_checkpoint, shape_of
from harness.machine import run_facts
from harness.profiled import profiled

from moe_runtime.bench.texts import language_reference
from moe_runtime.config import format_bytes
from moe_runtime.files import write_text
from moe_runtime.training.config_tree import build_tree
from moe_runtime.training.finetune.finetuning import prepare, start
from moe_runtime.training.finetune.settings import FinetuneConfig

ROOT = Path(__file__).resolve().parents[1]
SHAPE = "qwen3-30b-a3b"
SHARE = 0.4
"""Of the experts that have slots: 24 GB of 60 GB."""
AIM = 0.5
"""Of the speed with everything resident, at least."""
TOLERANCE = 1e-3
"""Between losses; sums of gradients have no fixed order on a GPU."""


def main() -> int:
    options, began_s = _arguments(), psutil.Process().create_time()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here; rehearse with --device cpu --tiny", file=sys.stderr)
        return 2
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    shape = shape_of(SHAPE, options.layers, is_tiny=options.tiny)
    rates = measure_rates(shape, options.device, 2**20 if options.tiny else 2**29)
    results: dict[str, Any] = {
        **run_facts(ROOT),
        "gpu": gpu,
        "shape": shape.describe(),
        "rates": rates._asdict(),
        "rank": options.rank,
        "tokens_per_step": options.tokens,
        "context": options.context,
        "rows": [],
    }
    path, profiles = options.out, list[str]()
    if options.save:
        name = re.sub(r"[^a-z0-9]+", "-", (gpu or "rehearsal").lower()).strip("-")
        path = ROOT / "benchmarks" / "results" / f"device-training-{shape.name}-{name}.json"
    with drawn_checkpoint(shape, options.device) as folder:
        print(f"checkpoint after {time.time() - began_s:.1f} s", flush=True)
        (folder.parent / "text.txt").write_text(language_reference())
        for share in (1.0, SHARE):
            row = measure(folder, share, options, profiles)
            gc.collect()
            if gpu is not None:
                torch.cuda.empty_cache()
            if rates.link_bytes_s is not None:
                row["link_s_a_step"] = row["copied_bytes_a_step"] / rates.link_bytes_s
            results["rows"].append(row)
            print(line(row), flush=True)
            results["aims"] = compared(results["rows"])
            # After each row: what was measured stays if the next one fails.
            if path is not None:
                write_text(path, json.dumps(results, indent=1) + "\n")
            if options.profile is not None:
                write_text(options.profile, "\n".join(profiles) + "\n")
    for aim in results["aims"]:
        print(f"{aim['what']}: {aim['measured']:.4g}, {'holds' if aim['holds'] else 'MISSED'}")
    print(f"done after {time.time() - began_s:.1f} s")
    return 0


def measure(
    folder: Path, share: float, options: argparse.Namespace, profiles: list[str]
) -> dict[str, Any]:
    """Steps of a run with slots for a share of the experts."""
    is_cuda = options.device == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    config = _config(folder, share, options)
    if share < 1:
        config = _with_share(config, share)
    preparation = prepare(config)
    memory: Any = preparation.memory
    plan = memory.device or memory.host
    trainer = start(preparation, resume=False)
    optimizer: Any = trainer.optimizer
    losses, ends_s, copied, stalls = list[float](), list[float](), list[int](), list[float]()

    def note(record: Any) -> None:
        wait_for(options.device)
        ends_s.append(time.perf_counter())
        losses.append(record.loss)
        stats = optimizer.stats()
        copied.append(stats.link.to_device_bytes)
        stalls.append(stats.traffic.stall_s)

    trainer.train(should_stop=lambda: False, on_record=note)
    seconds = [after - before for before, after in itertools.pairwise(ends_s)]
    row = {
        "share": share,
        "experts_with_slots": plan.num_slots,
        "losses": losses,
        "tokens_per_s": options.tokens / statistics.median(seconds),
        "seconds_of_steps": seconds,
        "copied_bytes_a_step": (copied[-1] - copied[0]) / len(seconds),
        "stall_s_a_step": (stalls[-1] - stalls[0]) / len(seconds),
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if is_cuda else None,
    }
    if options.profile is not None:
        title = f"a step, {share:.0%} resident"
        profiles.append(profiled(title, trainer._take_step, options.device))
    trainer.close()
    return row


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is aimed at beside what came out, once both rows are there."""
    if len(rows) < 2:
        return []
    resident, partial = rows
    speed = partial["tokens_per_s"] / resident["tokens_per_s"]
    pairs = zip(resident["losses"], partial["losses"], strict=True)
    difference = max(abs(one - other) for one, other in pairs)
    found = [
        {
            "what": f"speed beside resident, at least {AIM}",
            "measured": speed,
            "holds": speed >= AIM,
        },
        {
            "what": f"largest difference of losses, at most {TOLERANCE}",
            "measured": difference,
            "holds": difference <= TOLERANCE,
        },
    ]
    if partial["peak_bytes"] is not None:
        peak = partial["peak_bytes"] / partial["budget_bytes"]
        what = "peak on the GPU beside the budget, at most 1"
        found.append({"what": what, "measured": peak, "holds": peak <= 1})
    return found


def line(row: dict[str, Any]) -> str:
    """One row for the terminal."""
    text = (
        f"{row['share']:4.0%} ({row['experts_with_slots']} experts) {row['tokens_per_s']:,.0f} "
        f"tokens/s, {format_bytes(round(row['copied_bytes_a_step']))} copied a step"
    )
    if "link_s_a_step" in row:
        text += f" ({row['link_s_a_step']:.3f} s of the link)"
    text += f", waits {row['stall_s_a_step']:.3f} s, losses {row['losses'][0]:.4f}"
    text += f" to {row['losses'][-1]:.4f}"
    if row["peak_bytes"] is not None:
        text += (
            f", at most {format_bytes(row['peak_bytes'])} of {format_bytes(row['budget_bytes'])}"
        )
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--layers", type=positive, default=4, help="(default: %(default)s)")
    add("--tiny", action="store_true", help="a tiny shape, as a rehearsal")
    add("--steps", type=positive, default=3, help="timed steps (default: %(default)s)")
    add("--tokens", type=positive, default=2048, help="of a step (default: %(default)s)")
    add("--context", type=positive, default=512, help="of a sequence (default: %(default)s)")
    add("--rank", type=positive, default=8, help="of the adapters (default: %(default)s)")
    add("--profile", type=Path, metavar="FILE", help="write where the time of a step goes")
    add("--save", action="store_true", help="write benchmarks/results/device-training-SHAPE-GPU")
    add("--out", type=Path, help="write the results here as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
