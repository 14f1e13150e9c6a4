"""`choose_experts`: the Triton kernel against the specification, and both against torch's topk."""

import itertools

import pytest
import torch
from torch import Tensor

from moe_runtime.kernels.decode_step.expert_choice import (
    SCORES,
    ChoiceForm,
    choose_experts,
    choose_experts_reference,
)

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32_EPS = torch.finfo(torch.float32).eps


def triton(logits: Tensor, num_choices: int, form: ChoiceForm, **options) -> tuple[Tensor, Tensor]:
    bias = options.pop("bias_E", None)
    bias = None if bias is None else bias.to(DEVICE)
    found = choose_experts(
        logits.to(DEVICE), num_choices, form, bias_E=bias, impl="triton", **options
    )
    return found[0].cpu(), found[1].cpu()


def draw(num_tokens: int, num_experts: int, dtype: torch.dtype) -> Tensor:
    """Different numbers in a row, whatever they are rounded to."""
    generator = torch.Generator().manual_seed(num_tokens * 1000 + num_experts)
    rows = [torch.randperm(num_experts, generator=generator) for _ in range(num_tokens)]
    return ((torch.stack(rows) - num_experts // 2) * (9 / num_experts)).to(dtype)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_choices"),
    [(1, 128, 8), (16, 6, 2), (3, 1, 1), (2, 500, 16), (5, 17, 17 - 4)],
)
def test_against_the_specification(dtype, num_tokens, num_experts, num_choices):
    logits = draw(num_tokens, num_experts, dtype)
    bias = torch.linspace(-0.3, 0.3, num_experts)
    for scores, normalises, out in itertools.product(SCORES, (False, True), {dtype, torch.float32}):
        form = ChoiceForm(scores, normalises, 1.0 if normalises else 2.5, 1e-3 * normalises)
        given = {"bias_E": bias if scores == "sigmoid" else None, "dtype": out}
        ids, weights = triton(logits, num_choices, form, **given)
        expected = choose_experts_reference(logits.double().float(), num_choices, form, **given)
        assert weights.dtype == out
        if scores == "sigmoid":  # values with a bias may all but agree, and change places
            ranked = logits.float().sigmoid() + bias
            values = ranked.gather(1, ids), ranked.gather(1, expected[0])
            torch.testing.assert_close(*values, rtol=8 * FP32_EPS, atol=8 * FP32_EPS)
            expected = expected[0], expected[1].where(ids == expected[0], weights)
        else:
            assert torch.equal(ids, expected[0])
        # exponentials of at most 9 are good to a few units in the last place times that, sums and
        # quotients to as many units as there are additions one behind the other; then one rounding
        bound = 64 * FP32_EPS + (torch.finfo(out).eps if out != torch.float32 else 0)
        torch.testing.assert_close(weights, expected[1], rtol=bound, atol=0)


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("scores", SCORES)
def test_equals_go_by_their_numbers_and_nan_comes_first_as_in_topk(impl, scores):
    logits = torch.tensor(
        [
            [1.0, 3.0, 3.0, 0.0, 3.0, -1.0],
            [0.0, -0.0, 0.0, -0.0, -1.0, -2.0],
            [-torch.inf, 5.0, torch.nan, 1.0, torch.inf, -torch.nan],
            [-torch.inf, -torch.inf, -torch.inf, -torch.inf, -torch.inf, -5.0],
        ]
    )
    ids, weights = choose_experts(logits.to(DEVICE), 4, ChoiceForm(scores), impl=impl)
    expected = [[1, 2, 4, 0], [0, 1, 2, 3], [2, 5, 4, 1], [5, 0, 1, 2]]
    assert ids.tolist() == expected
    assert bool(weights[2].isnan().all()) == (scores != "sigmoid")
    assert not weights[[0, 1, 3]].isnan().any()
    values = logits.topk(4).values
    torch.testing.assert_close(logits.gather(1, ids.cpu()), values, equal_nan=True, rtol=0, atol=0)


def test_a_token_does_not_depend_on_the_others_or_on_strides():
    logits = draw(7, 60, torch.bfloat16)
    form = ChoiceForm("softmax", normalises=True)
    together = triton(logits, 4, form)
    wide = torch.full((7, 100), torch.nan, dtype=torch.bfloat16)
    wide[:, :60] = logits
    for given in (wide[:, :60], logits.T.contiguous().T):
        assert all(map(torch.equal, triton(given, 4, form), together))
    for token in range(7):
        alone = triton(logits[token : token + 1], 4, form)
        assert all(map(torch.equal, alone, (part[token : token + 1] for part in together)))
    ids, weights = triton(logits[:0], 4, form)
    assert ids.shape == weights.shape == (0, 4)


def test_what_does_not_fit_is_refused():
    form, logits = ChoiceForm("softmax"), torch.zeros(2, 6)
    for bad, num_choices in ((logits[0], 1), (logits, 7), (logits, 0)):
        with pytest.raises(ValueError, match=r"logits must be \[T, E\] with E of at least"):
            choose_experts(bad, num_choices, form)
    with pytest.raises(ValueError, match="scores must be one of softmax, softmax_of_chosen"):
        choose_experts(logits, 1, ChoiceForm("x"))  # type: ignore[arg-type]
    for bias, scores in ((torch.zeros(6), "softmax"), (torch.zeros(5), "sigmoid")):
        with pytest.raises(ValueError, match=r"bias must be \[6\], and is added to sigmoids alone"):
            choose_experts(logits, 1, ChoiceForm(scores), bias_E=bias)
    with pytest.raises(ValueError, match="impl must be one of auto, triton, reference"):
        choose_experts(logits, 1, form, impl="native")  # type: ignore[arg-type]
    for many, num_choices in ((513, 1), (20, 17)):
        with pytest.raises(ValueError, match="up to 512 experts and 16 choices and no gradients"):
            choose_experts(torch.zeros(2, many).to(DEVICE), num_choices, form, impl="triton")
    with pytest.raises(ValueError, match="takes fp32, bf16 or fp16"):
        choose_experts(logits.double().to(DEVICE), 1, form, impl="triton")
