"""`expert_ffn` against fp64, and the promise that an expert's result depends on itself alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp import ACTIVATION_NAMES, ExpertWeights, expert_ffn
from moe_runtime.kernels.expert_mlp.separate_experts import ExpertImpl, activation_function
from moe_runtime.kernels.linear import ROWS_PER_CALL, native_row_limit

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
DTYPES = list(UNIT_ROUNDOFF)


def ffn(*arguments: Any, activation: Any = "silu", impl: Any = "auto") -> None:
    expert_ffn(*arguments, activation=activation, impl=impl)


@dataclass(kw_only=True)
class Layer:
    """A few experts with rows for each."""

    experts: list[ExpertWeights]
    counts: list[int]
    x_TD: Tensor
    token_ids_R: Tensor
    destinations_R: Tensor

    def rows(self) -> tuple[list[int], Tensor, Tensor]:
        return self.counts, self.token_ids_R, self.destinations_R

    def run(self, impl: ExpertImpl, activation: Any = "silu") -> Tensor:
        """The output in a buffer poisoned with NaN and two rows larger than needed."""
        shape = (len(self.destinations_R) + 2, self.experts[0].shape.dim_out)
        out = torch.full(shape, torch.nan, dtype=self.x_TD.dtype)
        ffn(self.x_TD, self.experts, *self.rows(), out, activation=activation, impl=impl)
        return out

    def exact(self, activation: str = "silu") -> Tensor:
        """The rows of `out` that are written, in fp64."""
        experts = [as_fp64(weights) for weights in self.experts]
        wide = replace(self, x_TD=self.x_TD.double(), experts=experts)
        return wide.run("reference", activation)[: len(self.destinations_R)]


def as_fp64(weights: ExpertWeights) -> ExpertWeights:
    names = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
    tensors = {name: getattr(weights, name) for name in names}
    return ExpertWeights(**{k: None if v is None else v.double() for k, v in tensors.items()})


def make_layer(
    generator: torch.Generator,
    dtype: torch.dtype,
    *,
    counts: Sequence[int] = (3, 0, 9, 1, 7, 17),
    dim: int = 130,
    hidden: int = 63,
    x_dtype: torch.dtype | None = None,
    gate: bool = True,
    bias: bool = True,
    num_tokens: int = 20,
) -> Layer:
    def tensor(*shape: int) -> Tensor:
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    experts = [
        ExpertWeights(
            tensor(hidden, dim) if gate else None,
            tensor(hidden, dim),
            tensor(dim, hidden),
            tensor(hidden) if gate and bias else None,
            tensor(hidden) if bias else None,
            tensor(dim) if bias else None,
        )
        for _ in counts
    ]
    num_rows = sum(counts)
    return Layer(
        experts=experts,
        counts=list(counts),
        x_TD=torch.randn(num_tokens, dim, generator=generator).to(x_dtype or dtype),
        token_ids_R=torch.randint(0, num_tokens, (num_rows,), generator=generator),
        destinations_R=torch.randperm(num_rows, generator=generator),
    )


def relative_error(y: Tensor, exact: Tensor) -> float:
    return ((y.double() - exact).norm() / exact.norm()).item()


def assert_as_good_as_torch(layer: Layer, activation: str = "silu") -> None:
    """Within twice the error that torch's own operations make in this type, and one rounding."""
    exact = layer.exact(activation)
    num_rows = len(exact)
    native, eager = layer.run("native", activation), layer.run("torch", activation)
    assert torch.isnan(native[num_rows:]).all(), "rows that are no destination were written"
    allowed = 2 * (relative_error(eager[:num_rows], exact) + UNIT_ROUNDOFF[layer.x_TD.dtype])
    assert relative_error(native[:num_rows], exact) <= allowed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
@pytest.mark.parametrize("gate", [True, False], ids=["gate", "no-gate"])
def test_native_against_fp64(isa, dtype, activation, gate, generator):
    layer = make_layer(generator, dtype, gate=gate, bias=activation != "relu")
    assert_as_good_as_torch(layer, activation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "hidden"), [(1, 1), (7, 1), (1, 63), (63, 1000), (1000, 130)])
def test_native_odd_sizes(isa, dtype, dim, hidden, generator):
    assert_as_good_as_torch(make_layer(generator, dtype, dim=dim, hidden=hidden, counts=(1, 6, 33)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_native_fp32_rows_with_narrow_weights(isa, dtype, generator):
    layer = make_layer(generator, dtype, x_dtype=torch.float32)
    # torch computes this in fp32 throughout: the narrow weights are exact, so fp32 errors remain
    assert_as_good_as_torch(layer)


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_activations_over_the_whole_range(isa, activation):
    """Weights of one let every value through an activation; fp64 is the judge.

    Allowed are four units in the last place of the result, what saturates below exp(-87), and for
    the two that are x times a difference from 1 on the left, two units of that 1.
    """
    one = torch.ones(1, 1)
    values = torch.cat([torch.linspace(-100, 100, 4001), torch.tensor([0.0, 1e-30, -1e-6])])
    out = torch.empty(len(values), 1)
    rows = torch.arange(len(values))
    weights = ExpertWeights(None, one, one)
    given = values[:, None], [weights], [len(values)], rows, rows, out
    ffn(*given, activation=activation, impl="native")
    exact = activation_function(activation)(None, values.double())
    allowed = 4 * 2.0**-23 * exact.abs() + 2e-36
    if activation.startswith("gelu"):
        allowed = allowed + 2 * 2.0**-24 * values.double().abs()
    assert ((out[:, 0].double() - exact).abs() <= allowed).all()


def test_views_of_fused_and_interleaved_tensors(isa, generator):
    fused = torch.randn(2 * 40, 50, generator=generator).bfloat16()
    down = torch.randn(30, 40, generator=generator).bfloat16()
    x = torch.randn(5, 50, generator=generator).bfloat16()
    rows = torch.arange(5)
    for gate, up in ((fused[:40], fused[40:]), (fused[0::2], fused[1::2])):
        results = []
        for weights in (
            ExpertWeights(gate, up, down),
            ExpertWeights(gate.clone(), up.clone(), down.clone()),
        ):
            out = torch.empty(5, 30, dtype=torch.bfloat16)
            ffn(x, [weights], [5], rows, rows, out, impl="native")
            results.append(out)
        assert torch.equal(*results)


def test_strided_rows(isa, generator):
    layer = make_layer(generator, torch.bfloat16, dim=40, hidden=30)
    expected = layer.run("native")
    wide = torch.randn(20, 100, generator=generator).bfloat16()
    wide[:, 3:43] = layer.x_TD
    layer.x_TD = wide[:, 3:43]
    out = torch.full((len(expected), 90), torch.nan, dtype=torch.bfloat16)
    rows = layer.counts, layer.token_ids_R.tolist(), layer.destinations_R.tolist()
    ffn(layer.x_TD, layer.experts, *rows, out[:, 11:51], impl="native")
    written = len(layer.destinations_R)
    assert torch.equal(out[:written, 11:51], expected[:written])
    assert torch.isnan(out[:, :11]).all()
    assert torch.isnan(out[:, 51:]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", ["auto", "native", "torch"])
def test_an_expert_does_not_depend_on_the_others(library, dtype, impl, generator):
    """Alone, in any order, in any grouping, with any number of threads: the same bits.

    One expert has more rows than the native kernel takes, or than it takes in one call.
    """
    many = min(native_row_limit(library, dtype), ROWS_PER_CALL) + 1
    layer = make_layer(generator, dtype, counts=(3, 1, many, 0, 9, 2), dim=50, hidden=70)
    expected = layer.run(impl)[: sum(layer.counts)]
    starts = [sum(layer.counts[:e]) for e in range(len(layer.counts))]
    for num_threads in (1, 2, 3):
        library.set_num_threads(num_threads)
        for groups in ([[0], [1], [2], [3], [4], [5]], [[5, 2, 0], [4, 3, 1]], [[4, 2], [0, 1, 5]]):
            out = torch.full_like(expected, torch.nan)
            for group in groups:
                rows = [torch.arange(starts[e], starts[e] + layer.counts[e]) for e in group]
                experts, counts = (
                    [every[e] for e in group] for every in (layer.experts, layer.counts)
                )
                places = (
                    torch.cat([every[r] for r in rows])
                    for every in (layer.token_ids_R, layer.destinations_R)
                )
                ffn(layer.x_TD, experts, counts, *places, out, impl=impl)
            assert torch.equal(out, expected)


def test_a_function_as_activation(library, generator):
    """The names are shorthands for functions; `auto` takes both."""
    layer = make_layer(generator, torch.float32)
    exact = layer.exact("silu")
    seen: list[tuple[int, ...]] = []

    def gated(gate: Tensor | None, up: Tensor) -> Tensor:
        assert gate is not None
        seen.append(tuple(gate.shape))
        return torch.nn.functional.silu(gate) * up

    for impl in ("auto", "native", "torch", "reference"):
        assert relative_error(layer.run(impl, gated)[: len(exact)], exact) <= 1e-6
        assert seen == [(count, 63) for count in layer.counts if count]
        seen.clear()


def test_nothing_to_do(library, generator):
    x, out = torch.ones(2, 8), torch.full((3, 8), torch.nan)
    ffn(x, [], [], [], [], out)
    weights = ExpertWeights(None, torch.ones(4, 8), torch.ones(8, 4))
    for impl in ("auto", "native", "torch", "reference"):
        ffn(x, [weights, weights], [0, 0], [], [], out, impl=impl)
    assert torch.isnan(out).all()


@pytest.mark.parametrize("impl", ["auto", "native"])
@pytest.mark.parametrize(("token", "destination"), [(2, 0), (-1, 0), (0, 3), (0, -1)])
def test_row_numbers_out_of_range(library, impl, token, destination):
    weights = ExpertWeights(None, torch.ones(4, 8), torch.ones(8, 4))
    with pytest.raises(ValueError, match="token_ids must be in"):
        ffn(torch.ones(2, 8), [weights], [1], [token], [destination], torch.ones(3, 8), impl=impl)


def test_arguments_that_do_not_fit():
    weights = ExpertWeights(None, torch.ones(4, 8), torch.ones(8, 4))
    other = ExpertWeights(None, torch.ones(5, 8), torch.ones(8, 5))
    x, out = torch.ones(2, 8), torch.ones(3, 8)
    for arguments, message in (
        ((x, [weights], [1, 1], [0], [0], out), "one count per expert"),
        ((x, [weights], [2], [0], [0], out), "add up to 2 rows"),
        ((x, [weights, other], [1, 0], [0], [0], out), "one shape"),
        ((x[:, :7], [weights], [1], [0], [0], out), "x must be"),
        ((x, [weights], [1], [0], [0], out[:, :7]), "out must be"),
        ((x, [weights], [1], [0], [0], out.half()), "dtype of x"),
    ):
        with pytest.raises(ValueError, match=message):
            ffn(*arguments)
    for name in ("activation", "impl"):
        with pytest.raises(ValueError, match=f"{name} must be one of"):
            ffn(x, [weights], [1], [0], [0], out, **{name: "swish"})


def test_weights_that_do_not_fit():
    up, down = torch.ones(4, 8), torch.ones(8, 4)
    for arguments, message in (
        ((None, torch.ones(4), down), "two dimensions"),
        ((None, up, torch.ones(8, 5)), "down must be"),
        ((torch.ones(3, 8), up, down), "gate must be"),
        ((None, up, down, torch.ones(4)), "without gate"),
        ((None, up, down, None, torch.ones(5)), "up_bias must be"),
        ((None, up, down.half()), "one dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            ExpertWeights(*arguments)


def test_transposed_weights_take_torch(library, generator):
    up = torch.randn(8, 4, generator=generator).T
    weights = ExpertWeights(None, up, torch.ones(8, 4))
    out = torch.empty(1, 8)
    x = torch.randn(1, 8, generator=generator)
    ffn(x, [weights], [1], [0], [0], out, activation="relu")
    assert torch.allclose(out, torch.relu(x @ up.T).sum().expand(1, 8), rtol=1e-5)
    with pytest.raises(ValueError, match="unit stride"):
        ffn(x, [weights], [1], [0], [0], out, activation="relu", impl="native")
