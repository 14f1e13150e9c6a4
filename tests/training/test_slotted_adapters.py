"""Adapters beside experts that Triton kernels take from slots of a device, in the interpreter.

Against the run on the CPU, which computes expert by expert; and with the same bits whoever is in a
slot.
"""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from emulated_models import EagerDevice
from finetuning_runs import GPT_OSS, MIXTRAL, SIZES, config_of, train, with_run
from text_checkpoint import tiny_tokenizer
from tiny_checkpoints import save, tiny_model
from torch import Tensor, nn
from triton_interpreter import repair_interpreter

from moe_runtime.errors import MoERuntimeError
from moe_runtime.inference.device.device_experts import experts_on_device
from moe_runtime.kernels.expert_mlp import StackedExperts
from moe_runtime.memory.device.device_store import DeviceStore
from moe_runtime.training.finetune import finetune_run as frozen_stores
from moe_runtime.training.finetune.finetune_run import FinetunePreparation, prepare, start
from moe_runtime.training.offload.frozen import SlottedExecutor
from moe_runtime.training.offload.memory import FrozenMemory

pytest.importorskip("triton")

from moe_runtime.kernels.expert_mlp.slotted import SlottedTraining

FAMILIES = {"mixtral": MIXTRAL, "gpt_oss": GPT_OSS}


IS_GPU = torch.cuda.is_available()


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    if not IS_GPU:
        repair_interpreter()


def checkpoint(
    folder: Path, family: str, *, num_layers: int, is_half: bool, num_experts: int = 3
) -> None:
    sizes = SIZES | {"num_hidden_layers": num_layers, "num_local_experts": num_experts}
    model = tiny_model(dataclasses.replace(FAMILIES[family], config=sizes))
    save(model.bfloat16() if is_half else model, folder, sharded=False)
    tiny_tokenizer().save_pretrained(folder)


def prepared(
    folder: Path,
    output: Path,
    *,
    share: float | None,
    precision: str,
    places: list[str],
    parts: int,
    context: int = 2,
) -> FinetunePreparation:
    """A run with a share of the experts in slots, or on the CPU."""
    output.mkdir()
    config = config_of(folder, output, lora={"rank": 2, "places": places}, run={"steps": 1})
    config = with_run(config, precision=precision)
    if IS_GPU and share is not None:
        config = with_run(config, device="cuda")
    data = dataclasses.replace(
        config.data,
        context=context,
        tokens_per_step=2 * context,
        micro_batches=parts,
        held_out_share=0.0,
    )
    preparation = prepare(dataclasses.replace(config, data=data))
    impl = "torch" if share is None else "triton"
    sites = [dataclasses.replace(site, impl=impl) for site in preparation.sites]
    memory, experts = preparation.memory, preparation.experts
    assert isinstance(memory, FrozenMemory)
    if share is not None:
        num_slots, slot_bytes = len(experts.layouts), experts_on_device(experts).slot_bytes
        there = dataclasses.replace(
            memory.device or memory.host, num_slots=round(share * num_slots), slot_bytes=slot_bytes
        )
        memory = FrozenMemory(host=memory.host, device=there)
    return dataclasses.replace(preparation, sites=sites, memory=memory)


@contextmanager
def on_device(device: EagerDevice) -> Iterator[None]:
    """Slots are of an emulated device where there is no GPU."""
    opened = patch.object(frozen_stores, "open_device", lambda _: device)
    with nullcontext() if IS_GPU else opened:
        yield


def run(
    preparation: FinetunePreparation, *, is_slotted: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and trained tensors."""
    ways, takes = set[bool](), SlottedExecutor.takes

    def noted(*args: Any) -> bool:
        way = takes(*args)
        ways.add(way)
        return way

    with patch.object(SlottedExecutor, "takes", noted), on_device(EagerDevice()):
        trainer = start(preparation, resume=False)
        for name, parameter in preparation.model.named_parameters():
            if name.endswith("_B"):  # else the others had no gradient yet
                nn.init.constant_(parameter, 0.01)
        losses = train(trainer, stop_after=1)
        trainer.optimizer.check()  # type: ignore[union-attr]
        trained = preparation.model.named_parameters()
        found = {name: p.detach().cpu().clone() for name, p in trained if p.requires_grad}
        trainer.close()
    assert ways == {True} if is_slotted else True not in ways
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
    tmp_path, family, precision, places, parts
):
    """As many layers as micro-batches; what is nearly zero moves either way in half precision."""
    is_half = precision == "bfloat16"
    checkpoint(tmp_path / "first", family, num_layers=parts, is_half=is_half)
    as_given: dict[str, Any] = {"precision": precision, "places": places, "parts": parts}
    found = [
        run(
            prepared(tmp_path / "first", tmp_path / str(share), share=share, **as_given),
            is_slotted=share is not None,
        )
        for share in (None, 1.0, 0.4)
    ]
    (cpu_losses, on_cpu), (losses, trained), (partial_losses, partial) = found
    # attention's gradients have no order on a GPU
    assert losses == pytest.approx(partial_losses, abs=1e-4 if IS_GPU else 0.0)
    assert IS_GPU or all(torch.equal(trained[name], partial[name]) for name in trained)
    assert losses == pytest.approx(cpu_losses, abs=2e-2 if is_half else 1e-4)
    for name, wanted in on_cpu.items():
        assert is_half or (trained[name] - wanted).norm() <= 1e-3 * wanted.norm(), name


@pytest.mark.skipif(IS_GPU, reason="it is looked at what is on its way")
def test_the_link_has_the_next_pass_to_copy_when_one_has_ended(tmp_path):
    """While attention, the loss and the optimizer are computed: experts of the layer that is next,
    which is the same one at both ends of the way."""
    checkpoint(tmp_path / "first", "mixtral", num_layers=2, is_half=False, num_experts=16)
    preparation = prepared(
        tmp_path / "first", tmp_path / "run", share=0.4, precision="float32", places=["experts"],
        parts=1, context=8,
    )  # fmt: skip
    assert isinstance(preparation.memory, FrozenMemory)
    assert preparation.memory.device is not None
    most, each, found = preparation.memory.device.stream_slots(), SlottedExecutor._each, []
    read_ahead = DeviceStore.read_ahead

    def read_ahead_into_freed(store: DeviceStore[Any], keys: Any) -> None:
        """A thread frees the slots of a lease that has ended: the test waits for it."""
        with store._monitor:
            released = [e for e in store._entries.values() if e.pins == 0 and not e.expected]
            store.fetcher.wake_ends()
            while not all(e.arrived for e in released):
                store._monitor.wait()
        read_ahead(store, keys)

    def noted(passes: Any, layer: int, *rest: Any) -> None:
        each(passes, layer, *rest)
        store = passes._store
        with store._monitor:
            ahead = [key for key in store._unadmitted if store._entries[key].expected]
            absent = [key for key in rest[1] or () if key not in store._entries]
        found.append((layer, {key.layer for key in ahead}))
        assert len(ahead) == most or not absent

    with (
        on_device(EagerDevice()),
        patch.object(SlottedExecutor, "_each", noted),
        patch.object(DeviceStore, "read_ahead", read_ahead_into_freed),
    ):
        trainer = start(preparation, resume=False)
        for _ in range(2):  # the first one does not know who will be wanted
            found.clear()
            trainer._run.batches.seek((0,))
            trainer._backward(1e-2)
        trainer.optimizer.check()  # type: ignore[union-attr]
        trainer.close()
    assert found == [(0, {1}), (1, {1}), (1, {0}), (0, {0})]


@pytest.mark.skipif(IS_GPU, reason="copies of an emulated device fail here")
def test_what_ends_a_step_leaves_no_gradient(tmp_path):
    """An interrupt between products, and copies that fail at once or later."""
    checkpoint(tmp_path / "first", "mixtral", num_layers=1, is_half=False)
    preparation = prepared(
        tmp_path / "first", tmp_path / "run", share=0.4, precision="float32", places=["experts"],
        parts=1,
    )  # fmt: skip
    device, add, left = EagerDevice(), SlottedTraining.backward, [-1]

    def struck(call: SlottedTraining, experts: StackedExperts) -> None:
        add(call, experts)
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    with on_device(device), patch.object(SlottedTraining, "backward", struck):
        trainer = start(preparation, resume=False)
        optimizer: Any = trainer.optimizer
        wanted_losses, wanted = list[float](), list[Tensor]()
        losses, found = list[float](), list[Tensor]()
        for place, error in enumerate((None, KeyboardInterrupt, MoERuntimeError, None)):
            left[0] = place if error is KeyboardInterrupt else -1
            if error is MoERuntimeError:
                device.late_faults += [RuntimeError("no link")] * 100
            trainer._run.batches.seek((0,))
            if error is not None:
                with pytest.raises(error):
                    trainer._backward(1e-2)
                assert not optimizer.dense.gradients()
            else:
                losses = [float(part.cross_entropy) for part in trainer._backward(1e-2)]
                found = [grad.clone() for grad in optimizer.dense.gradients()]
                if place == 0:
                    wanted_losses, wanted = losses, found
                optimizer.dense.forget()
            optimizer.check()
            while optimizer._stores[0]._link.under_way:
                time.sleep(1e-4)  # copies that were read ahead, and will fail
            device.late_faults.clear()
        assert losses == wanted_losses
        assert all(map(torch.equal, found, wanted))
        trainer.close()
