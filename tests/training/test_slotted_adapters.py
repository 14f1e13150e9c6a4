"""Adapters beside experts that Triton kernels take from slots of a device, in the interpreter.

Against the run on the CPU, which computes expert by expert; and with the same bits whoever is in a
slot.
"""

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from emulated_models import EagerDevice
from finetuning_runs import GPT_OSS, MIXTRAL, SIZES, config_of, train, with_run
from text_checkpoint import tiny_tokenizer
from tiny_checkpoints import save, tiny_model
from torch import Tensor
from triton_interpreter import repair_interpreter

from moe_runtime.inference.device.device_stores import experts_on_device
from moe_runtime.training.finetune import stores as frozen_stores
from moe_runtime.training.finetune.finetuning import prepare, start
from moe_runtime.training.offload.execution.slotted import SlottedPasses
from moe_runtime.training.offload.memory import FrozenMemory

pytest.importorskip("triton")
FAMILIES = {"mixtral": MIXTRAL, "gpt_oss": GPT_OSS}


IS_GPU = torch.cuda.is_available()


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    if not IS_GPU:
        repair_interpreter()


def run(
    folder: Path,
    output: Path,
    *,
    share: float | None,
    precision: str,
    places: list[str],
    parts: int,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and trained tensors; with a share of the experts in slots, or on the CPU."""
    output.mkdir()
    config = config_of(folder, output, lora={"rank": 2, "places": places}, run={"steps": 2})
    config = with_run(config, precision=precision)
    if IS_GPU and share is not None:
        config = with_run(config, device="cuda")
    data = dataclasses.replace(config.data, context=4, tokens_per_step=8, micro_batches=parts)
    preparation = prepare(dataclasses.replace(config, data=data))
    impl = "torch" if share is None else "triton"
    sites = [dataclasses.replace(site, impl=impl) for site in preparation.sites]
    memory, experts = preparation.memory, preparation.experts
    assert isinstance(memory, FrozenMemory)
    if share is not None:
        num_slots, slot_bytes = len(experts.layouts), experts_on_device(experts).slot_bytes
        there = dataclasses.replace(
            memory.device or memory.host,
            num_slots=round(share * num_slots),
            slot_bytes=slot_bytes,
        )
        memory = FrozenMemory(host=memory.host, device=there)
    preparation = dataclasses.replace(preparation, sites=sites, memory=memory)
    ways, takes = set[bool](), SlottedPasses.takes

    def noted(*args: Any) -> bool:
        way = takes(*args)
        ways.add(way)
        return way

    with ExitStack() as patches:
        patches.enter_context(patch.object(SlottedPasses, "takes", noted))
        if not IS_GPU:
            device = EagerDevice()
            patches.enter_context(patch.object(frozen_stores, "open_device", lambda _: device))
        trainer = start(preparation, resume=False)
        losses = train(trainer, stop_after=2)
        trainer.optimizer.check()  # type: ignore[union-attr]
        trained = preparation.model.named_parameters()
        found = {name: p.detach().cpu().clone() for name, p in trained if p.requires_grad}
        trainer.close()
    assert ways == {share is not None}
    return losses, found


@pytest.mark.parametrize(
    ("family", "precision", "places", "parts"),
    [
        ("mixtral", "float32", ["experts"], 1),
        pytest.param("gpt_oss", "float32", ["attention", "experts"], 2, marks=pytest.mark.long),
        pytest.param("mixtral", "bfloat16", ["attention"], 2, marks=pytest.mark.long),
    ],
)
def test_as_on_the_cpu_and_the_same_bits_whoever_is_in_a_slot(
    tmp_path: Path, family: str, precision: str, places: list[str], parts: int
) -> None:
    """As many layers as micro-batches; what is nearly zero moves either way in half precision."""
    sizes = SIZES | {"num_hidden_layers": parts}
    model = tiny_model(dataclasses.replace(FAMILIES[family], config=sizes))
    is_half = precision == "bfloat16"
    save(model.bfloat16() if is_half else model, tmp_path / "first", sharded=False)
    tiny_tokenizer().save_pretrained(tmp_path / "first")
    as_given: dict[str, Any] = {"precision": precision, "places": places, "parts": parts}
    found = [
        run(tmp_path / "first", tmp_path / str(share), share=share, **as_given)
        for share in (None, 1.0, 0.4)
    ]
    (cpu_losses, on_cpu), (losses, trained), (partial_losses, partial) = found
    # attention's gradients have no order on a GPU
    assert losses == pytest.approx(partial_losses, abs=1e-4 if IS_GPU else 0.0)
    assert IS_GPU or all(torch.equal(trained[name], partial[name]) for name in trained)
    assert losses == pytest.approx(cpu_losses, abs=2e-2 if is_half else 1e-4)
    for name, wanted in on_cpu.items():
        assert is_half or (trained[name] - wanted).norm() <= 1e-3 * wanted.norm(), name
