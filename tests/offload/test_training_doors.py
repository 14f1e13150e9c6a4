"""Experts off memory with users' own training: one choice a token, padding, wrappers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from moe_families import FAMILIES
from offloaded_models import (
    Stack,
    assert_same_parameters,
    batches,
    offloaded,
    stack,
    train_in_memory,
    train_offloaded,
)
from tiny_checkpoints import PROMPT, tiny_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import moe_runtime
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.research.zeroth_order import ZerothOrder, offload_zeroth_order

MIXTRAL = next(family for family in FAMILIES if family.folder == "mixtral")
SETTINGS = moe_runtime.AdamW(weight_decay=0.1)
OFFLOADS = [moe_runtime.offload_training, offload_zeroth_order]
GATES = ("softmax_topk", "sigmoid_topk", "cosine_topk", "moepp", "sam", "group_limited_topk")


class Padded(Stack):
    """All tokens but the first five are padding."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(len(x)) < 5
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x, padding_mask=mask)
        return self.last(x)


def assert_trained_alike(expected: Stack, model: Stack, folder: Path) -> None:
    training = offloaded(model, SETTINGS, folder, experts_in_memory=0.4)
    inputs = batches(4)
    windows = [inputs[:2], inputs[2:]]
    losses = train_in_memory(expected, windows, SETTINGS)
    assert train_offloaded(training, model.loss, windows) == losses
    assert_same_parameters(training, expected)
    training.close()


@pytest.mark.parametrize("gate", GATES)
def test_one_choice_a_token_trains_as_in_memory(gate, tmp_path):
    groups = {"num_expert_groups": 2} if gate in ("sam", "group_limited_topk") else {}
    expected, model = (
        stack(top_k=1, gate=gate, gate_options=groups, num_layers=2) for _ in range(2)
    )
    before = {n: p.clone() for n, p in expected.named_parameters() if ".gate." in n}
    assert_trained_alike(expected, model, tmp_path)
    assert not all(torch.equal(expected.get_parameter(n), p) for n, p in before.items())


def test_padding_trains_as_in_memory(tmp_path):
    torch.manual_seed(7)
    expected, model = Padded(num_layers=2), Padded(num_layers=2)
    model.load_state_dict(expected.state_dict())
    assert_trained_alike(expected, model, tmp_path)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_experts_without_values_are_refused(offload):
    with torch.device("meta"):
        model = stack()
    with pytest.raises(ValueError, match=r"layers\.0.* is on the meta device, .* `initial`"):
        offload(model, host_memory="64MiB")


@pytest.fixture
def _two_processes() -> Iterator[None]:
    """A group of two processes without communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_two_processes")
@pytest.mark.parametrize("offload", OFFLOADS)
def test_what_averages_gradients_of_a_whole_model_is_refused(offload):
    """Each process would train experts only on its own tokens."""
    wrapped = (DistributedDataParallel(stack()), nn.Sequential(DistributedDataParallel(stack())))
    for model in wrapped:
        with pytest.raises(UnsupportedModelError, match="give the model itself"):
            offload(model, host_memory="64MiB")
    sharded: Any = stack()
    experts = {p for n, p in sharded.named_parameters() if ".experts." in n}
    # of its own accord it takes the accelerator, which other tests may have emulated
    fully_shard(sharded, ignored_params=experts, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(UnsupportedModelError, match="divided between processes"):
        offload(sharded, host_memory="64MiB")


def test_forward_passes_move_the_adapters_alone():
    torch.manual_seed(1)
    base = tiny_model(MIXTRAL)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model: Any = peft.get_peft_model(base, settings)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    training = offload_zeroth_order(
        model, host_memory="64MiB", optimizer=ZerothOrder(lr=1e-2, eps=1e-2)
    )
    for _ in range(2):
        training.backward([lambda: model(PROMPT, labels=PROMPT).loss], rate=1e-2)
        training.step(1e-2)
    found = {n: p.detach() for n, p in model.named_parameters() if ".experts." not in n}
    for layer in range(base.config.num_hidden_layers):
        place = f"base_model.model.model.layers.{layer}.mlp.experts."
        found |= {place + name: tensor for name, tensor in training.stacked(layer).items()}
    training.close()
    moved = {name for name, tensor in found.items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in found if ".lora_" in name}
    assert moved
    assert any(".experts." in name for name in found)
