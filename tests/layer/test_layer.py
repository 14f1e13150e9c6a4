"""The layer in the surroundings it meets: shapes, autocast, compile, checkpoints, adapters."""

import copy
import re

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from moe_runtime.layer import ACTIVATIONS, MoELayer, ZeroExperts
from moe_runtime.routing import ZeroExpertCounts, make_gate

D, INTER, E, K = 16, 12, 6, 2


def make_layer(**changes) -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(D, INTER, E, K, **changes)


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("shape", [(D,), (7, D), (2, 5, D), (2, 3, 4, D), (0, D), (2, 0, D)])
def test_any_leading_dimensions(shape):
    layer = make_layer(shared_experts=1)
    x = torch.randn(shape)
    out = layer(x)
    assert out.shape == x.shape
    assert layer.aux.routing.ids_TK.shape[0] == x.numel() // D
    torch.testing.assert_close(out.reshape(-1, D), layer(x.reshape(-1, D)))


def test_rows_come_back_as_they_are():
    """Wrappers warn of views, whose changes in place they do not see."""
    assert make_layer()(torch.randn(7, D))._base is None


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.complex64, torch.bool, torch.float8_e4m3fn], ids=str
)
def test_other_numbers_than_floating_point_are_refused(dtype):
    with pytest.raises(ValueError, match=f"numbers of 16 bits or more, got {dtype}"):
        make_layer()(torch.ones(3, D).to(dtype))


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_activations(activation):
    """Against each formula written with torch's own functions."""
    layer = make_layer(activation=activation, shared_experts=1, dtype=torch.float64)
    functions = {
        "swiglu": lambda g, u: nn.functional.silu(g) * u,
        "geglu": lambda g, u: nn.functional.gelu(g) * u,
        "geglu_tanh": lambda g, u: nn.functional.gelu(g, approximate="tanh") * u,
        "reglu": lambda g, u: g.relu() * u,
        "swiglu_clamped": lambda g, u: (
            g.clamp(max=7) * (1.702 * g.clamp(max=7)).sigmoid() * (u.clamp(-7, 7) + 1)
        ),
    }
    plain = {
        "silu": nn.functional.silu,
        "gelu": nn.functional.gelu,
        "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
        "relu": torch.relu,
        "relu2": lambda x: torch.relu(x) ** 2,
    }

    def network(first: Tensor, down: Tensor, x: Tensor) -> Tensor:
        z = first @ x
        if activation in functions:
            return down @ functions[activation](z[: len(z) // 2], z[len(z) // 2 :])
        return down @ plain[activation](z)

    x = torch.randn(9, D, dtype=torch.float64) * 3
    routing = layer.route(x)
    state = layer.state_dict()
    first = "gate_up_proj" if activation in functions else "up_proj"
    for t, out in enumerate(layer(x)):
        shared = network(state[f"shared.{first}.weight"], state["shared.down_proj.weight"], x[t])
        routed = sum(
            w * network(state[f"experts.{first}"][e], state["experts.down_proj"][e], x[t])
            for w, e in zip(routing.weights_TK[t], routing.ids_TK[t], strict=True)
        )
        torch.testing.assert_close(out, shared + routed, rtol=1e-10, atol=1e-10)


def test_aux_holds_the_last_call_as_values():
    layer = make_layer(capacity_factor=0.5, loss_weights={"load_balance": 0.1, "z": 0.01})
    assert layer.aux is None
    layer(torch.randn(30, D))
    first = layer.aux
    layer(torch.randn(30, D))
    assert layer.aux is not first
    assert first.losses.keys() == {"load_balance", "z"}
    expected = 0.1 * first.losses["load_balance"] + 0.01 * first.losses["z"]
    torch.testing.assert_close(first.loss, expected)
    assert first.demand_E.sum() == 60
    dropped = 1 - first.counts_E.sum().item() / 60
    assert first.dropped_share.item() == pytest.approx(dropped)
    assert dropped > 0.4
    loads = first.demand_E.double()
    assert first.max_load.item() == pytest.approx((loads.max() / 10).item())
    assert first.load_variation.item() == pytest.approx((loads.std(correction=0) / 10).item())


def test_dropped_tokens_pass_by_all_their_experts():
    layer = make_layer(capacity_factor=0.5)
    x = torch.randn(30, D)
    out = layer(x)
    nowhere = ~layer.aux.routing.is_dispatched_TK.any(dim=1)
    assert nowhere.any()
    assert (out[nowhere] == 0).all()
    assert torch.equal(layer(x), out), "which tokens are dropped is deterministic"


def test_attached_losses_give_the_same_gradients_once():
    attached = make_layer(attach_losses=True, loss_weights={"load_balance": 1.0, "z": 1.0})
    plain = make_layer(loss_weights={"load_balance": 1.0, "z": 1.0})
    x = torch.randn(20, D)
    (plain(x).square().sum() + plain.aux.loss).backward()
    out = attached(x)
    assert not attached.aux.loss.requires_grad
    out.square().sum().backward()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(attached)[name], gradient)
    attached.zero_grad()
    attached.loss_scale = 3.0
    (attached(x).sum() * 0).backward()
    plain.zero_grad()
    (plain(x).sum() * 0 + 3 * plain.aux.loss).backward()
    torch.testing.assert_close(attached.gate.weight.grad, plain.gate.weight.grad)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_no_gradient(use_reentrant):
    """Reentrant checkpoints cut the way of `aux.loss`, so there the losses are attached."""
    plain = make_layer(attach_losses=True, shared_experts=1)
    x = torch.randn(20, D, requires_grad=True)
    plain(x).square().sum().backward()
    again = make_layer(attach_losses=True, shared_experts=1)
    y = x.detach().clone().requires_grad_()
    checkpoint(again, y, use_reentrant=use_reentrant).square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(again)[name], gradient, msg=name)
    free = make_layer(shared_experts=1)
    out = checkpoint(free, x, use_reentrant=False)
    (out.square().sum() + free.aux.loss).backward()
    torch.testing.assert_close(free.gate.weight.grad, plain.gate.weight.grad)


def test_autocast():
    """Products in bf16, scores in fp32: the choice of experts is that of fp32."""
    layer = make_layer(shared_experts=1)
    x = torch.randn(40, D)
    exact = layer(x)
    exact_ids = layer.aux.routing.ids_TK
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    assert layer.aux.routing.weights_TK.dtype == torch.float32
    assert torch.equal(layer.aux.routing.ids_TK, exact_ids)
    # three products and a sum of three terms, each rounded to 8 bits: 2^-8 a rounding
    assert (out.float() - exact).norm() / exact.norm() < 6 * 2**-8
    (out.float().square().sum() + layer.aux.loss).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_lora_adapts_the_experts():
    """PEFT's adapters of stacked parameters: the merged weights compute the same."""
    peft = pytest.importorskip("peft")
    model = nn.Sequential(make_layer())
    x = torch.randn(20, D)
    before = model(x).detach()
    config = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["0.experts.gate_up_proj", "0.experts.down_proj"]
    )
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    torch.testing.assert_close(adapted(x), before)
    trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 4
    for parameter in trained.values():
        nn.init.normal_(parameter)
    out = adapted(x)
    assert not torch.allclose(out, before)
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in trained.values())
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(x), out.detach(), rtol=1e-4, atol=1e-4)


# What gates differ in is whether their code is one graph; a backend that makes graphs of the
# backward pass sees one gate of either way to choose.
@pytest.mark.parametrize(
    ("gate", "backend"),
    [
        pytest.param("group_limited_topk", "aot_eager", marks=pytest.mark.long),
        pytest.param("moepp", "eager", marks=pytest.mark.long),
        pytest.param("switch", "eager", marks=pytest.mark.long),
        ("sinkhorn", "eager"),
        pytest.param("base", "aot_eager", marks=pytest.mark.long),
    ],
)
def test_compiles_into_one_graph(gate, backend):
    layer = MoELayer(
        D,
        INTER,
        E,
        1 if gate in ("switch", "base") else K,
        gate=gate,
        capacity_factor=1.0,
        shared_experts=1,
        loss_weights={"load_balance": 0.01},
    )
    layer.train(gate in ("sinkhorn", "base"))  # these assign experts in training only
    x = torch.randn(2, 10, D)
    expected = layer(x)
    losses = layer.aux.losses

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        out = layer(x)
        return out, layer.aux.loss

    compiled = torch.compile(call, backend=backend, fullgraph=True)
    out, loss = compiled(x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        loss, sum(layer.gate.loss_weights[name] * value for name, value in losses.items())
    )
    (out.square().sum() + loss).backward()
    assert layer.gate.weight.grad is not None


def test_state_dict_round_trip_and_copies():
    layer = make_layer(gate="moepp", shared_experts=1, bias=True)
    other = make_layer(gate="moepp", shared_experts=1, bias=True)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(12, D)
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(other)(x), layer(x))
    with pytest.raises(RuntimeError, match=r"experts\.down_proj.*size mismatch|size mismatch"):
        MoELayer(D, INTER + 1, E, K).load_state_dict(make_layer().state_dict())


def test_gate_object_and_other_experts():
    class Doubler(nn.Module):
        def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
            return 2 * x_TD * weights_TK.sum(1, keepdim=True)

    layer = make_layer(gate=make_gate("sigmoid_topk", D, E, K), experts=Doubler())
    x = torch.randn(5, D)
    torch.testing.assert_close(layer(x), 2 * x)


def test_zero_experts_choose_their_gate():
    layer = make_layer(zero_experts=ZeroExpertCounts(constant=3))
    assert isinstance(layer.zero, ZeroExperts)
    assert layer.gate.weight.shape == (E + 5, D)
    assert make_layer(zero_experts={"copy": 2}).gate.zero_experts == ZeroExpertCounts(0, 2, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "swigul"}, "did you mean 'swiglu'"),
        ({"capacity_factor": 0}, "capacity_factor must be positive and finite"),
        ({"capacity_factor": True}, "(None means dropless), got True"),
        ({"loss_weights": {"z": "1"}}, "loss_weights['z'] must be a finite number, got '1'"),
        ({"loss_weights": {"z": float("nan")}}, "loss_weights['z'] must be a finite number"),
        ({"zero_experts": {"copy": True}}, "counts of zero experts must be integers from 0 on"),
        ({"gate": make_gate("switch", D, E, 1), "capacity_factor": 1.0}, "make the gate with it"),
        ({"shared_experts": -1}, "shared_experts must be an integer from 0 on, got -1"),
        ({"zero_experts": 3}, "zero_experts must be counts by kind"),
        ({"gate_options": {"scal": 2.0}}, "did you mean 'scale'"),
        ({"gate_options": {"num_groups": 1}}, "gate_options has 'num_groups', which the layer"),
        ({"gate": "gshard", "zero_experts": ZeroExpertCounts()}, "need the gate 'moepp'"),
        ({"zero_experts": {"copi": 1}}, "no kind 'copi'; did you mean 'copy'"),
        ({"gate": make_gate("switch", D, E, 1)}, "the gate was made for"),
        ({"impl": "cuda"}, "impl must be one of"),
    ],
)
def test_bad_arguments(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_layer(**changes)


@pytest.mark.parametrize("width", [0, 2.5, "7", True, (7, 2.5, 7), (7, 7, 0)], ids=str)
def test_widths_are_whole_numbers(width):
    with pytest.raises(ValueError, match=r"intermediate_size must be an integer .* got"):
        MoELayer(D, width, 3, 1)


def test_bad_calls_name_the_layer():
    layer = make_layer(name="layers.3.mlp")
    with pytest.raises(ValueError, match=r"layers\.3\.mlp: expected \[\.\.\., 16\], got \[4, 15\]"):
        layer(torch.randn(4, 15))
    with pytest.raises(ValueError, match=r"layers\.3\.mlp: the scores of 1 of 4 tokens"):
        layer(torch.full((4, D), 1.0).index_fill(0, torch.tensor([2]), torch.nan))


def test_torch_func_takes_the_reference():
    """Kernels have no such derivatives: `auto` computes by the specification, others say so."""
    layer, x = make_layer(dtype=torch.float64), torch.randn(5, D, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return layer(x).square().sum()

    loss(leaf := x.clone().requires_grad_()).backward()
    torch.testing.assert_close(torch.func.grad(loss)(x), leaf.grad)
    layer = make_layer(impl="torch")
    with pytest.raises(ValueError, match=r"no torch\.func derivatives .*use 'auto' or 'reference'"):
        torch.func.grad(loss)(x.float())


def test_tensors_without_values():
    """Fake ones have shapes, forward and backward; others are refused in one line."""
    with FakeTensorMode():
        layer = make_layer()
        out = layer(torch.empty(2, 5, D))
        out.sum().backward()
    assert out.shape == (2, 5, D)
    for parameter in layer.experts.parameters():
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
    layer = make_layer()
    for transform in (torch.func.vmap(layer), torch.func.vmap(torch.func.jacrev(layer))):
        with pytest.raises(ValueError, match="hides the scores that experts are chosen by; call"):
            transform(torch.randn(3, 5, D))
    with pytest.raises(ValueError, match="meta tensors have no values to choose experts by"):
        layer.to("meta")(torch.empty(5, D, device="meta"))
