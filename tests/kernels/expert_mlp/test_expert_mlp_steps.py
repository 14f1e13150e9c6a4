"""What lies around the products in C beside the same in torch, in every pair of types."""

import pytest
import torch
from native_marks import needs_native
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime.kernels.expert_mlp import ActivationSpec, products
from moe_runtime.kernels.expert_mlp.native_path import NativeSteps
from moe_runtime.kernels.expert_mlp.products import Products
from moe_runtime.kernels.expert_mlp.torch_path import TorchSteps
from moe_runtime.kernels.linear import op
from moe_runtime.kernels.native import native_library
from moe_runtime.kernels.operands import GateLayout

HALVES = [torch.float32, torch.bfloat16, torch.float16]
library = native_library()


SILU = ActivationSpec("silu")


def native_steps() -> NativeSteps:
    assert library is not None
    return NativeSteps(library, SILU)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


@needs_native
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("widens", [False, True])
def test_gathered_rows_are_the_tokens_rows(dtype, widens):
    """Also of tokens whose rows do not lie side by side, and in any order."""
    source_TD = torch.randn(9, 70).to(dtype)[:, :37]
    tokens_n = torch.tensor([8, 0, 3, 3, 7])
    out_nD = poisoned(5, 37, dtype=torch.float32 if widens else dtype)
    assert native_steps().gather(source_TD, tokens_n, out_nD) is out_nD
    assert torch.equal(out_nD, source_TD[tokens_n].to(out_nD.dtype))
    assert torch.equal(
        TorchSteps(SILU).gather(source_TD, tokens_n, poisoned(5, 37)), out_nD.float()
    )


@needs_native
@pytest.mark.parametrize("columns", [1, 255, 257, 700])
def test_weighted_sums_of_rows(columns):
    """Whatever the ranges of columns that threads take; a token may have several rows."""
    tokens_n, rows_nD = torch.tensor([2, 0, 2, 5]), torch.randn(4, columns)
    weights_n, start_TD = torch.rand(4), torch.randn(6, columns)
    sums_TD = start_TD.clone()
    native_steps().add_rows(sums_TD, tokens_n, rows_nD, weights_n)
    exact_TD = start_TD.double()
    exact_TD.index_add_(0, tokens_n, weights_n.double()[:, None] * rows_nD.double())
    # two products and two additions of numbers below 8, each rounded once
    assert (sums_TD - exact_TD).abs().max() <= 4 * 8 * 2**-24


@needs_native
@pytest.mark.parametrize("z_dtype", HALVES)
@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("is_concatenated", [True, False])
def test_activation_reads_and_keeps_narrow_preactivations(z_dtype, has_gate, is_concatenated):
    """fp32 work beside pre-activations of another type: kept ones are rounded once, and the way
    back reads them as they were kept, to the bit of the same call on their widened copy."""
    hidden, rows = 530, 5  # more than one piece of a row
    width = hidden * (2 if has_gate else 1)
    layout, steps = GateLayout(has_gate, is_concatenated), native_steps()
    z_nZ, kept_nZ = torch.randn(rows, width), poisoned(rows, width, dtype=z_dtype)
    values_nF, expected_nF = poisoned(rows, hidden), poisoned(rows, hidden)
    steps.activate(z_nZ, layout, values_nF, kept_nZ)
    TorchSteps(SILU).activate(z_nZ, layout, expected_nF)
    assert torch.equal(kept_nZ, z_nZ.to(z_dtype))
    # the exponential of C is exact to 2 units in the last place, about ten roundings follow it
    torch.testing.assert_close(values_nF, expected_nF, rtol=16 * 2**-23, atol=1e-6)

    grad_nF, weights_n = torch.randn(rows, hidden), torch.rand(rows)
    found = []
    for kept in (kept_nZ, kept_nZ.float()):
        hidden_nF, grad_z_nZ = grad_nF.clone(), poisoned(rows, width)
        gate_grad_n = steps.activate_backward(kept, layout, hidden_nF, weights_n, grad_z_nZ)
        found.append((hidden_nF, grad_z_nZ, gate_grad_n))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    hidden_nF, grad_z_nZ = grad_nF.clone(), poisoned(rows, width)
    gate_grad_n = TorchSteps(SILU).activate_backward(
        kept_nZ, layout, hidden_nF, weights_n, grad_z_nZ
    )
    for one, other in zip(found[0], (hidden_nF, grad_z_nZ, gate_grad_n), strict=True):
        # sums of 530 products of either sign keep that many roundings of the largest
        torch.testing.assert_close(one, other, rtol=16 * 2**-23, atol=530 * 2**-23)


class HalfShapes(TorchDispatchMode):
    """Takes down the shapes of products of matrices in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[object, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        operands = [arg for arg in args if isinstance(arg, Tensor)]
        if name in ("mm", "addmm", "linear") and operands[-1].dtype == torch.bfloat16:
            self.found.add((name, *(tuple(operand.shape) for operand in operands)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dim_in", [24, 65])
def test_products_in_half_precision_have_few_shapes_whatever_the_rows(dim_in, monkeypatch):
    """oneDNN keeps code for each shape; an expert in training has other rows in every step."""
    monkeypatch.setattr(products, "keeps_code", lambda x: x.dtype == torch.bfloat16)
    for module in (products, op):
        monkeypatch.setattr(module, "SMALL_WEIGHT", 16 * 64)
    generator = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(16, dim_in, generator=generator).bfloat16() for _ in range(2))
    shapes = []
    for num_rows in (2, 5, 15, 600, 1000):
        x = torch.randn(num_rows, dim_in, generator=generator).bfloat16()
        grad = torch.randn(num_rows, 16, generator=generator).bfloat16()
        out, grad_x, summed = torch.empty_like(grad), torch.empty_like(x), gradient.clone()
        with HalfShapes() as seen:
            Products().forward(x, weight, None, out)
            Products().backward(grad, weight, grad_x)
            Products().outer(grad, x, summed, is_first=False)
        shapes.append(seen.found)
        for found, left, right, added in (
            (out, x, weight.T, 0),
            (grad_x, grad, weight, 0),
            (summed, grad.T, x, gradient.double()),
        ):
            expected = left.double() @ right.double() + added
            # sums in fp32, in any order, then one rounding to bf16 (2**-9 of it)
            bound = left.shape[1] * 2**-23 * (left.abs().double() @ right.abs().double())
            assert ((found.double() - expected).abs() <= expected.abs() * 2**-8 + bound).all()
    small = weight.numel() <= products.SMALL_WEIGHT
    assert len(shapes[0]) == (0 if small else 3)
    assert shapes[0] == shapes[1] == shapes[2]
    # 600 rows are portions of 512 and 96, and 1000 of 512 and 512, or sums over 768 and 1024 rows
    assert len(set().union(*shapes)) == (0 if small else 3 + 6)


@pytest.mark.parametrize("most", [2048, 4096, 40])
def test_code_of_experts_is_counted_for_every_shape_that_training_meets(most, monkeypatch):
    for module in (products, op):
        monkeypatch.setattr(module, "keeps_code", lambda x: x.dtype == torch.bfloat16)
        monkeypatch.setattr(module, "native_library", lambda: None)
    dim_in = products.SMALL_WEIGHT // 16 + 1
    weight = torch.empty(16, dim_in, dtype=torch.bfloat16, device="meta")
    with HalfShapes() as seen:
        for num_rows in {*range(1, min(most, 520), 5), *range(520, most, 99), most}:
            x, grad = weight.new_empty(num_rows, dim_in), weight.new_empty(num_rows, 16)
            Products().forward(x, weight, None, torch.empty_like(grad))
            Products().backward(grad, weight, torch.empty_like(x))
            Products().outer(grad, x, torch.empty_like(weight), is_first=True)
    counted = products.experts_code_bytes(
        [weight.shape, (16,), (8, 8)], torch.bfloat16, most, has_backward=True, is_trained=True
    )
    assert counted == len(seen.found) * op.KEPT_CODE_BYTES
    assert len(seen.found) < 50
    assert not products.experts_code_bytes(
        [weight.shape], torch.float32, most, has_backward=True, is_trained=True
    )
