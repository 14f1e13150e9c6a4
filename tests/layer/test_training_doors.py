"""`MoELayer` in a user's own training: padding, frozen parts, skipped steps, meta tensors.

The judge of padding is the layer on the real tokens alone, which other tests hold against dense
products.
"""

import contextlib
import copy
from typing import Any

import pytest
import torch
from gate_cases import FORMULAS
from gate_formulas import VOCAB, random_source
from torch import Tensor, nn

from moe_runtime.layer import MoELayer, ScMoEBlock, ScMoEParts
from moe_runtime.routing import GATES

D, INTER = 16, 8
CASES = {case.label: case for case in FORMULAS if "groups" not in case.label}
OPTIONS: dict[str, dict[str, Any]] = {
    "hash": {"vocab_size": VOCAB},
    "softmax_topk": {"bias_update_rate": 0.01},
    "sam": {"num_expert_groups": 2},
}
TOP_K = {"switch": 1, "base": 1, "rl_r": 1}


def layer_with(gate: str, **changes: Any) -> MoELayer:
    torch.manual_seed(0)
    top_k = changes.pop("top_k", TOP_K.get(gate, 2))
    return MoELayer(D, INTER, 6, top_k, gate=gate, gate_options=OPTIONS.get(gate), **changes)


def ragged(lengths: list[int], width: int) -> Tensor:
    """`[B, width]` bool: so many real tokens of each sequence, the padding on its left."""
    return torch.arange(width) >= width - torch.tensor(lengths)[:, None]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("capacity", [None, 0.8])
@pytest.mark.parametrize("label", CASES)
def test_padding_changes_no_number(label, capacity):
    case = CASES[label]
    # the real tokens alone are one sequence
    by_sequence = case.gate == "group_limited_topk"
    layers = [
        MoELayer(
            D,
            INTER,
            case.num_experts,
            case.top_k,
            gate=case.gate,
            gate_options=case.options,
            capacity_factor=capacity,
            shared_experts=1,
            loss_weights={"load_balance": 0.01, "z": 0.01} if by_sequence else None,
            dtype=torch.float64,
        ).train(case.training)
        for _ in range(2)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    mask = ragged([5, 9, 2], 9)
    x = torch.randn(3, 9, D, dtype=torch.float64).masked_fill(~mask[..., None], torch.nan)
    ids = torch.where(mask, torch.arange(27).view(3, 9) % VOCAB, -100)
    scores = torch.randn(27, layers[0].gate.num_experts + 4, dtype=torch.float64)
    previous = [{"previous_logits": scores[rows]} for rows in (slice(None), mask.flatten())]
    own = previous if label == "moepp" else [{}, {}]
    out = layers[0](x, token_ids=ids, padding_mask=mask, generator=random_source(), **own[0])
    alone = layers[1](x[mask], token_ids=ids[mask], generator=random_source(), **own[1])
    assert (out[~mask] == 0).all()
    assert torch.equal(out[mask], alone)
    padded, real = layers[0].aux, layers[1].aux
    for name in ("loss", "counts_E", "demand_E", "dropped_share", "max_load", "load_variation"):
        assert torch.equal(getattr(padded, name), getattr(real, name)), name
    assert (padded.routing.ids_TK[~mask.flatten()] == case.num_experts).all()
    for layer, result in zip(layers, (out, alone), strict=True):
        (result.square().sum() + layer.aux.loss).backward()
    expected, found = gradients(layers[1]), gradients(layers[0])
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", [[5, 9, 2], [0, 9, 4], [9, 9, 9], [0, 0, 0]], ids=str)
def test_balance_of_sequences_is_of_their_real_tokens(lengths):
    layer = layer_with("sigmoid_topk", loss_weights={"sequence_balance": 1.0})
    mask, x = ragged(lengths, 9), torch.randn(3, 9, D)
    layer(x, padding_mask=mask.flatten())
    found = layer.aux.loss
    single = []
    for row, of_row in zip(x, mask, strict=True):
        if of_row.any():
            layer(row[of_row])
            single.append(layer.aux.loss)
    torch.testing.assert_close(found, torch.stack(single).mean() if single else torch.zeros(()))


def test_padding_is_of_the_batch_and_says_true_for_tokens():
    layer, x = layer_with("hash", name="layer 4"), torch.randn(2, 5, D)
    ids = torch.arange(10).view(2, 5)
    for mask in (torch.ones(2, 5), torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 5).int()):
        with pytest.raises(ValueError, match=r"layer 4: padding_mask must be bool \[2, 5\], True"):
            layer(x, token_ids=ids, padding_mask=mask)
    mask = ragged([5, 3], 5)
    with pytest.raises(ValueError, match="token_ids must be of all 10 tokens, padding included"):
        layer(x, token_ids=ids[mask], padding_mask=mask)


def test_padding_of_a_shortcut_block_reaches_its_experts():
    torch.manual_seed(0)
    routed = MoELayer(D, INTER, 6, 2)
    modules = [nn.Identity() for _ in range(4)]
    block = ScMoEBlock(ScMoEParts(*modules, routed=routed, make_norm=nn.Identity))
    mask = ragged([5, 3], 5)
    block(torch.randn(2, 5, D), padding_mask=mask)
    assert routed.aux.counts_E.sum() == 2 * 8


@pytest.mark.parametrize("gate", GATES)
def test_a_skipped_step_leaves_the_gate_as_it_was(gate):
    """Also for the step that follows: what the skipped one counted is forgotten."""
    skips, goes_on = (layer_with(gate) for _ in range(2))
    ids, x = torch.arange(24), torch.randn(24, D)
    before = copy.deepcopy(skips.state_dict())
    skips(x[:9] + 3.0, token_ids=ids[:9], generator=random_source())
    skips.after_step(skipped=True)
    assert all(torch.equal(skips.state_dict()[name], before[name]) for name in before)
    for layer in (skips, goes_on):
        layer(x, token_ids=ids, generator=random_source())
        layer.after_step()
    for name, value in goes_on.state_dict().items():
        assert torch.equal(skips.state_dict()[name], value), name


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("frozen", ["experts.down_proj", "gate"])
def test_frozen_parts_get_no_gradient_and_others_theirs(gate, frozen):
    part, whole = (layer_with(gate, shared_experts=1, dtype=torch.float64) for _ in range(2))
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    ids, x = torch.arange(24), torch.randn(24, D, dtype=torch.float64)
    for layer in (part, whole):
        out = layer(x, token_ids=ids, generator=random_source())
        (out.square().sum() + layer.aux.loss).backward()
    found, expected = gradients(part), gradients(whole)
    assert found.keys() == {name for name in expected if not name.startswith(frozen)}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gate", GATES)
def test_every_parameter_gets_a_gradient(gate):
    """Wrappers such as `DistributedDataParallel` wait for one of each."""
    layer = layer_with(gate, shared_experts=1)
    layer(torch.randn(24, D), token_ids=torch.arange(24)).square().sum().backward()
    assert gradients(layer).keys() == {name for name, _ in layer.named_parameters()}


def assert_same_step(layer: MoELayer, other: MoELayer) -> None:
    """A pass and what follows a step give both the same loss and state."""
    ids, x = torch.arange(24), torch.randn(24, D)
    for one in (layer, other):
        one(x, token_ids=ids, generator=random_source())
        one.after_step()
    assert torch.equal(layer.aux.loss, other.aux.loss)
    for name, value in other.state_dict().items():
        assert torch.equal(layer.state_dict()[name], value), name


@pytest.mark.parametrize("loads", [False, True], ids=["reset", "loaded"])
@pytest.mark.parametrize("gate", GATES)
def test_a_layer_from_the_meta_device_has_all_values(gate, loads):
    losses = {} if gate == "hash" else {"global_balance": 1.0}
    with torch.device("meta") if loads else contextlib.nullcontext():
        layer = layer_with(gate, device="meta", loss_weights=losses)
    layer.to_empty(device="cpu")
    made = layer_with(gate, loss_weights=losses)
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            tensor.fill_(123)
    if loads:
        layer.load_state_dict(made.state_dict())
    else:
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for name, parameter in layer.named_parameters():
            assert parameter.isfinite().all(), name
            assert not (parameter == 123).any(), name
        buffers = dict(made.named_buffers())
        assert all(torch.equal(value, buffers[name]) for name, value in layer.named_buffers())
        made.load_state_dict(layer.state_dict())
    assert_same_step(layer, made)


@pytest.mark.parametrize("gate", GATES)
def test_assigned_weights_take_a_layer_off_the_meta_device(gate):
    """What no checkpoint holds comes with them and begins at 0."""
    losses = {} if gate == "hash" else {"global_balance": 1.0}
    layer = layer_with(gate, device="meta", loss_weights=losses)
    made = layer_with(gate, loss_weights=losses)
    layer.load_state_dict(copy.deepcopy(made.state_dict()), assign=True)
    assert_same_step(layer, made)
