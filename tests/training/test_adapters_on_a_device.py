"""`finetune --lora` on a device: the bits of the CPU, budgets of both memories, interruptions."""

import contextlib
import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import CROSSINGS, NAME
from computing_devices import DeviceMemory, ForeignDevice, computing_on
from finetuning_runs import (
    GPT_OSS,
    MIXTRAL,
    STEPS,
    checkpoint_of,
    config_of,
    smallest,
    train,
    with_run,
    write_text,
)
from frozen_bases import bases
from safetensors.torch import load_file

from moe_runtime.cli.main import main
from moe_runtime.errors import CapacityError, MoERuntimeError
from moe_runtime.training.finetune import checkpoint_model, finetune_run
from moe_runtime.training.finetune.finetune_run import FinetunePreparation, finish, prepare, start
from moe_runtime.training.finetune.settings import FinetuneConfig
from moe_runtime.training.loop import Trainer

PLAIN = {"mixtral": MIXTRAL, "gpt_oss": GPT_OSS}


def folder_of(kind: str, folder: Path) -> Path:
    """Plain experts in fp32 or bf16, or quantised or coded ones."""
    if kind in PLAIN:
        return checkpoint_of(PLAIN[kind], folder / "first")
    return bases(kind, folder)[0]


def alike(config: FinetuneConfig) -> FinetunePreparation:
    """A run whose products are the same on the CPU and on the emulated device: torch's, of values.

    Dense layers of a quantised checkpoint have products from codes on a CPU alone.
    """
    preparation = prepare(config)
    preparation.experts.packed_dense.clear()
    preparation.model.set_attn_implementation("eager")
    sites = [dataclasses.replace(site, impl="torch") for site in preparation.sites]
    return dataclasses.replace(preparation, sites=sites)


def run(
    config: FinetuneConfig, *, resume: bool = False, stop_after: int = STEPS
) -> tuple[list[float], Trainer, FinetunePreparation]:
    preparation = alike(config)
    trainer = start(preparation, resume=resume)
    losses = train(trainer, stop_after=stop_after)
    trainer.optimizer.check()  # type: ignore[union-attr]
    return losses, trainer, preparation


def result_of(summary: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What a run leaves behind: a model with its adapters merged, or adapters."""
    if summary.get("adapters") is not None:
        return load_file(Path(summary["adapters"]) / "adapter_model.safetensors")
    return load_file(Path(summary["model"]) / "model.safetensors")


def smallest_on_device(config: FinetuneConfig) -> FinetuneConfig:
    """The same run with the smallest budget of the device too, which a refused one names."""
    with pytest.raises(CapacityError, match="a device_memory of 1 MiB is too small") as refusal:
        prepare(with_run(config, device_memory="1MiB"))
    return with_run(config, device_memory=str(refusal.value.smallest_bytes))


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        # each is one of the others' types of weights or ways that a family lays them out
        pytest.param("mixtral", "float32", marks=pytest.mark.long),
        pytest.param("gpt_oss", "float32", marks=pytest.mark.long),
        pytest.param("mixtral", "bfloat16", marks=pytest.mark.long),
        pytest.param("gpt_oss-mxfp4", "float32", marks=pytest.mark.long),
        pytest.param("qwen3_moe-gptq", "float32", marks=pytest.mark.long),
        ("planes", "bfloat16"),
    ],
)
@torch.backends.mkldnn.flags(enabled=False)  # its products in bf16 depend on how operands lie
def test_same_bits_as_on_the_cpu(tmp_path, kind, precision):
    """The smallest budgets and everything resident, each stopped in between."""
    folder = folder_of(kind, tmp_path)
    found, waits = {}, {}
    for name in ("cpu", "large", "small"):
        (tmp_path / name).mkdir()
        config = config_of(folder, tmp_path / name, lora={"rank": 2}, run={"steps": 2})
        config = with_run(config, precision=precision)
        with computing_on(NAME) as place:
            if name != "cpu":
                config = with_run(config, device=str(place))
            if name == "small":
                config = smallest_on_device(smallest(config))
            losses = []
            if name != "cpu":
                losses, trainer, _ = run(config, stop_after=1)
                trainer.close()
            later, trainer, preparation = run(config, resume=name != "cpu")
            waits[name] = CROSSINGS.num_waits
            stats = trainer.optimizer.stats()  # type: ignore[union-attr]
            summary = finish(preparation, trainer, export=True)
            trainer.close()
        found[name] = losses + later, result_of(summary), stats
    wanted_losses, wanted, on_cpu = found.pop("cpu")
    assert on_cpu.link.to_device_bytes == 0
    for name, (losses, tensors, stats) in found.items():
        assert losses == wanted_losses, name
        assert tensors.keys() == wanted.keys()
        assert all(torch.equal(tensors[n], wanted[n]) for n in wanted), name
        assert stats.link.to_device_bytes > 0
    assert waits["small"] == waits["large"]  # the host waits for the device, not for copies
    assert found["large"][2].link.to_device_bytes < found["small"][2].link.to_device_bytes
    assert found["large"][2].traffic.read_bytes < found["small"][2].traffic.read_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss-mxfp4", "planes"])
def test_a_gpu_trains_what_the_cpu_does(tmp_path, kind):
    """Sums have another order there, and losses are of about 6; nothing is left locked or open."""
    folder, found = folder_of(kind, tmp_path), []
    for device in ("cpu", "cuda"):
        (tmp_path / device).mkdir()
        config = config_of(folder, tmp_path / device, lora={"rank": 2})
        losses, trainer, preparation = run(with_run(config, device=device))
        finish(preparation, trainer, export=True)
        trainer.close()
        found.append(losses)
    assert found[1] == pytest.approx(found[0], abs=1e-3)


def a_run(tmp_path: Path, place: torch.device) -> tuple[Trainer, FinetuneConfig]:
    folder = folder_of("mixtral", tmp_path)
    config = config_of(folder, tmp_path, lora={"rank": 2})
    config = smallest_on_device(smallest(with_run(config, device=str(place))))
    return start(alike(config), resume=False), config


def take_step(trainer: Trainer) -> list[float]:
    """The losses of one step, of the same windows every time."""
    trainer._run.batches.seek((0,))
    losses = trainer._backward(1e-2)
    return [float(part.cross_entropy) for part in losses]


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "while it runs"])
def test_a_copy_that_fails_leaves_no_gradient(tmp_path, is_late):
    """Whichever copy of a step it is, the last one too, that products are queued behind."""
    device = ForeignDevice()
    with computing_on(NAME, device) as place:
        trainer, _ = a_run(tmp_path, place)
        optimizer, copy = trainer.optimizer, device.copy
        calls, fails_at = [0], [-1]

        def failing(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] == fails_at[0]:
                (device.late_faults if is_late else device.faults).append(RuntimeError("no link"))
            return copy(*args)

        device.copy = failing  # type: ignore[method-assign]
        wanted = take_step(trainer)
        assert optimizer.dense.gradients()  # type: ignore[union-attr]
        optimizer.dense.forget()  # type: ignore[union-attr]
        num_copies = calls[0]
        for number in {*range(1 + is_late, num_copies, 23), num_copies}:
            calls[0], fails_at[0] = 0, number
            with contextlib.suppress(MoERuntimeError):
                assert take_step(trainer) == wanted  # nobody had asked for that expert yet
                optimizer.dense.forget()  # type: ignore[union-attr]
            assert not optimizer.dense.gradients()  # type: ignore[union-attr]
            optimizer.check()  # type: ignore[union-attr]
        broken = device.late_faults if is_late else device.faults
        broken += [RuntimeError("no link")] * 1000
        fails_at[0] = -1
        with pytest.raises(MoERuntimeError, match="RuntimeError: no link"):
            take_step(trainer)
        assert not optimizer.dense.gradients()  # type: ignore[union-attr]
        optimizer.check()  # type: ignore[union-attr]
        while optimizer._stores[0]._link.under_way:  # type: ignore[union-attr]
            time.sleep(1e-4)  # copies that were read ahead, and will fail
        broken.clear()
        assert take_step(trainer) == wanted
        trainer.close()


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("mixtral", "gpt_oss-mxfp4")),
        "planes",
    ],
)
def test_the_budget_of_the_device_holds(tmp_path, kind, monkeypatch):
    """By what tensors take there, without what is set aside for libraries; and it is not idle."""
    for module in (checkpoint_model, finetune_run):
        monkeypatch.setattr(module, "SPARE_BYTES", 0)
    folder = folder_of(kind, tmp_path)
    precision = "bfloat16" if kind == "planes" else "float32"
    config = config_of(folder, tmp_path, lora={"rank": 2}, run={"steps": 2})
    config = with_run(config, precision=precision)
    device = ForeignDevice()
    with computing_on(NAME, device) as place:
        config = with_run(smallest(config), device=str(place), checkpoint_every=1)
        with pytest.raises(CapacityError, match="a device_memory of 1 KiB") as refusal:
            prepare(with_run(config, device_memory="1KiB"))
        smallest_bytes = refusal.value.smallest_bytes
        assert smallest_bytes is not None
        memory = DeviceMemory()
        CROSSINGS.on_memory = memory.made
        _, trainer, preparation = run(with_run(config, device_memory=str(smallest_bytes)))
        assert trainer.optimizer.stats().budget_bytes == int(config.run.host_memory or 0)  # type: ignore[union-attr]
        finish(preparation, trainer, export=True)
        trainer.close()
        assert 0.3 * smallest_bytes < memory.peak_bytes <= smallest_bytes
        host = preparation.memory.host  # type: ignore[union-attr]
        locked = sum(map(len, device.pinned))
        assert locked == host.num_slots * host.slot_bytes <= host.budget_bytes


def test_the_command_says_both_budgets_and_computes_there(tmp_path, monkeypatch, capsys):
    folder = folder_of("mixtral", tmp_path)
    words = ["finetune", str(folder), str(write_text(tmp_path)), "-o", str(tmp_path / "out")]
    words += ["--context", "16", "--sequences", "2", "--steps", "1", "--host-memory", "1GiB"]
    words += ["--device", "cuda", "--device-memory", "2GiB", "--lora", "2"]
    device = ForeignDevice()
    with computing_on(NAME, device) as place:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(finetune_run, "find_device", lambda *_: place)
        assert main([*words, "--dry-run"]) == 0
        rows = capsys.readouterr().out
        assert re.search(r"host memory\s.*1 GiB, .* of it for experts", rows)
        assert re.search(r"device memory\s.*2 GiB, .* of it for everything but experts", rows)
        assert main([*words, "--dry-run", "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)["offload"]
        assert (plan["host_budget_bytes"], plan["device_budget_bytes"]) == (2**30, 2**31)
        assert device.compute_s == 0.0 == device.now_s
        assert main([*words, "--json"]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert summary["complete"]
        assert summary["offload"]["to_device_bytes"] > 0
        assert main([*words[:-2], "--zeroth-order"]) == 2
        assert "--zeroth-order computes on the CPU so far" in capsys.readouterr().err
