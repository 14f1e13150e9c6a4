"""Loaded models under `torch.autocast` beside transformers: dtypes, values and gradients.

All experts are chosen and the prompt is short, so that no rounding makes a router, or attention
that selects tokens, choose others. Both sides round where autocast rounds, a few hundred times and
in another order here and there: errors are of one size, and twice as large is wrong.
"""

import math
from pathlib import Path
from typing import Any

import moe_families
import pytest
import tiny_checkpoints
import tiny_sizes
import torch
from gradients import loss_of, shared, take_gradients, total_error, trains_all_but_experts
from moe_families import Family

import moe_runtime

FAMILIES = {str(family): family for family in [*moe_families.FAMILIES, *moe_families.ADAPTED]}
FEW = ["MixtralForCausalLM", "GptOssForCausalLM", "NemotronHForCausalLM", "DeepseekV4ForCausalLM"]
DTYPES = [torch.bfloat16, torch.float16]
PROMPT = tiny_checkpoints.PROMPT[:, :6]


@pytest.fixture(autouse=True)
def _chooses_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk"):
        monkeypatch.setitem(tiny_sizes.COMMON, name, tiny_sizes.COMMON["num_experts"])
    monkeypatch.setattr(tiny_checkpoints, "PROMPT", PROMPT)


def models_of(family: Family, folder: Path) -> tuple[Any, Any]:
    """The model that transformers loads in fp32, and ours with as little memory as will do."""
    tiny_checkpoints.save(tiny_checkpoints.tiny_model(family), folder, sharded=False)
    theirs = tiny_checkpoints.model_class_of(family).from_pretrained(folder, dtype=torch.float32)
    with pytest.raises(moe_runtime.CapacityError) as caught:
        moe_runtime.load(folder, device="cpu", dtype="float32", host_memory=1)
    budget = caught.value.smallest_bytes
    assert budget is not None
    ours = moe_runtime.load(folder, device="cpu", dtype="float32", host_memory=budget)
    return theirs.eval(), ours


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize("name", FEW)
def test_autocast_gives_what_transformers_gives(name, tmp_path):
    check_autocast(FAMILIES[name], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES.values(), ids=str)
def test_autocast_of_every_family(family, tmp_path):
    check_autocast(family, tmp_path)


def check_autocast(family: Family, folder: Path) -> None:
    """A prompt, a decode step and a backward pass."""
    theirs, ours = models_of(family, folder)
    logits = tiny_checkpoints.prompt_and_step_logits(theirs, family)
    loss_of(theirs, family, PROMPT).backward()
    gradients = shared(trains_all_but_experts(ours), take_gradients(theirs))
    for dtype in DTYPES:
        found, errors = [], []
        for model in (theirs, ours):
            with torch.autocast("cpu", dtype=dtype):
                given = tiny_checkpoints.prompt_and_step_logits(model, family)
                loss = loss_of(model, family, PROMPT)
            loss.backward()
            found.append(given)
            taken = take_gradients(model)
            away = total_error({name: taken[name] for name in gradients}, gradients)
            errors.append([*map(distance, given, logits), away])
        assert [step.dtype for step in found[1]] == [step.dtype for step in found[0]]
        for theirs_is, ours_is in zip(*errors, strict=True):
            # some families leave the range of fp16 in transformers
            assert ours_is < 2 * theirs_is or not math.isfinite(theirs_is)
    ours.moe.check()
    ours.moe.close()


@pytest.mark.parametrize("name", FEW[:1])
@pytest.mark.parametrize("kept", DTYPES)
def test_autocast_of_a_model_in_half_precision(kept, name, tmp_path):
    """Every pair of the two dtypes: that of the weights and that of autocast."""
    family = FAMILIES[name]
    exact, wide = models_of(family, tmp_path)
    wide.moe.close()
    theirs = tiny_checkpoints.model_class_of(family).from_pretrained(tmp_path, dtype=kept).eval()
    ours = moe_runtime.load(tmp_path, device="cpu", dtype=str(kept).removeprefix("torch."))
    truth = tiny_checkpoints.prompt_and_step_logits(exact, family)
    for dtype in DTYPES:
        with torch.autocast("cpu", dtype=dtype):
            theirs_are = tiny_checkpoints.prompt_and_step_logits(theirs, family)
            ours_are = tiny_checkpoints.prompt_and_step_logits(ours, family)
        for expected, found, logits in zip(theirs_are, ours_are, truth, strict=True):
            assert found.dtype == expected.dtype
            assert distance(found, logits) < 2 * distance(expected, logits)
    ours.moe.close()


@pytest.mark.parametrize("under", [(True, False), (False, True), (True, False, True)])
@torch.no_grad()
def test_a_cache_goes_from_steps_under_autocast_to_steps_without(under, tmp_path):
    """Keys of either dtype are kept as transformers keeps them, which joins them in the wider."""
    theirs, ours = models_of(FAMILIES["MixtralForCausalLM"], tmp_path)
    exact, found = [], []
    for model, steps in ((theirs, [False] * len(under)), (theirs, under), (ours, under)):
        cache, logits, kept = None, [], []
        for number, is_under in enumerate(steps):
            tokens = PROMPT if number == 0 else torch.full((1, 1), 40 + number)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_under):
                out = model(tokens, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
            kept.append([(layer.keys.dtype, layer.values.dtype) for layer in cache.layers])
        exact = exact or logits
        found.append((logits, kept))
    assert found[2][1] == found[1][1]
    for truth, theirs_is, ours_is in zip(exact, found[1][0], found[2][0], strict=True):
        assert ours_is.dtype == theirs_is.dtype
        # a first step without autocast is exact but for the order of sums
        assert distance(ours_is, truth) < max(2 * distance(theirs_is, truth), 1e-5)
    ours.moe.close()
