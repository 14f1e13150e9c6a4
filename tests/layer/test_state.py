"""Other libraries' weights: each layout's own arithmetic against the layer that imported it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.errors import CheckpointError
from moe_runtime.layer import MoELayer, export_state, import_state

E, D, INTER, K = 5, 12, 6, 2
LAYOUTS = ["hugging_face", "mixtral", "megablocks", "scattermoe", "torchtitan"]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def expert_output(layout: str, tensors: dict[str, Tensor], expert: int, x: Tensor) -> Tensor:
    """One expert as the library that owns the layout computes it."""
    if layout in ("hugging_face", "mixtral"):
        names = (
            ("gate_proj", "up_proj", "down_proj")
            if layout == "hugging_face"
            else ("w1", "w3", "w2")
        )
        gate, up, down = (tensors[f"experts.{expert}.{name}.weight"] for name in names)
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    if layout == "megablocks":
        rows = slice(expert * INTER, (expert + 1) * INTER)
        w1, v1, w2 = (tensors[f"experts.mlp.{name}"][rows] for name in ("w1", "v1", "w2"))
        return (F.silu(x @ w1.T) * (x @ v1.T)) @ w2
    if layout == "scattermoe":
        up, gate = F.linear(x, tensors["experts.weight"][expert]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, tensors["output_experts.weight"][expert])
    inner = "routed_experts.inner_experts"
    w1, w3 = tensors[f"{inner}.w1_EFD"][expert], tensors[f"{inner}.w3_EFD"][expert]
    return (F.silu(x @ w1.T) * (x @ w3.T)) @ tensors[f"{inner}.w2_EDF"][expert].T


def foreign_tensors(layout: str) -> dict[str, Tensor]:
    if layout in ("hugging_face", "mixtral"):
        names = (
            ("gate_proj", "up_proj", "down_proj")
            if layout == "hugging_face"
            else ("w1", "w3", "w2")
        )
        tensors = {"gate.weight": rand(E, D)}
        for expert in range(E):
            for name, shape in zip(names, [(INTER, D), (INTER, D), (D, INTER)], strict=True):
                tensors[f"experts.{expert}.{name}.weight"] = rand(*shape)
        return tensors
    if layout == "megablocks":
        names = ("experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2")
        return {"router.layer.weight": rand(E, D)} | {n: rand(E * INTER, D) for n in names}
    if layout == "scattermoe":
        return {
            "router.weight": rand(E, D),
            "experts.weight": rand(E, 2 * INTER, D),
            "output_experts.weight": rand(E, D, INTER),
        }
    inner = "routed_experts.inner_experts"
    return {
        "router.gate.weight": rand(E, D),
        f"{inner}.w1_EFD": rand(E, INTER, D),
        f"{inner}.w3_EFD": rand(E, INTER, D),
        f"{inner}.w2_EDF": rand(E, D, INTER),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_imported_weights_compute_the_same(layout):
    torch.manual_seed(0)
    tensors = foreign_tensors(layout)
    layer = MoELayer(D, INTER, E, K, dtype=torch.float64)
    prefixed = {f"model.layers.3.mlp.{name}": tensor for name, tensor in tensors.items()}
    import_state(layer, {**prefixed, "model.norm.weight": rand(D)}, layout, "model.layers.3.mlp.")
    x = rand(9, D)
    router = next(
        tensor for name, tensor in tensors.items() if "gate.w" in name or "router" in name
    )
    probs = (x @ router.T).softmax(-1)
    weights, ids = probs.topk(K)
    weights = weights / weights.sum(-1, keepdim=True)
    expected = torch.stack(
        [
            sum(
                w * expert_output(layout, tensors, int(e), row) for w, e in zip(ws, es, strict=True)
            )
            for row, ws, es in zip(x, weights, ids, strict=True)
        ]
    )
    torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-10)
    back = export_state(layer, layout)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_with_everything_the_layout_holds(layout):
    has_more = layout in ("hugging_face", "mixtral", "torchtitan")
    kwargs = (
        {"gate": "sigmoid_topk", "gate_options": {"bias_update_rate": 1e-3}} if has_more else {}
    )
    shared = {"shared_experts": 2} if has_more else {}
    layer, other = (MoELayer(D, INTER, E, K, **kwargs, **shared) for _ in range(2))
    if has_more:
        layer.gate.expert_bias.normal_()
    import_state(other, export_state(layer, layout, "a."), layout, "a.")
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_qwen2_shared_expert_gate_and_experts_without_gate():
    layer, other = (
        MoELayer(D, INTER, E, K, shared_experts=1, shared_expert_gate=True) for _ in range(2)
    )
    tensors = export_state(layer, "hugging_face")
    assert {"shared_expert_gate.weight", "shared_expert.up_proj.weight"} <= tensors.keys()
    import_state(other, tensors, "hugging_face")
    assert torch.equal(other.shared.down_proj.weight, layer.shared.down_proj.weight)
    for layout in ("hugging_face", "megablocks", "scattermoe"):
        layer, other = (MoELayer(D, INTER, E, K, activation="relu2") for _ in range(2))
        import_state(other, export_state(layer, layout), layout)
        assert torch.equal(other.experts.up_proj, layer.experts.up_proj)


def test_all_wrong_tensors_are_named_and_nothing_changes():
    layer = MoELayer(D, INTER, E, K)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    tensors = export_state(MoELayer(D, INTER, E, K), "hugging_face")
    del tensors["experts.3.up_proj.weight"]
    tensors["experts.1.down_proj.weight"] = torch.zeros(D, INTER + 1)
    tensors["experts.7.up_proj.weight"] = torch.zeros(INTER, D)
    with pytest.raises(CheckpointError) as caught:
        import_state(layer, tensors, "hugging_face")
    for text in (
        "missing experts.3.up_proj.weight",
        "experts.1.down_proj.weight must be [12, 6], got [12, 7]",
        "unexpected experts.7.up_proj.weight",
    ):
        assert text in str(caught.value)
    assert all(torch.equal(before[name], layer.state_dict()[name]) for name in before)


def test_tensors_without_a_place_are_named():
    layer = MoELayer(D, INTER, E, K, bias=True)
    with pytest.raises(ValueError, match=r"experts\.down_proj_bias"):
        export_state(layer, "megablocks")
    with pytest.raises(ValueError, match="layout must be one of"):
        export_state(layer, "megablock")
    with pytest.raises(CheckpointError, match=r"nothing for the layer's experts\.down_proj_bias"):
        import_state(layer, export_state(MoELayer(D, INTER, E, K), "mixtral"), "mixtral")
    biased = MoELayer(D, INTER, E, K, gate_options={"bias_update_rate": 1e-3})
    tensors = export_state(biased, "torchtitan")
    with pytest.raises(CheckpointError, match=r"the layer has no gate\.expert_bias"):
        import_state(MoELayer(D, INTER, E, K), tensors, "torchtitan")


def test_state_dict_names_are_stable():
    layer = MoELayer(D, INTER, E, K, bias=True, shared_experts=1, shared_expert_gate=True)
    assert {name: tuple(t.shape) for name, t in layer.state_dict().items()} == {
        "gate.weight": (E, D),
        "experts.gate_up_proj": (E, 2 * INTER, D),
        "experts.down_proj": (E, D, INTER),
        "experts.gate_up_proj_bias": (E, 2 * INTER),
        "experts.down_proj_bias": (E, D),
        "shared.gate_up_proj.weight": (2 * INTER, D),
        "shared.gate_up_proj.bias": (2 * INTER,),
        "shared.down_proj.weight": (D, INTER),
        "shared.down_proj.bias": (D,),
        "shared.output_gate.weight": (1, D),
    }
