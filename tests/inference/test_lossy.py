"""Lossy rules for steps of a few tokens: choices, results and refusals."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moe_families import Family
from tiny_checkpoints import PROMPT, experts_modules, save, tiny_model
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

import moe_runtime
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.inference.known_classes import router_form
from moe_runtime.inference.lossy import MOST_TOKENS, LossyRules, MissRules, ResidentsFirst
from moe_runtime.types import ExpertKey

NUM_EXPERTS, NUM_CHOICES, WIDTH = 9, 4, 24
FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", {"num_experts_per_tok": 3})


class FakeStore:
    """Counts, and has some experts."""

    def __init__(self, resident: set[int]) -> None:
        self.resident = resident
        self.replaced = self.skipped = 0

    def missing(self, keys: list[ExpertKey]) -> list[ExpertKey]:
        return [key for key in keys if key.expert not in self.resident]

    def count(self, *, replaced: int = 0, skipped: int = 0) -> None:
        self.replaced += replaced
        self.skipped += skipped


def router_of(kind: type[nn.Module], *, norms: bool = True) -> Any:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    settings: dict[str, Any] = dict.fromkeys(names, NUM_EXPERTS)
    settings |= {"hidden_size": WIDTH, "num_experts_per_tok": NUM_CHOICES, "n_group": 1}
    settings |= {"topk_group": 1, "norm_topk_prob": norms, "routed_scaling_factor": 1.5}
    torch.manual_seed(3)
    router = kind(SimpleNamespace(**settings)).eval().requires_grad_(False)
    for tensor in (*router.parameters(), *router.buffers()):
        nn.init.normal_(tensor, std=0.3)
    return router


def scores_of(router: Any, logits_E: Tensor) -> tuple[Tensor, Tensor]:
    """The scores for ranking and for weighing, in fp64."""
    if isinstance(router, DeepseekV3TopkRouter):
        unbiased = 1 / (1 + (-logits_E.double()).exp())
        return unbiased + router.e_score_correction_bias.double(), unbiased
    powers = logits_E.double().exp()
    return powers / powers.sum(), powers / powers.sum()


def best_sets(router: Any, logits_E: Tensor, held: set[int], margin: float) -> tuple[int, ...]:
    """The experts of a token, by trying all sets with its best expert."""
    ranked, unbiased = scores_of(router, logits_E)
    plain = ranked.topk(NUM_CHOICES).indices
    raised = ranked.clone()
    raised[[*held]] += margin * unbiased[plain].sum()
    sets = itertools.combinations(range(NUM_EXPERTS), NUM_CHOICES)
    with_best = [one for one in sets if int(ranked.argmax()) in one]
    return max(with_best, key=lambda one: float(raised[[*one]].sum()))


def weights_of(router: Any, logits_E: Tensor, ids: Tensor) -> Tensor:
    found = scores_of(router, logits_E)[1][ids]
    if isinstance(router, DeepseekV3TopkRouter):
        return found / found.sum() * 1.5
    is_normed = isinstance(router, GptOssTopKRouter) or router.norm_topk_prob
    return found / found.sum() if is_normed else found


@pytest.mark.parametrize(
    ("kind", "norms", "margin"),
    [
        (Qwen3MoeTopKRouter, True, 0.02),
        (OlmoeTopKRouter, False, 0.3),
        (GptOssTopKRouter, True, 1.0),
        (DeepseekV3TopkRouter, True, 0.02),
        (DeepseekV3TopkRouter, True, 1.0),
    ],
)
def test_residents_are_chosen_as_by_brute_force(
    kind: type[nn.Module], norms: bool, margin: float
) -> None:
    router = router_of(kind, norms=norms)
    form = router_form(router)
    assert form is not None
    drawn = torch.Generator().manual_seed(7)
    total = 0
    for _ in range(20):
        x = torch.randn(3, WIDTH, generator=drawn)
        resident = set(torch.randperm(NUM_EXPERTS, generator=drawn)[:4].tolist())
        store: Any = FakeStore(resident)
        plain = router(x)
        handle = router.register_forward_hook(ResidentsFirst(store, 0, form, margin))
        logits, weights, ids = router(x)
        handle.remove()
        assert torch.equal(logits, plain[0])
        held = resident | {int(scores_of(router, row)[0].argmax()) for row in logits}
        for row in range(len(x)):
            expected = best_sets(router, logits[row], held, margin)
            assert set(ids[row].tolist()) == set(expected)
            # fp32: a softmax or sigmoids, and one division
            wanted = weights_of(router, logits[row], ids[row]).to(weights.dtype)
            torch.testing.assert_close(weights[row], wanted, rtol=1e-5, atol=1e-6)
        assert store.replaced == sum(
            len(set(now.tolist()) - set(before.tolist()))
            for now, before in zip(ids, plain[2], strict=True)
        )
        total += store.replaced
    assert total > 0


def test_prompts_and_gradients_keep_the_choice() -> None:
    router, store = router_of(Qwen3MoeTopKRouter), FakeStore(set())
    form: Any = router_form(router)
    x = torch.randn(MOST_TOKENS + 1, WIDTH)
    plain = router(x)
    store.resident = set(range(0, NUM_EXPERTS, 2))
    router.register_forward_hook(ResidentsFirst(store, 0, form, 1.0))  # type: ignore[arg-type]
    assert all(map(torch.equal, router(x), plain))
    router(x[:3].requires_grad_())
    assert store.replaced == 0
    router(x[:3].detach())
    assert store.replaced > 0


def test_light_choices_of_missing_experts_only() -> None:
    store: Any = FakeStore({0})
    light = MissRules(store, 0, 0.3, stands_in=False)
    # expert 2 matters to the second token, 4 to none; 0 is there
    ids = [[1, 2, 0], [2, 4, 3]]
    weights = torch.tensor([[0.6, 0.25, 0.15], [0.5, 0.2, 0.3]])
    flat = [*itertools.chain(*ids)]
    rows = {expert: [n for n, e in enumerate(flat) if e == expert] for expert in range(5)}
    assert light.without_light(rows, weights).keys() == {0, 1, 2, 3}
    assert store.skipped == 1
    # of equal weights each is the heaviest
    strict = MissRules(store, 0, 0.9, stands_in=False)
    assert len(strict.without_light({1: [0], 2: [1]}, torch.full((1, 2), 0.5))) == 2
    assert light.takes(MOST_TOKENS)
    assert not light.takes(MOST_TOKENS + 1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model(FAMILY), tmp_path_factory.mktemp("lossy"), sharded=False)


def load(checkpoint: Path, **options: Any) -> Any:
    """With a slot or two for each layer."""
    budget = inspect_checkpoint(checkpoint, max_tokens=64).smallest_budget_bytes
    options = {"policy": "lru", "prefetch": "off", "max_tokens": 64} | options
    return moe_runtime.load(checkpoint, device="cpu", host_memory=budget, **options)


@torch.no_grad()
def test_skipped_experts_add_nothing(checkpoint: Path) -> None:
    reference = tiny_model(FAMILY)
    drawn = torch.Generator().manual_seed(2)
    with (model := load(checkpoint, skip_below=0.4)).moe:
        for name, expected in experts_modules(reference).items():
            module = model.get_submodule(name)
            for num_tokens in (1, 1, 2, 5):
                weights, ids = torch.rand(num_tokens, 6, generator=drawn).topk(3)
                x = torch.randn(num_tokens, 32, generator=drawn)
                missing = module.store.missing(module._keys)
                lacking = torch.isin(ids, torch.tensor([key.expert for key in missing]))
                share = weights / weights.sum(1, keepdim=True)
                is_light = (share < 0.4) & (weights < weights.amax(1, keepdim=True))
                needed = ids[~is_light]
                left_out = lacking & is_light & ~torch.isin(ids, needed)
                before = model.moe.stats().skipped_choices
                found = module(x, ids, weights)
                assert model.moe.stats().skipped_choices - before == int(left_out.sum())
                kept = weights.masked_fill(left_out, 0.0)
                # fp32 sums of at most 32 products, in another order
                torch.testing.assert_close(found, expected(x, ids, kept), rtol=1e-5, atol=1e-5)
        assert model.moe.stats().skipped_choices > 0
        model.moe.check()


def test_a_step_is_lossy_and_a_call_with_gradients_is_not(checkpoint: Path) -> None:
    with (plain := load(checkpoint)).moe:
        expected = plain(PROMPT[:, :4]).logits
    rules = {"routing": "cache-aware:0.5", "skip_below": 0.4}
    with (model := load(checkpoint, **rules)).moe:
        embedded = model.get_input_embeddings()(PROMPT[:, :4]).requires_grad_()
        # fp32, where attention with gradients sums in another order
        torch.testing.assert_close(
            model(inputs_embeds=embedded).logits, expected, rtol=1e-4, atol=1e-5
        )
        stats = model.moe.stats()
        assert (stats.replaced_choices, stats.skipped_choices) == (0, 0)
        with torch.no_grad():
            assert not torch.allclose(model(PROMPT[:, :4]).logits, expected, rtol=1e-2)
        stats = model.moe.stats()
        assert stats.replaced_choices > 0
        assert stats.skipped_choices > 0
        model.moe.reset_stats()
        assert model.moe.stats().replaced_choices == 0
        model.moe.check()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"routing": "cache-aware:0.1", "host_memory": "1GiB"}, "every expert fits in memory"),
        ({"skip_below": 0.2, "host_memory": "1GiB"}, "every expert fits in memory"),
        ({"skip_below": 0.2, "draft": "lookup"}, "draft lookup changes no text"),
        ({"kv_cache": "q4"}, "unknown kv_cache 'q4': known: exact, int8"),
        ({"skip_below": 1.0}, r"skip_below must be in \[0, 1\), got 1.0"),
        ({"skip_below": -0.5}, "skip_below must be"),
        ({"routing": "cache-aware:0"}, "such as cache-aware:0.1, got 'cache-aware:0'"),
        ({"routing": "cache-aware:nan"}, "routing must be exact, or cache-aware:LAMBDA"),
        ({"routing": "cache"}, "routing must be exact"),
    ],
)
def test_rules_without_effect_and_unknown_ones_are_refused(
    checkpoint: Path, options: dict[str, Any], complaint: str
) -> None:
    settings: dict[str, Any] = {"host_memory": 1, "device": "cpu"} | options
    with pytest.raises(ValueError, match=complaint):
        moe_runtime.load(checkpoint, **settings)


def test_an_exact_engine_refuses_lossy_rules() -> None:
    for given in ({"routing": "cache-aware:0.1"}, {"skip_below": 0.2}, {"misses": "stand-in"}):
        with pytest.raises(ValueError, match="exact answers as if nothing else ran, and"):
            LossyRules.refuse_exact(given)
    with pytest.raises(ValueError, match="exact keeps every bit, and kv_cache int8 rounds"):
        LossyRules.refuse_exact({"kv_cache": "int8"})
    LossyRules.refuse_exact(
        {"kv_cache": "exact", "routing": "exact", "skip_below": 0.0, "misses": "auto"}
    )


def test_rules_for_a_single_expert_per_token_are_refused(tmp_path: Path) -> None:
    one = Family("qwen3_moe", "Qwen3MoeForCausalLM", {"num_experts_per_tok": 1})
    with pytest.raises(ValueError, match="a token has a single expert"):
        load(save(tiny_model(one), tmp_path / "one", sharded=False), skip_below=0.3)


def test_a_router_of_an_unknown_class_is_refused(tmp_path: Path) -> None:
    family = Family("phimoe", "PhimoeForCausalLM")
    folder = save(tiny_model(family), tmp_path / "other", sharded=False)
    with pytest.raises(UnsupportedModelError, match="whose scores are known, found 0"):
        load(folder, routing="cache-aware:0.1")


def rounded(matrix: Tensor) -> Tensor:
    """Symmetric int4 of whole rows, or of 32 columns, with a bf16 scale."""
    group = 32 if matrix.shape[1] % 32 == 0 else matrix.shape[1]
    groups = matrix.double().unflatten(1, (-1, group))
    scale = (groups.abs().amax(-1, keepdim=True).float() / 7.5).bfloat16().double()
    return ((groups / scale).float().round().clamp(-8, 7).double() * scale).flatten(1).float()


@torch.no_grad()
@pytest.mark.parametrize("family", [FAMILY, Family("gpt_oss", "GptOssForCausalLM")], ids=str)
def test_copies_replace_missing_experts(family: Family, tmp_path: Path) -> None:
    folder = save(tiny_model(family), tmp_path / "model", sharded=False)
    reference = tiny_model(family)
    copies = tiny_model(family)
    for module in experts_modules(copies).values():
        transposed = getattr(module, "is_transposed", False)
        for name, matrix in module.named_parameters(recurse=False):
            if name.endswith("bias"):
                continue
            rows = matrix.mT if transposed else matrix
            found = torch.stack([rounded(one) for one in rows])
            matrix.copy_(found.mT if transposed else found)
    drawn = torch.Generator().manual_seed(2)
    budget = room_for_copies(folder)
    options: dict[str, Any] = {"policy": "lru", "prefetch": "off", "max_tokens": 64}
    model: Any = moe_runtime.load(
        folder, device="cpu", host_memory=budget, misses="stand-in", **options
    )
    num_choices = 0
    with model.moe:
        for name, exact in experts_modules(reference).items():
            module, copy = model.get_submodule(name), copies.get_submodule(name)
            for num_tokens in (1, 2, 1, 5):
                weights, ids = torch.rand(num_tokens, 6, generator=drawn).topk(2)
                x = torch.randn(num_tokens, 32, generator=drawn)
                wait_for_reads(module.store)
                missing = torch.tensor([key.expert for key in module.store.missing(module._keys)])
                lacking = torch.isin(ids, missing)
                num_choices += int(lacking.sum())
                here = exact(x, ids, weights.masked_fill(lacking, 0.0))
                there = copy(x, ids, weights.masked_fill(~lacking, 0.0))
                found = module(x, ids, weights)
                # fp32 sums of at most 32 products, in another order
                torch.testing.assert_close(found, here + there, rtol=1e-4, atol=1e-4)
                model.moe.check()
            long = torch.randn(MOST_TOKENS + 1, 32, generator=drawn)
            weights, ids = torch.rand(len(long), 6, generator=drawn).topk(2)
            torch.testing.assert_close(
                module(long, ids, weights), exact(long, ids, weights), rtol=1e-4, atol=1e-4
            )
        assert model.moe.stats().stand_in_choices == num_choices > 0
        assert model.moe.stats().readahead_bytes > 0


def wait_for_reads(store: Any) -> None:
    """Waits until reads for later steps have arrived."""
    while store._link.under_way:
        time.sleep(0.001)
        store.stats()  # takes the lock, which delivers completed reads


def room_for_copies(folder: Path) -> int:
    with pytest.raises(moe_runtime.CapacityError) as caught:
        moe_runtime.load(folder, device="cpu", host_memory=1, misses="stand-in", max_tokens=64)
    assert caught.value.smallest_bytes is not None
    return caught.value.smallest_bytes
