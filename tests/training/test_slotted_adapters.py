"""Adapters beside experts that Triton kernels take from slots of a device, in the interpreter.

Against the run on the CPU, which computes expert by expert; and with the same bits whoever is in a
slot.
"""

import dataclasses
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from emulated_models import EagerDevice
from finetuning_runs import GPT_OSS, MIXTRAL, checkpoint_of, config_of, train
from torch import Tensor

from moe_runtime.inference.device.device_stores import experts_on_device
from moe_runtime.training.finetune import stores as frozen_stores
from moe_runtime.training.finetune.finetuning import prepare, start
from moe_runtime.training.offload.execution.slotted import SlottedPasses
from moe_runtime.training.offload.memory import FrozenMemory

pytest.importorskip("triton")
FAMILIES = {"mixtral": MIXTRAL, "gpt_oss": GPT_OSS}


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    from triton_interpreter import repair_interpreter

    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU here, which sees no emulated device")
    repair_interpreter()


def run(
    folder: Path, place: Path, *, share: float | None, places: tuple[str, ...], bf16: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and trained tensors; with a share of experts in slots, or on the CPU."""
    config = config_of(
        folder, place, lora={"rank": 2, "places": list(places)},
        run={"steps": 2, "precision": "bfloat16" if bf16 else "float32"},
    )  # fmt: skip
    preparation = prepare(config)
    impl = "torch" if share is None else "triton"
    sites = [dataclasses.replace(site, impl=impl) for site in preparation.sites]
    memory, experts = preparation.memory, preparation.experts
    assert isinstance(memory, FrozenMemory)
    if share is not None:
        there = dataclasses.replace(
            memory.host,
            num_slots=round(share * len(experts.layouts)),
            slot_bytes=experts_on_device(experts).slot_bytes,
        )
        memory = FrozenMemory(host=memory.host, device=there)
    preparation = dataclasses.replace(preparation, sites=sites, memory=memory)
    device, launched = EagerDevice(), list[bool]()
    takes = SlottedPasses.takes

    def noted(passes: SlottedPasses, *args: object) -> bool:
        launched.append(takes(passes, *args))  # type: ignore[arg-type]
        return launched[-1]

    with (
        patch.object(frozen_stores, "open_device", lambda place: device),
        patch.object(SlottedPasses, "takes", noted),
    ):
        trainer = start(preparation, resume=False)
        losses = train(trainer, stop_after=2)
        trainer.optimizer.check()  # type: ignore[union-attr]
        found = {
            name: parameter.detach().clone()
            for name, parameter in preparation.model.named_parameters()
            if parameter.requires_grad
        }
        trainer.close()
    assert set(launched) == {share is not None}
    return losses, found


@pytest.mark.parametrize(
    ("family", "places", "bf16"),
    [
        ("mixtral", ("experts",), False),
        ("gpt_oss", ("attention", "experts"), False),
        ("mixtral", ("attention",), True),
    ],
)
def test_as_on_the_cpu_and_the_same_bits_whoever_is_in_a_slot(
    tmp_path: Path, family: str, places: tuple[str, ...], bf16: bool
) -> None:
    folder = checkpoint_of(FAMILIES[family], tmp_path / "first")
    found = []
    for number, share in enumerate((None, 1.0, 0.4)):
        (tmp_path / str(number)).mkdir()
        found.append(
            run(folder, tmp_path / str(number), share=share, places=places, bf16=bf16)
        )
    (cpu_losses, on_cpu), (losses, trained), (partial_losses, partial) = found
    assert losses == partial_losses
    assert all(torch.equal(trained[name], partial[name]) for name in trained)
    assert losses == pytest.approx(cpu_losses, abs=2e-2 if bf16 else 1e-5)
    for name, wanted in on_cpu.items():
        assert (trained[name] - wanted).norm() <= (0.2 if bf16 else 2e-3) * wanted.norm(), name
