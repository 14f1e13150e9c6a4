"""LoRA with part of the experts: `python benchmarks/fine_tuning.py adapters|device [--save]`.

`adapters` trains LoRA on attention and experts of layers of OLMoE's shape on a CPU: with slots for
the share of the experts that 10 GiB hold of the whole model, with all in memory, and by PEFT.
Systems take steps in turn.

`device` trains LoRA on layers of Qwen3-30B-A3B on a GPU: with all experts there, and with as large
a part of them as 24 GB hold of the whole model's 60 GB. Bytes over the link, waits and peak memory
are measured too, and losses must agree. `--device cpu --tiny` is a rehearsal.
"""

import dataclasses
import importlib.util
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.functional import cross_entropy

from moe_runtime.benchmarks.harness import gpu
from moe_runtime.benchmarks.harness.gpu import drawn_checkpoint, shape_of
from moe_runtime.benchmarks.harness.scripting import ScriptResults, chosen, option, script
from moe_runtime.benchmarks.suite import BenchSystem, Metric, Rules, facts, run_in_turn
from moe_runtime.benchmarks.synthetic.texts import language_reference
from moe_runtime.errors import MoERuntimeError
from moe_runtime.training.config_tree import build_tree
from moe_runtime.training.finetune.finetune_run import prepare, start
from moe_runtime.training.finetune.settings import FinetuneConfig

RANK, RATE = 8, 1e-4
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
METRICS = {
    "tokens_per_s": Metric("tokens/s", "more"),
    **facts("s", "step_s"),
    **facts("nats", "loss"),
    **facts("count", "experts_with_slots", better="more"),
}
SHARE = 0.4
"""Share of the experts with slots on a GPU: 24 GB of 60 GB."""
AIM, TOLERANCE = 0.5, 1e-3
"""Minimum speed relative to all experts resident; between losses, whose gradients a GPU sums in no
fixed order."""
DEVICE_METRICS = METRICS | {
    "step_s": Metric("s"),
    **facts("bytes", "copied_bytes", *gpu.MEMORY),
    **facts("s", "link_s", "stall_s"),
}


@script(
    what=option(str, choices=("adapters", "device")),
    layers=option(2, "of the model"),
    steps=option(4, "timed steps of each"),
    context=option(256, "of a row"),
    rows=option(4, "of a step"),
    **gpu.REHEARSED,
)
def main(options: Namespace) -> int:
    if options.what == "device":
        return gpu.on_gpu(on_device)(options)
    options.device = "cpu"
    if importlib.util.find_spec("peft") is None:
        raise MoERuntimeError("adapters needs peft: pip install it")
    shape = shape_of("olmoe-1b-7b", options.layers, is_tiny=options.tiny)
    whole = shape_of("olmoe-1b-7b", 16, is_tiny=options.tiny)
    settings = {"shape": shape.describe(), "rank": RANK, "threads": torch.get_num_threads()}
    settings |= chosen(options, "layers", "context", "rows")
    file = f"fine-tuning-adapters-{shape.name}"
    results = ScriptResults("fine-tuning-adapters", options, settings, METRICS, file=file)
    rules = Rules(judged=["tokens_per_s"], least=options.steps, most=options.steps)
    with drawn_checkpoint(shape, "cpu") as folder:
        (folder.parent / "text.txt").write_text(language_reference())
        share = min(1.0, 0.8 * 10 * 2**30 / whole.total_bytes)
        systems = [
            Ours("10 GiB", _config(folder, options, "10-GiB"), share),
            Ours("in memory", _config(folder, options, "in-memory"), 1.0),
            Peft("peft", folder, options),
        ]
        found, _ = run_in_turn(systems, rules)
        for name, measured in found.items():
            results.add(name, measured.failure or measured.repetitions)
    first, *others = found
    for name in others:
        ours, other = (results.value(one, "tokens_per_s") or 0.0 for one in (first, name))
        print(f"{first}: {ours / other:.2f} times the speed of {name}")
    return results.finish()


def on_device(options: Namespace) -> int:
    shape = shape_of("qwen3-30b-a3b", options.layers, is_tiny=options.tiny)
    rates = gpu.measure_rates(shape, options.device, 2**20 if options.tiny else 2**29)
    settings = {"model": shape.name, "layers": shape.num_layers, "shape": shape.describe()}
    settings |= {"rates": rates._asdict(), "tokens_per_step": options.context * options.rows}
    settings |= {"sequences": options.rows, "rank": RANK, "context": options.context}
    file = f"device-training-{shape.name}"
    results = gpu.GpuResults("device-training", file, options, settings, DEVICE_METRICS)
    with drawn_checkpoint(shape, options.device) as folder:
        (folder.parent / "text.txt").write_text(language_reference())
        for share in (1.0, SHARE):
            gpu.free_memory()
            results.add(f"{share:.0%} resident", steps_on_device(folder, share, options, rates))
    (resident, steps), (partial, others) = results.systems.items()
    speed, whole = (results.value(name, "tokens_per_s") or 0.0 for name in (partial, resident))
    results.aim(partial, "speed beside resident", AIM, speed / whole)
    pairs: Any = zip(steps, others, strict=True)
    difference = max(abs(one["loss"] - other["loss"]) for one, other in pairs)
    results.aim(partial, "largest difference of losses", TOLERANCE, difference, at_most=True)
    peak, budget = (results.value(partial, f"{what}_bytes") for what in ("peak", "budget"))
    if peak and budget:
        results.aim(partial, "peak beside the budget", 1.0, peak / budget, at_most=True)
    return results.finish()


def steps_on_device(
    folder: Path, share: float, options: Namespace, rates: gpu.Rates
) -> gpu.Repetitions:
    """Time the steps of a run with slots for a share of the experts, without the first."""
    config = _config(folder, options, f"run-{share}", steps=options.steps + 1)
    preparation = prepare(_with_share(config, share))
    memory: Any = preparation.memory
    trainer = start(preparation, resume=False)
    optimizer: Any = trainer.optimizer
    steps, before = gpu.Repetitions(), dict[str, float]()

    def note(record: Any) -> None:
        nonlocal before
        gpu.wait_for(options.device)
        stats, step = optimizer.stats(), {"loss": record.loss}
        now = {"step_s": time.perf_counter(), "copied_bytes": stats.link.to_device_bytes}
        now |= {"stall_s": stats.traffic.stall_s}
        if steps:
            step |= {name: total - before[name] for name, total in now.items()}
            step["tokens_per_s"] = options.context * options.rows / step["step_s"]
            if rates.link_bytes_s is not None:
                step["link_s"] = step["copied_bytes"] / rates.link_bytes_s
        steps.append(step)
        before = now

    trainer.train(should_stop=lambda: False, on_record=note)
    plan = memory.device or memory.host
    steps[0] |= {"experts_with_slots": plan.num_slots, **gpu.device_memory(memory.device)}
    trainer.close()
    return steps


class Ours(BenchSystem):
    """A run of `finetune --lora` with slots for a `share` of the experts."""

    def __init__(self, name: str, config: FinetuneConfig, share: float) -> None:
        super().__init__(name)
        self._run = prepare(_with_share(config, share))
        self._trainer = start(self._run, resume=False)
        self._tokens = config.data.tokens_per_step
        self.repeat()

    def repeat(self) -> Mapping[str, float]:
        records: list[Any] = []
        self._trainer.train(should_stop=lambda: True, on_record=records.append)
        step, memory = records[0], cast(Any, self._run.memory)
        return {
            "step_s": step.step_s, "loss": step.loss, "tokens_per_s": self._tokens / step.step_s,
            "experts_with_slots": memory.host.num_slots,
        }  # fmt: skip


class Peft(BenchSystem):
    """PEFT adapters with everything in memory; one forward and backward pass of all rows."""

    def __init__(self, name: str, folder: Path, options: Namespace) -> None:
        super().__init__(name)
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        lora = LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules=ATTENTION,
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )  # fmt: skip
        self._model: Any = get_peft_model(base, lora).train()
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self._adamw = torch.optim.AdamW(trained, lr=RATE, fused=True)
        self._shape, self._random = (options.rows, options.context), torch.Generator()
        self.repeat()

    def repeat(self) -> Mapping[str, float]:
        ids = torch.randint(5, 250, self._shape, generator=self._random)
        begin = time.perf_counter()
        logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        self._adamw.step()
        self._adamw.zero_grad()
        seconds = time.perf_counter() - begin
        return {
            "step_s": seconds, "loss": float(loss.detach()), "tokens_per_s": ids.numel() / seconds,
        }  # fmt: skip


def _config(folder: Path, options: Namespace, output: str, *, steps: int = 1000) -> FinetuneConfig:
    tree: dict[str, Any] = {
        "model": str(folder),
        "run": {
            "output": str(folder.parent / "runs" / output), "steps": steps,
            "precision": "bfloat16", "host_memory": "auto", "checkpoint_every": 0,
            "device": options.device,
        },
        "data": {
            "sources": {"text": {"files": [str(folder.parent / "text.txt")]}},
            "context": options.context,
            "tokens_per_step": options.context * options.rows,
            "held_out_share": 0.0,
        },
        "optimizer": {"peak_rate": RATE},
        "lora": {"rank": RANK},
    }  # fmt: skip
    return build_tree(FinetuneConfig, tree)


def _with_share(config: FinetuneConfig, share: float) -> FinetuneConfig:
    """The same run with a budget for a share of the experts."""
    if share == 1:
        return config
    preparation = prepare(config)
    memory: Any = preparation.memory
    plan = memory.device or memory.host
    num_slots = round(share * len(preparation.experts.layouts))
    budget = str(plan.dense_bytes + plan.reserve_bytes + num_slots * plan.slot_bytes)
    name = "host_memory" if memory.device is None else "device_memory"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **{name: budget}))


if __name__ == "__main__":
    sys.exit(main())
