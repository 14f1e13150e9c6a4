"""Budgets, policies and threads change when experts are read, never a bit of the result."""

from pathlib import Path

import pytest
import torch
from text_checkpoint import tiny_text_model
from transformers import AutoModelForCausalLM

import moe_runtime
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.kernels.linear import native_row_limit
from moe_runtime.kernels.native import native_library

VOCAB = 300
MAX_TOKENS = 64
PROMPT = torch.arange(40).mul(37).remainder(VOCAB)[None]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def checkpoint(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exact")
    model = tiny_text_model(VOCAB).to(getattr(torch, request.param))
    model.save_pretrained(folder)
    return folder


def smallest(checkpoint: Path) -> int:
    return inspect_checkpoint(checkpoint, max_tokens=MAX_TOKENS).smallest_budget_bytes


def outcome(checkpoint: Path, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a prompt and of three decoded tokens, and a greedy continuation."""
    model = moe_runtime.load(checkpoint, device="cpu", max_tokens=MAX_TOKENS, **options)
    with model.moe, torch.inference_mode():
        out = model(PROMPT, use_cache=True)
        logits = [out.logits[0]]
        for token in (1, 2, 3):
            out = model(torch.tensor([[token]]), past_key_values=out.past_key_values)
            logits.append(out.logits[0])
        tokens = model.generate(PROMPT, max_new_tokens=12, do_sample=False)
        model.moe.check()
    return torch.cat(logits), tokens


def test_the_same_bits_at_every_budget_and_number_of_threads(checkpoint):
    slot = inspect_checkpoint(checkpoint, max_tokens=MAX_TOKENS).slot_bytes
    logits, tokens = outcome(checkpoint, host_memory="1GiB")
    for extra_slots, io_threads in ((0, 4), (5, 2), (11, 1)):
        budget = smallest(checkpoint) + extra_slots * slot
        found_logits, found_tokens = outcome(checkpoint, host_memory=budget, io_threads=io_threads)
        assert torch.equal(found_logits, logits), f"{extra_slots} more slots change the logits"
        assert torch.equal(found_tokens, tokens)


def test_a_batch_of_padded_prompts_equals_transformers(checkpoint):
    tokens = torch.randint(0, VOCAB, (3, 9))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    model = moe_runtime.load(
        checkpoint, device="cpu", dtype="float32", max_tokens=MAX_TOKENS, host_memory="1GiB"
    )
    with model.moe, torch.inference_mode():
        expected = reference(tokens, attention_mask=mask).logits[mask.bool()]
        found = model(tokens, attention_mask=mask).logits[mask.bool()]
    # both sum in fp32, in another order: at most a few roundings of the largest logit
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_skipped_slots_count_as_nothing(checkpoint):
    model = moe_runtime.load(checkpoint, device="cpu", max_tokens=MAX_TOKENS, host_memory="1GiB")
    experts = model.model.layers[0].mlp.experts
    hidden = torch.randn(5, 64).to(model.dtype)
    ids = torch.tensor([[0, 8], [8, 8], [3, 1], [8, 2], [1, 0]])  # 8: no expert of this layer
    weights = torch.rand(5, 2).to(model.dtype)
    library = native_library()
    with model.moe, torch.inference_mode():
        found = experts(hidden, ids, weights)
        for token in range(5):
            kept = ids[token] < 8
            if not kept.any():
                assert not found[token].any()
                continue
            alone = experts(hidden[token, None], ids[token, kept][None], weights[token, kept][None])
            if library is not None and len(ids) <= native_row_limit(library, model.dtype):
                assert torch.equal(found[token], alone[0])
            # Torch's products, where the kernel is slower or was not built, add in an order that
            # depends on the number of rows: three of them, each of sums in fp32 over at most so
            # many terms, rounded to the type.
            unit = max(torch.finfo(model.dtype).eps, 64 * torch.finfo(torch.float32).eps)
            assert (found[token] - alone[0]).norm() <= 3 * unit * alone[0].norm()


def test_statistics_add_up(checkpoint):
    model = moe_runtime.load(
        checkpoint, device="cpu", max_tokens=MAX_TOKENS, host_memory=smallest(checkpoint)
    )
    with model.moe, torch.inference_mode():
        model(PROMPT[:, :1])
        stats = model.moe.stats()
        assert stats.hits + stats.late_hits + stats.misses == 3 * 2  # layers times top-k
        # an expert is read in whole blocks, and no expert takes more of them than a slot has
        one_expert = stats.expert_bytes // (3 * 8)
        assert stats.misses * one_expert <= stats.bytes_read <= stats.misses * stats.slot_bytes
        assert stats.expert_slots == 2
        model.moe.reset_stats()
        assert model.moe.stats().misses == 0
