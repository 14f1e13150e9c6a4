"""`expert_mlp` of quantised experts: every implementation against their values in fp64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from launched_kernels import launched
from low_precision import assert_as_good_as_eager
from quantized_matrices import FP8_BLOCK, INT4, MXFP4, NVFP4, random_matrix, random_stack
from torch import Tensor

from moe_runtime.kernels.expert_mlp import (
    ActivationSpec,
    QuantizedExperts,
    StackedExperts,
    expert_mlp,
)
from moe_runtime.kernels.quantized import QuantizedStack, WeightFormat

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INT4_ZEROS = WeightFormat("uint4", "bf16", group_cols=32, has_zero_points=True)
FORMATS = {
    "mxfp4": MXFP4,
    "fp8-block": FP8_BLOCK,
    "int4-zeros": INT4_ZEROS,
    "nvfp4": NVFP4,
    "q4_0": WeightFormat("q4_0"),
}
GPT_OSS = ActivationSpec("silu", alpha=1.702, limit=7.0, up_offset=1.0)
DIM, HIDDEN = 96, 80
PARTS = ("codes", "scales", "zero_points", "global_scale")
MOVED = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias", "slot_of_expert")


def make(
    kind: WeightFormat,
    generator: torch.Generator,
    *,
    has_bias: bool = True,
    has_gate: bool = True,
    slots: list[int] | None = None,
    sizes: tuple[int, int] = (DIM, HIDDEN),
) -> QuantizedExperts:
    """Five slots; gate and up lie in one tensor, in turn where each row has its scales."""
    dim, hidden = sizes
    rows = hidden * (2 if has_gate else 1)
    inputs, down = (
        random_stack(kind, 5, rows, dim, generator),
        random_stack(kind, 5, dim, hidden, generator),
    )
    gate, up = None, inputs
    biases: list[Tensor | None] = [None, None, None]
    if has_gate:
        gate, up = inputs.alternating() if kind.group_rows == 1 else inputs.halves()
    if has_bias:
        first = torch.randn(5, rows, generator=generator).bfloat16()
        biases = [first[:, 0::2], first[:, 1::2]] if has_gate else [None, first]
        biases.append(torch.randn(5, dim, generator=generator).bfloat16())
    return QuantizedExperts(
        gate=gate,
        up=up,
        down=down,
        gate_bias=biases[0],
        up_bias=biases[1],
        down_bias=biases[2],
        slot_of_expert=None if slots is None else torch.tensor(slots, dtype=torch.int32),
    )


def values(experts: QuantizedExperts, dtype: torch.dtype) -> StackedExperts:
    """The same experts as tensors, slot by slot."""
    inputs = [stack for stack in (experts.gate, experts.up) if stack is not None]
    biases = [bias for bias in (experts.gate_bias, experts.up_bias) if bias is not None]

    def wide(stack: QuantizedStack) -> Tensor:
        return torch.stack([stack.matrix(slot).dequantize() for slot in range(5)]).to(dtype)

    return StackedExperts(
        gate_up=torch.cat([wide(stack) for stack in inputs], dim=1),
        down=wide(experts.down),
        gate_up_bias=torch.cat(biases, dim=1).to(dtype) if biases else None,
        down_bias=None if experts.down_bias is None else experts.down_bias.to(dtype),
        has_gate=experts.gate is not None,
        slot_of_expert=experts.slot_of_expert,
    )


def moved(experts: QuantizedExperts) -> QuantizedExperts:
    def there(one: Any) -> Any:
        if isinstance(one, Tensor):
            return one.to(DEVICE)
        return one and replace(one, **{name: there(getattr(one, name)) for name in PARTS})

    return replace(experts, **{name: there(getattr(experts, name)) for name in MOVED})


def routing(num_tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Three choices of five experts, some of no expert and some twice."""
    ids = torch.randint(-1, 6, (num_tokens, 3), generator=generator)
    ids[0] = torch.tensor([2, 2, 5])
    weights = torch.rand(num_tokens, 3, generator=generator)
    return ids, weights


def run(
    experts: QuantizedExperts,
    impl: str,
    x: Tensor,
    routed: tuple[Tensor, Tensor],
    activation: object,
) -> Tensor:
    device = DEVICE if impl == "triton" else "cpu"
    experts = moved(experts) if impl == "triton" else experts
    inputs = (tensor.to(device) for tensor in (x, *routed))
    return expert_mlp(*inputs, experts, impl=impl, activation=activation).cpu()  # type: ignore[arg-type]


def exact_values(
    experts: QuantizedExperts, x: Tensor, routed: tuple[Tensor, Tensor], activation: object
) -> Tensor:
    """The specification in fp64, of the values."""
    wide = values(experts, torch.float64)
    return expert_mlp(x.double(), *routed, wide, activation=activation, impl="reference")  # type: ignore[arg-type]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [
        # few tokens and many in turn over the formats
        pytest.param(name, num, marks=[pytest.mark.long] * ((place + turn) % 2))
        for place, name in enumerate(FORMATS)
        for turn, num in enumerate((5, 40))
    ],
)
def test_formats(name, num_tokens, generator):
    """A few tokens and many, in every implementation, with biases and gpt-oss' gate."""
    # rows of blocks are whole blocks
    sizes = (DIM, 64) if FORMATS[name].block_codes else (DIM, HIDDEN)
    experts = make(FORMATS[name], generator, sizes=sizes)
    routed = routing(num_tokens, generator)
    x = torch.randn(num_tokens, DIM, generator=generator).bfloat16()
    exact = exact_values(experts, x, routed, GPT_OSS)
    wide = values(experts, torch.bfloat16)
    eager = expert_mlp(x, *routed, wide, activation=GPT_OSS, impl="torch")
    for impl in ("triton", "auto", "torch", "reference"):
        found = run(experts, impl, x, routed, GPT_OSS)
        assert_as_good_as_eager(found, eager, exact, impl)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [(MXFP4, (96, 160)), (FP8_BLOCK, (96, 144)), (INT4_ZEROS, (64, 96)), (NVFP4, (96, 64)),
     (WeightFormat("q4_k"), (256, 512))],
    ids=["mxfp4", "fp8-block", "int4-zeros", "nvfp4", "q4_k"],
)  # fmt: skip
def test_one_token(kind, sizes, generator):
    """Kernels without matrix units, whatever slots the experts lie in; two choices are alike."""
    experts = make(kind, generator, sizes=sizes, slots=[3, 1, -1, 4, 0])
    ids = torch.tensor([[3, 0, 3, 2, 7, 4]])
    weights = torch.rand(1, 6, generator=generator)
    x = torch.randn(1, sizes[0], generator=generator)
    with launched() as names:
        found = run(experts, "triton", x, (ids, weights), GPT_OSS)
    slots = torch.tensor([[4, 3, 4, 0, 0, 0]])
    there = weights.where(torch.tensor([[1, 1, 1, 0, 0, 1]]) > 0, 0)
    exact = exact_values(replace(experts, slot_of_expert=None), x, (slots, there), GPT_OSS)
    # fp32: two products of about a hundred terms each
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    assert names == ["decode_up_row", "decode_down_row", "decode_combine"]


@pytest.mark.parametrize("kind", [MXFP4, INT4_ZEROS], ids=["mxfp4", "int4-zeros"])
def test_few_tokens_of_even_sizes(kind, generator):
    """Blocks that divide every dimension, and steps of half the depth: nothing is masked."""
    experts = make(kind, generator, sizes=(64, 128))
    routed = routing(4, generator)
    x = torch.randn(4, 64, generator=generator)
    found = run(experts, "triton", x, routed, GPT_OSS)
    exact = exact_values(experts, x, routed, GPT_OSS)
    # fp32: two products of about a hundred terms each
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("num_tokens", [3, 20])
def test_slots(num_tokens, generator):
    """Experts in other slots; one that takes no part adds nothing, whatever its weight."""
    experts = make(MXFP4, generator, has_bias=False, slots=[3, -1, 0, 4])
    ids, weights = routing(num_tokens, generator)
    gone = (ids < 0) | (ids > 3) | (ids == 1)
    x = torch.randn(num_tokens, DIM, generator=generator)
    plain = values(replace(experts, slot_of_expert=None), torch.float64)
    slots = torch.tensor([3, 0, 0, 4])[ids.clamp(0, 3)]
    exact = expert_mlp(
        x.double(), slots, weights.where(~gone, 0), plain, activation="silu", impl="reference"
    )
    weights = weights.where(~gone, torch.inf)
    for impl in ("triton", "auto", "torch", "reference"):
        found = run(experts, impl, x, (ids, weights), "silu")
        # fp32: two products of about a hundred terms each
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5, msg=impl)


@pytest.mark.parametrize(
    "kind",
    [FP8_BLOCK, pytest.param(INT4_ZEROS, marks=pytest.mark.long), NVFP4],
    ids=["fp8", "int4-zeros", "nvfp4"],
)
def test_slots_of_a_slab(kind, generator):
    """All parts of an expert in one slot of bytes, as a cache holds them: the bits of stacks."""
    apart = make(kind, generator, has_bias=False, slots=[4, 2, 0])
    stacks = {name: getattr(apart, name) for name in ("gate", "up", "down")}
    parts: dict[tuple[str, str], tuple[int, Tensor]] = {}
    size = 0
    for name, stack in stacks.items():
        for part in PARTS:
            values = getattr(stack, part)
            if values is not None:
                values = values.contiguous()
                parts[name, part] = (size, values)
                size += -(-values[0].numel() * values.element_size() // 16) * 16
    slab = torch.full((5, size + 48), 255, dtype=torch.uint8)

    def view(name: str, part: str) -> Tensor | None:
        if (name, part) not in parts:
            return None
        first, values = parts[name, part]
        rows = slab[:, first : first + values[0].numel() * values.element_size()]
        return rows.view(values.dtype).unflatten(1, values.shape[1:]).copy_(values)

    within = {
        name: replace(stack, **{p: view(name, p) for p in PARTS}) for name, stack in stacks.items()
    }
    cached = replace(apart, **within)
    for num_tokens in (2, 20):
        routed = routing(num_tokens, generator)
        x = torch.randn(num_tokens, DIM, generator=generator).bfloat16()
        found, expected = (run(e, "triton", x, routed, "silu") for e in (cached, apart))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("impl", ["triton", "auto"])
def test_without_a_gate(impl, generator):
    experts = make(FP8_BLOCK, generator, has_gate=False)
    for num_tokens in (2, 20):
        routed = routing(num_tokens, generator)
        x = torch.randn(num_tokens, DIM, generator=generator)
        exact = exact_values(experts, x, routed, "relu2")
        found = run(experts, impl, x, routed, "relu2")
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


def test_second_derivatives_are_refused_also_of_named_inputs(generator):
    ids, weights = routing(20, generator)
    x = torch.linspace(-1, 1, 20 * DIM).sin().view(20, DIM).requires_grad_()
    experts = make(MXFP4, generator)
    out = expert_mlp(x, ids, weights.requires_grad_(), experts, activation="silu")
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    for again in (x, weights):
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(grad.square().sum(), again, retain_graph=True)


@pytest.mark.parametrize("impl", ["triton", "auto"])
def test_gradients_of_rows_and_gate_weights(impl, generator):
    experts = make(MXFP4, generator, slots=[1, 0, -1, 3])
    ids, weights = routing(20, generator)
    ids = ids.where(ids != 2, -1)
    results = []
    for dtype, kind, name in (
        (torch.float32, experts, impl),
        (torch.float64, values(experts, torch.float64), "reference"),
    ):
        device = DEVICE if name == "triton" else "cpu"
        kind = moved(experts) if name == "triton" else kind
        x = torch.linspace(-1, 1, 20 * DIM).sin().view(20, DIM).to(device, dtype).requires_grad_()
        own = weights.to(device, dtype, copy=True).requires_grad_()
        out = expert_mlp(x, ids.to(device), own, kind, activation="silu", impl=name)  # type: ignore[arg-type]
        out.square().sum().backward()
        assert x.grad is not None
        assert own.grad is not None
        results.append([tensor.detach().double().cpu() for tensor in (out, x.grad, own.grad)])
    for found, exact in zip(*results, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)


def test_a_function_as_activation_takes_the_values(generator):
    experts = make(INT4, generator, slots=[4, 3, -1])
    routed = routing(6, generator)
    x = torch.randn(6, DIM, generator=generator)

    def gate(z: Tensor) -> Tensor:
        first, second = z.chunk(2, dim=-1)
        return torch.sin(first) * second

    found = run(experts, "auto", x, routed, gate)
    exact = run(experts, "reference", x, routed, gate)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def test_halves_share_scales_of_blocks_that_cross_the_middle(generator):
    for rows, group in ((144, 128), (96, 32), (60, 0), (256, 128), (10, 10)):
        kind = replace(FP8_BLOCK, group_rows=group)
        matrix = random_matrix(kind, rows, 48, generator)
        whole = QuantizedStack(kind, 48, matrix.codes[None], matrix.scales[None])
        halves = torch.cat([half.matrix(0).dequantize() for half in whole.halves()])
        assert torch.equal(halves, matrix.dequantize())
    with pytest.raises(ValueError, match="scales of their own"):
        whole.alternating()


def test_what_triton_cannot_read_is_computed_otherwise_or_refused(generator):
    kind = WeightFormat("uint4", "bf16", group_cols=8)
    experts, routed = make(kind, generator), routing(4, generator)
    x = torch.randn(4, DIM, generator=generator)
    with pytest.raises(ValueError, match=r"impl='triton' cannot .* groups of 8"):
        run(experts, "triton", x, routed, "silu")
    exact = exact_values(experts, x, routed, "silu")
    found = run(experts, "auto", x, routed, "silu")
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


def test_parts_that_do_not_fit_are_refused(generator):
    experts = make(MXFP4, generator)
    x, routed = torch.zeros(4, DIM), routing(4, generator)
    with pytest.raises(ValueError, match="down must be"):
        replace(experts, down=experts.up)
    with pytest.raises(ValueError, match="neither has"):
        replace(experts, up_bias=None)
    with pytest.raises(ValueError, match="one dtype"):
        replace(experts, down_bias=torch.zeros(5, DIM))
    with pytest.raises(ValueError, match="slot_of_expert must be"):
        replace(experts, slot_of_expert=torch.zeros(5))
    with pytest.raises(ValueError, match=r"x must be \[\*, 96\]"):
        expert_mlp(x[:, :95], *routed, experts, activation="silu")
    with pytest.raises(ValueError, match="ids must be in"):
        expert_mlp(x, routed[0] + 9, routed[1], experts, activation="silu", checks_ids=True)
