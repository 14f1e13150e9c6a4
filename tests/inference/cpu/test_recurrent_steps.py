"""Steps of layers with recurrent states, compared with fp64 and with transformers' functions."""

import copy
import functools
import inspect
import pickle
from typing import Any, cast

import pytest
import tiny_checkpoints
import torch
from moe_families import FAMILIES
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import moe_runtime
from moe_runtime.inference.cpu import recurrent_steps
from moe_runtime.inference.cpu.recurrent_steps import mamba2_step
from moe_runtime.inference.cpu.step_layers import use_small_batch_layers

EPS = torch.finfo(torch.float32).eps
STEPS = {
    "Qwen3Next": "torch_recurrent_gated_delta_rule",
    "Qwen3_5Moe": "torch_recurrent_gated_delta_rule",
    "KimiLinear": "recurrent_kimi_delta_attention",
    "GraniteMoeHybrid": "mamba2_selective_state_update",
    "NemotronH": "mamba2_selective_state_update",
}


@pytest.mark.parametrize(("batch", "heads", "groups"), [(1, 1, 1), (3, 4, 2), (2, 3, 3), (0, 2, 1)])
def test_mamba2_against_fp64(batch, heads, groups):
    torch.manual_seed(0)
    dim, num_states = 5, 11
    state = torch.randn(batch, heads, dim, num_states)
    x, dt, A = torch.randn(batch, heads, dim), torch.rand(batch, heads), -torch.rand(heads)
    B, C = torch.randn(2, batch, groups, num_states)
    wide_B, wide_C = (part.double().repeat_interleave(heads // groups, 1) for part in (B, C))
    factor = torch.exp(dt.double() * A.double())[..., None, None]
    taken = (dt[..., None] * wide_B)[:, :, None] * x.double()[..., None]
    exact, size = (factor * old.double() + new for old, new in
                   ((state, taken), (state.abs(), taken.abs())))  # fmt: skip
    found = mamba2_step(state, x, dt, A, B, C)
    roundings = num_states + 8
    assert ((state - exact).abs() <= 8 * EPS * size).all()
    out_size = torch.einsum("bhpn,bhn->bhp", size, wide_C.abs())
    expected = torch.einsum("bhpn,bhn->bhp", exact, wide_C)
    assert ((found - expected).abs() <= roundings * EPS * out_size).all()


def family_of(name: str) -> Any:
    return next(row for row in FAMILIES if str(row).removesuffix("ForCausalLM") == name)


def layers_with_steps(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if "forward" in vars(module)]


class Calls:
    """Takes the place of transformers' function of a step where a model's class finds it."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs
        self.count = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.count += 1
        return self.theirs(*args, **options)


def watch(layer: torch.nn.Module, name: str, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Counts the calls of transformers' function by a layer of a loaded model."""
    globals_of_forward = cast(Any, recurrent_steps._with_steps(type(layer).forward)).__globals__
    step = globals_of_forward[name]
    calls = Calls(step.args[0])
    watched = functools.partial(step.func, calls)
    monkeypatch.setitem(globals_of_forward, name, watched)
    return calls


@pytest.mark.parametrize("name", STEPS)
def test_models_step_as_transformers_does(name, tmp_path, monkeypatch):
    """In fp32 both differ by roundings alone."""
    family = family_of(name)
    original = tiny_checkpoints.tiny_model(family)
    torch.manual_seed(0)
    tiny_checkpoints.randomise(original)
    tiny_checkpoints.save(original, tmp_path, sharded=False)
    with torch.no_grad():
        theirs = tiny_checkpoints.prompt_and_step_logits(original, family)
    model: Any = moe_runtime.load(tmp_path, device="cpu", max_tokens=64)
    with model.moe:
        own = layers_with_steps(model)
        calls = watch(own[0], STEPS[name], monkeypatch)
        with torch.no_grad():
            ours = tiny_checkpoints.prompt_and_step_logits(model, family)
        assert calls.count == 0
        for found, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for layer in (copy.deepcopy(own[0]), pickle.loads(pickle.dumps(own[0]))):
            assert vars(layer)["forward"]._layer is layer


@pytest.mark.parametrize("name", ["Qwen3Next", "NemotronH"])
def test_unsupported_calls_use_transformers(name, monkeypatch):
    """Gradients, and autocast."""
    family = family_of(name)
    torch.manual_seed(0)
    original = tiny_checkpoints.tiny_model(family)
    tiny_checkpoints.randomise(original)
    model = copy.deepcopy(original)
    use_small_batch_layers(model)
    own = layers_with_steps(model)
    calls = watch(own[0], STEPS[name], monkeypatch)
    with_gradients: Any = inspect.unwrap(tiny_checkpoints.prompt_and_step_logits)
    theirs, ours = (with_gradients(each, family) for each in (original, model))
    assert calls.count == len(own)
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        tiny_checkpoints.prompt_and_step_logits(model, family)
    assert calls.count == 2 * len(own)


@pytest.mark.parametrize(("heads", "width"), [(1, 128), (16, 128), (3, 20)])
def test_a_sequence_has_the_same_bits_in_a_batch(heads, width):
    torch.manual_seed(0)
    batch = 8
    state = torch.randn(batch, heads, width, width)
    query, key, value = torch.randn(3, batch, heads, width)
    decay, beta = -torch.rand(heads), torch.rand(batch, heads)
    read = mamba2_step(other := state.clone(), query, beta, decay, key, value)
    for row in range(batch):
        own = slice(row, row + 1)
        parts = (query[own], beta[own], decay, key[own], value[own])
        assert torch.equal(mamba2_step(alone := state[own].clone(), *parts), read[own])
        assert torch.equal(alone, other[own])


@pytest.mark.parametrize("num_tokens", [1, 17, 70])
def test_chunks_of_a_scan_are_small(num_tokens):
    """In fp32 chunks of any size differ by roundings alone: sums over up to 70 positions."""
    torch.manual_seed(0)
    x, dt = torch.randn(2, num_tokens, 4, 3), torch.rand(2, num_tokens, 4)
    B, C = torch.randn(2, 2, num_tokens, 2, 5)
    seen: list[int] = []

    def theirs(*args: Any, chunk_size: int, **options: Any) -> Any:
        seen.append(chunk_size)
        return granite.mamba2_chunk_scan(*args, chunk_size=chunk_size, **options)

    parts, options = (x, dt, -torch.rand(4), B, C), {"return_final_states": True}
    found = recurrent_steps._mamba2_scan(theirs, *parts, chunk_size=256, **options)
    expected = granite.mamba2_chunk_scan(*parts, chunk_size=256, **options)
    assert seen == [{1: 16, 17: 32, 70: 64}[num_tokens]]
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def test_rows_between_multiples_of_16_bytes_have_the_same_bits_too():
    """Products of such rows follow their addresses: transformers' sums do not."""
    torch.manual_seed(0)
    state = torch.randn(5, 1, 64, 5)
    query, key = torch.randn(2, 5, 1, 1, 64)
    value, gates = torch.randn(5, 1, 1, 5), torch.rand(2, 5, 1, 1)

    def step(rows: slice) -> tuple[torch.Tensor, Any]:
        parts = (part[rows] for part in (query, key, value, -gates[0], gates[1]))
        return recurrent_steps._delta_rule(
            qwen3_next.torch_recurrent_gated_delta_rule,
            *parts,
            initial_state=state[rows].clone(),
            output_final_state=True,
        )

    out, states = step(slice(5))
    for row in range(5):
        alone, own = step(slice(row, row + 1))
        assert torch.equal(alone[0], out[row])
        assert torch.equal(own[0], states[row])


def test_changed_code_of_a_layer_is_called(monkeypatch):
    """The functions of its module, and the `forward` of its class, once it has ours."""
    family = family_of("Qwen3Next")
    model = tiny_checkpoints.tiny_model(family)
    kind = qwen3_next.Qwen3NextGatedDeltaNet
    use_small_batch_layers(model)
    steps = Calls(qwen3_next.torch_recurrent_gated_delta_rule)
    prompts = Calls(qwen3_next.torch_chunk_gated_delta_rule)
    with monkeypatch.context() as patch:
        patch.setattr(qwen3_next, "torch_recurrent_gated_delta_rule", steps)
        patch.setattr(qwen3_next, "torch_chunk_gated_delta_rule", prompts)
        tiny_checkpoints.prompt_and_step_logits(model, family)
        assert steps.count == prompts.count == len(layers_with_steps(model))
    theirs, called = kind.forward, []

    @functools.wraps(theirs)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        called.append(self)
        return theirs(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", forward)
        tiny_checkpoints.prompt_and_step_logits(model, family)
        assert called == 2 * layers_with_steps(model)
    calls = watch(layers_with_steps(model)[0], STEPS["Qwen3Next"], monkeypatch)
    tiny_checkpoints.prompt_and_step_logits(model, family)
    assert (calls.count, len(called)) == (0, 2 * len(layers_with_steps(model)))
