"""Experts spread over processes and trained off memory: one process, whatever their number."""

import shutil
import time
from collections.abc import Callable

import pytest
import torch
from offloaded_models import freeze, rate_of, stack, train_in_memory
from parallel_offload import (
    STEPS,
    after_a_norm_too_early,
    expert_key,
    inputs_of,
    other_bits_than_in_memory,
    refusals,
    train_offloaded_over_ranks,
    train_until_failure,
    with_a_bad_gradient,
    without_tokens,
)
from rank_pool import RankPool
from torch import Tensor

import moe_runtime
from moe_runtime.training.optimizer import DenseAdamW

Ranks = Callable[[int], RankPool]
CLIPPED = moe_runtime.AdamW(weight_decay=0.1, clip_norm=0.05)
PLAIN = moe_runtime.AdamW(weight_decay=0.1)
# A gradient is a sum of fewer than 128 terms below 1, whose order is another; AdamW multiplies its
# error by at most rate / eps, and every step adds such an error to the parameters.
TOLERANCE = 128 * 2.0**-53 * sum(rate_of(step) for step in range(STEPS)) / PLAIN.eps


def in_one_process(settings: moe_runtime.AdamW, frozen: str | None = None) -> dict[str, Tensor]:
    """torch's AdamW on stacked parameters in memory, by the names of `own_experts`."""
    model = stack(dtype=torch.float64, bias=True)
    freeze(model, frozen)
    train_in_memory(model, inputs_of(), settings)
    return by_expert(dict(model.named_parameters()))


def by_expert(named: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, parameter in named.items():
        if ".experts." in name:
            found |= {f"{name}.{e}": tensor for e, tensor in enumerate(parameter.detach())}
        else:
            found[name] = parameter.detach()
    return found


@pytest.fixture(scope="module")
def clipped() -> dict[str, Tensor]:
    return in_one_process(CLIPPED)


def assert_equal(parts: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    """All of the model is there, once or with the same bits, and is what one process has."""
    together: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(together.setdefault(name, tensor), tensor), name
    assert together.keys() == expected.keys()
    for name, tensor in together.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=TOLERANCE, msg=name)


def test_what_is_frozen_is_so_in_every_process(tmp_path, ranks):
    frozen = "layers.0.experts.down_proj"
    options = (STEPS, True, torch.float64, frozen)
    found = ranks(2).run(train_offloaded_over_ranks, tmp_path, CLIPPED, 0.5, *options)
    assert_equal([parameters for parameters, _, _ in found], in_one_process(CLIPPED, frozen))
    first = by_expert(dict(stack(dtype=torch.float64, bias=True).named_parameters()))
    kept = {name: t for part, _, _ in found for name, t in part.items() if name.startswith(frozen)}
    assert kept
    assert all(torch.equal(tensor, first[name]) for name, tensor in kept.items())


@pytest.mark.parametrize(("size", "share", "grouped"), [(2, 0.0, True), (4, 0.5, False)])
def test_processes_train_what_one_trains(size, share, grouped, clipped, tmp_path, ranks):
    """Six experts on four ranks: the last rank has none, and others get no token in some steps."""
    found = ranks(size).run(train_offloaded_over_ranks, tmp_path, CLIPPED, share, STEPS, grouped)
    assert_equal([parameters for parameters, _, _ in found], clipped)
    assert all(part[1:] == found[0][1:] for part in found), "losses and norms are everybody's"
    held = [{expert_key(n) for n in part if ".experts." in n} for part, _, _ in found]
    assert [len(keys) for keys in held] == ([9, 9] if size == 2 else [6, 6, 6, 0])


@pytest.mark.parametrize(
    "settings",
    [
        moe_runtime.AdamW(clip_norm=0.05, clip="delayed"),
        moe_runtime.AdamW(untouched="sparse_skip", loss_scale=256.0, clip_norm=0.05),
    ],
    ids=["delayed clipping", "sparse_skip and a loss scale"],
)
def test_other_semantics(settings, tmp_path, ranks):
    """Against one process with the same settings, whose own tests say what they mean."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    expected, losses, norms = train_offloaded_over_ranks(tmp_path / "one", settings, 0.3)
    found = ranks(2).run(train_offloaded_over_ranks, tmp_path / "two", settings, 0.3)
    assert_equal([parameters for parameters, _, _ in found], expected)
    assert found[0][1] == pytest.approx(losses, rel=1e-9)
    assert found[0][2] == pytest.approx(norms, rel=1e-9)


def test_same_bits_as_in_the_memory_of_these_processes(tmp_path, ranks):
    assert ranks(2).run(other_bits_than_in_memory, tmp_path, 0.3) == [[], []]


def test_a_process_without_tokens_keeps_the_others_company(tmp_path, ranks):
    found = ranks(2).run(without_tokens, tmp_path)
    model = stack(dtype=torch.float64, bias=True)
    named = dict(model.named_parameters())
    adamw = DenseAdamW(
        named, lr=1.0, betas=PLAIN.betas, eps=PLAIN.eps, weight_decay=PLAIN.weight_decay
    )
    for step, window in enumerate(inputs_of(3)):
        # the mean over the processes, of which one has all
        (model(torch.cat(window)).square().sum() / 2).backward()
        adamw.step(rate_of(step))
        adamw.forget()
    assert_equal(found, by_expert(named))


def test_goes_on_with_another_number_of_processes(clipped, tmp_path, ranks):
    """Four processes, two, one, and two again, each with another budget; old files are removed."""
    ranks(4).run(train_offloaded_over_ranks, tmp_path, CLIPPED, 0.0, 1)
    assert {path.name for path in tmp_path.glob("rank-*")} == {f"rank-{r}-of-4" for r in range(4)}
    ranks(2).run(train_offloaded_over_ranks, tmp_path, CLIPPED, 1.0, 2)
    assert {path.name for path in tmp_path.glob("rank-*")} == {"rank-0-of-2", "rank-1-of-2"}
    train_offloaded_over_ranks(tmp_path, CLIPPED, 0.4, 3)
    assert not list(tmp_path.glob("rank-*"))
    found = ranks(2).run(train_offloaded_over_ranks, tmp_path, CLIPPED, 0.4)
    assert_equal([parameters for parameters, _, _ in found], clipped)
    assert not list(tmp_path.glob("*.records"))


def test_files_of_a_process_that_are_missing_are_named(tmp_path, ranks):
    ranks(2).run(train_offloaded_over_ranks, tmp_path, CLIPPED, 0.0, 1)
    shutil.rmtree(tmp_path / "rank-1-of-2")
    with pytest.raises(moe_runtime.errors.CheckpointError, match=r"rank-1-of-2.* is missing"):
        train_offloaded_over_ranks(tmp_path, CLIPPED, 0.4)


def test_a_bad_gradient_of_one_process_is_a_step_of_none(tmp_path, ranks):
    for names, skipped, is_undone in ranks(2).run(with_a_bad_gradient, tmp_path, 1):
        assert skipped == 1
        assert is_undone
        assert any(".experts." in name for name in names)
        assert "first.weight" in names


def test_a_killed_process_ends_all_and_the_last_checkpoint_goes_on(clipped, tmp_path):
    pool = RankPool(2)
    try:
        pool.start(train_until_failure, tmp_path, CLIPPED)
        while not (tmp_path / "checkpoint.pt").exists():
            time.sleep(0.01)
        pool.processes[1].kill()
        results = pool.collect()
    finally:
        pool.close()
    assert results[1] == (False, "rank 1 ended")
    is_ok, message = results[0]
    assert is_ok, message
    assert message.startswith("RankFailureError: rank 1 of 2 has ended"), message
    parameters, _, _ = train_offloaded_over_ranks(tmp_path, CLIPPED, 0.4)
    assert_equal([parameters], clipped)


def test_gradients_behind_the_norm_are_refused(tmp_path, ranks):
    """They would be of each process alone."""
    model = stack(dtype=torch.float64, bias=True)
    train_in_memory(model, inputs_of(1), PLAIN)
    found = ranks(2).run(after_a_norm_too_early, tmp_path)
    assert_equal(found, by_expert(dict(model.named_parameters())))


def test_what_cannot_be_trained_so_is_refused(tmp_path, ranks):
    (messages, _) = ranks(2).run(refusals, tmp_path)
    assert messages == [
        "layers.0.experts is spread over 2 processes, `groups` has 1; give the model and "
        "offload_training the same groups",
        "experts that are trained offloaded must lie in one process each; the layout (tp1 cp1 dp2 "
        "pp1 | etp1 ep1 edp2 pp1) has 2 copies",
        "layers.0.experts: experts that are trained offloaded must lie in one process each, "
        "without slices and copies",
        "layers.0.experts is spread over 1 processes, `groups` has 2; give the model and "
        "offload_training the same groups",
    ]
