"""Fine-tuning by LoRA: `python benchmarks/fine_tuning.py adapters|chats|packed|device [--save]`.

`adapters` trains LoRA on attention and experts of layers of OLMoE's shape on a CPU: with slots for
the share of the experts that 10 GiB hold of the whole model, with all in memory, and by PEFT.
Systems take steps in turn.

`chats` trains LoRA on attention with documents as long as chats: packed rows of `finetune`, and
padded batches of TRL. `packed` trains LoRA on layers of gpt-oss-20b in MXFP4: under a cap of 8 GiB,
page cache included, and with all experts in memory. Each repetition is a process.

`device` trains LoRA on layers of Qwen3-30B-A3B on a GPU: with all experts there, and with as large
a part of them as 24 GB hold of the whole model's 60 GB. Bytes over the link, waits and peak memory
are measured too, and losses must agree. `--device cpu --tiny` is a rehearsal.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from moe_runtime.benchmarks.harness import gpu
from moe_runtime.benchmarks.harness.gpu import drawn_checkpoint, shape_of
from moe_runtime.benchmarks.harness.scripting import ScriptResults, chosen, option, script
from moe_runtime.benchmarks.suite import (
    BenchSystem,
    Metric,
    PeerFailedError,
    Rules,
    facts,
    run_in_turn,
)
from moe_runtime.benchmarks.suite.memory_cap import forget, memory_cap
from moe_runtime.benchmarks.synthetic.model_shapes import TensorPlan, write_checkpoint
from moe_runtime.benchmarks.synthetic.texts import language_reference
from moe_runtime.errors import MoERuntimeError
from moe_runtime.training.config_tree import build_tree
from moe_runtime.training.finetune.finetune_run import prepare, start
from moe_runtime.training.finetune.settings import FinetuneConfig

RANK, RATE, DOCUMENTS = 8, 1e-4, 96
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
METRICS = {
    "tokens_per_s": Metric("tokens/s", "more"),
    **facts("s", "step_s"),
    **facts("nats", "loss"),
    **facts("count", "experts_with_slots", better="more"),
}
PACKED_METRICS = METRICS | facts("bytes", "peak_rss_bytes", "read_bytes")
CAP_BYTES, BUDGET = 8 * 2**30, "7GiB"
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
    what=option(str, choices=("adapters", "chats", "packed", "device")),
    layers=option(2, "of the model"),
    steps=option(4, "timed steps of each"),
    context=option(256, "of a row"),
    rows=option(4, "of a step"),
    tiny=gpu.REHEARSED["tiny"],
    device=option(None, "of `device`, a GPU if omitted", choices=("cuda", "cpu")),
)
def main(options: Namespace) -> int:
    if options.what == "device":
        options.device = options.device or "cuda"
        return gpu.on_gpu(on_device)(options)
    if options.device is not None:
        raise MoERuntimeError(f"{options.what} runs on a CPU: --device is for `device`")
    options.device = "cpu"
    needed = ("peft", *(("trl", "datasets") if options.what == "chats" else ()))
    if lacking := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise MoERuntimeError(f"{options.what} needs {' and '.join(lacking)}: pip install them")
    if options.what == "packed":
        return packed(options)
    shape = shape_of("olmoe-1b-7b", options.layers, is_tiny=options.tiny)
    whole = shape_of("olmoe-1b-7b", 16, is_tiny=options.tiny)
    settings = {"shape": shape.describe(), "rank": RANK, "threads": torch.get_num_threads()}
    settings |= chosen(options, "layers", "context", "rows")
    kind = f"fine-tuning-{options.what}"
    results = ScriptResults(kind, options, settings, METRICS, file=f"{kind}-{shape.name}")
    rules = Rules(judged=["tokens_per_s"], least=options.steps, most=options.steps)
    with drawn_checkpoint(shape, "cpu") as folder:
        systems: list[BenchSystem]
        if options.what == "adapters":
            (folder.parent / "text.txt").write_text(language_reference())
            share = min(1.0, 0.8 * 10 * 2**30 / whole.total_bytes)
            systems = [
                Ours("10 GiB", _config(folder, options, "10-GiB"), share),
                Ours("in memory", _config(folder, options, "in-memory"), 1.0),
                Peft("peft", folder, options),
            ]
        else:
            write_documents(folder.parent / "chats.jsonl", options)
            config = _config(folder, options, "packed", data="chats.jsonl", places=["attention"])
            systems = [Ours("packed", config, 1.0), Trl("trl, padded", folder, options)]
        found, _ = run_in_turn(systems, rules)
        for name, measured in found.items():
            results.add(name, measured.failure or measured.repetitions)
    first, *others = found
    for name in others:
        ours, other = (results.value(one, "tokens_per_s") or 0.0 for one in (first, name))
        print(f"{first}: {ours / other:.2f} times the speed of {name}")
    return results.finish()


def packed(options: Namespace) -> int:
    shape = shape_of("gpt-oss-20b", options.layers, is_tiny=options.tiny)
    settings = {"shape": shape.describe(), "rank": RANK, "threads": torch.get_num_threads()}
    settings |= chosen(options, "layers", "context", "rows", "steps")
    settings |= {"cap_bytes": CAP_BYTES, "budget": BUDGET}
    kind = "fine-tuning-packed"
    file = f"{kind}-{shape.name}"
    results = ScriptResults(kind, options, settings, PACKED_METRICS, file=file)
    with tempfile.TemporaryDirectory(prefix="moe-benchmark-") as name:
        folder = Path(name)
        write_checkpoint(shape, folder / "model", make=any_codes)
        (folder / "text.txt").write_text(language_reference())
        systems = [
            Process("under 8 GiB", folder, options, BUDGET, CAP_BYTES, "--recompute"),
            Process("in memory", folder, options, "0.9", None),
        ]
        rules = Rules(judged=["tokens_per_s"], least=3, most=3)
        found, _ = run_in_turn(systems, rules)
    for name, measured in found.items():
        results.add(name, measured.failure or measured.repetitions)
    ours, other = (results.value(one, "tokens_per_s") or 0.0 for one in found)
    print(f"under the cap: {ours / max(other, 1e-9):.2f} times the speed of all in memory")
    return results.finish()


def any_codes(plan: TensorPlan, seed: int) -> list[Any]:
    """Random codes with one scale, written as fast as the disk permits."""
    del seed
    random = np.random.default_rng(len(plan.name))
    if plan.stored == "mxfp4":
        codes, scales = plan.parts
        bits = random.bytes(codes.num_bytes)
        # values up to 6 times 2^-8, about 0.02
        return [np.frombuffer(bits, np.uint8), np.full(scales.shape, 127 - 8, np.uint8)]
    values = torch.ones(plan.shape)
    if plan.std is not None:
        values = torch.from_numpy(random.standard_normal(plan.shape, dtype=np.float32)) * plan.std
    return [values.bfloat16().view(torch.uint16).numpy()]


class Process(BenchSystem):
    """The steps of `moe-runtime finetune --lora`; the first is not timed."""

    def __init__(
        self, name: str, folder: Path, options: Namespace, budget: str, cap: int | None, *more: str
    ) -> None:
        super().__init__(name)
        self._folder, self._cap, self._number = folder, cap, 0
        self._tokens = options.context * options.rows
        program = str(Path(sys.executable).with_name("moe-runtime"))
        self._words = [
            *(program, "finetune", str(folder / "model"), str(folder / "text.txt")),
            *("--lora", str(RANK), "--rate", str(RATE), "--precision", "bfloat16"),
            *("--context", str(options.context), "--sequences", str(options.rows)),
            *("--steps", str(options.steps + 1), "--checkpoint-every", "0"),
            *("--held-out-share", "0", "--host-memory", budget, "--json", *more),
        ]

    def repeat(self) -> Mapping[str, float]:
        self._number += 1
        output = self._folder / f"{self.name.replace(' ', '-')}-{self._number}"
        words = [*self._words, "-o", str(output)]
        forget((self._folder / "model").iterdir())
        capped = contextlib.nullcontext() if self._cap is None else memory_cap(self._cap)
        with capped as cap:
            done = subprocess.run(
                words if cap is None else cap.wrap(words), capture_output=True, text=True,
                env={**os.environ, "PYTHONSAFEPATH": "1"},
            )  # fmt: skip
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            raise PeerFailedError(lines[-1] if lines else f"ended with {done.returncode}")
        lines = (output / "metrics.jsonl").read_text().splitlines()
        records = [one for one in map(json.loads, lines) if "step_s" in one][1:]
        seconds = sum(one["step_s"] for one in records) / len(records)
        report = json.loads(done.stdout)["offload"]
        return {
            "step_s": seconds, "loss": records[-1]["loss"], "tokens_per_s": self._tokens / seconds,
            "experts_with_slots": report["experts_in_memory"],
            "peak_rss_bytes": report["peak_rss_bytes"], "read_bytes": report["read_bytes"],
        }  # fmt: skip


def write_documents(path: Path, options: Namespace) -> None:
    """Token ids with the log-normal lengths of chats, up to a row."""
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(np.log(options.context / 5), 0.8, DOCUMENTS)).astype(int)
    with path.open("w") as file:
        for length in lengths.clip(8, options.context + 1):
            ids = random.integers(5, 250, length).tolist()
            file.write(json.dumps({"input_ids": ids}) + "\n")


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
        self.repeat()

    def repeat(self) -> Mapping[str, float]:
        records: list[Any] = []
        before = self._run.batches.taken
        self._trainer.train(should_stop=lambda: True, on_record=records.append)
        step, memory = records[0], cast(Any, self._run.memory)
        tokens = trained_tokens(self._run, before)
        return {
            "step_s": step.step_s, "loss": step.loss, "tokens_per_s": tokens / step.step_s,
            "experts_with_slots": memory.host.num_slots,
        }  # fmt: skip


def trained_tokens(run: Any, before: tuple[int, ...]) -> int:
    """Tokens of the last step, without padding."""
    rows = run.config.data.sequences_per_step
    stream = run.batches._windows[0]
    windows = [stream.window(before[0] + number) for number in range(rows)]
    if windows[0].ndim == 1:
        return sum(len(window) - 1 for window in windows)
    return sum(int((window[:, 2] >= 0).sum()) for window in windows)


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


class Trl(BenchSystem):
    """TRL's SFTTrainer with padded batches; the first step of each run is not timed."""

    def __init__(self, name: str, folder: Path, options: Namespace) -> None:
        super().__init__(name)
        self._folder, self._options, self._number = folder, options, 0

    def repeat(self) -> Mapping[str, float]:
        from peft import LoraConfig
        from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

        trl: Any = importlib.import_module("trl")  # not a dependency of this project
        datasets: Any = importlib.import_module("datasets")
        lines = (self._folder.parent / "chats.jsonl").read_text().splitlines()
        examples = datasets.Dataset.from_list([json.loads(line) for line in lines])
        tokenizer: Any = AutoTokenizer.from_pretrained(self._folder)
        tokenizer.pad_token = tokenizer.eos_token
        times: list[tuple[float, float]] = []
        counts: list[float] = []

        class Clock(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                times.append((time.perf_counter(), 0.0))

            def on_step_end(self, *_: Any, **__: Any) -> None:
                times[-1] = (times[-1][0], time.perf_counter())

            def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                logs = given["logs"]
                counts.extend([logs["num_tokens"]] if "num_tokens" in logs else [])

        settings = trl.SFTConfig(
            output_dir=str(self._folder.parent / "trl"), max_steps=2, save_strategy="no",
            report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
            logging_steps=1, learning_rate=RATE, max_length=self._options.context + 1,
            per_device_train_batch_size=self._options.rows * 3, seed=self._number,
        )  # fmt: skip
        self._number += 1
        trainer = trl.SFTTrainer(
            AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.bfloat16),
            settings, train_dataset=examples, processing_class=tokenizer, callbacks=[Clock()],
            peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=ATTENTION),
        )  # fmt: skip
        trainer.train()
        begin, end = times[1]
        return {"step_s": end - begin, "tokens_per_s": (counts[1] - counts[0]) / (end - begin)}


def _config(
    folder: Path,
    options: Namespace,
    output: str,
    *,
    steps: int = 1000,
    data: str = "text.txt",
    **lora: Any,
) -> FinetuneConfig:
    tree: dict[str, Any] = {
        "model": str(folder),
        "run": {
            "output": str(folder.parent / "runs" / output), "steps": steps,
            "precision": "bfloat16", "host_memory": "auto", "checkpoint_every": 0,
            "device": options.device,
        },
        "data": {
            "sources": {"text": {"files": [str(folder.parent / data)]}},
            "context": options.context,
            "tokens_per_step": options.context * options.rows,
            "held_out_share": 0.0,
        },
        "optimizer": {"peak_rate": RATE},
        "lora": {"rank": RANK, **lora},
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
