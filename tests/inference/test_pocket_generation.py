"""The bundled model, under a budget smaller than its experts, writes what transformers writes."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import moe_runtime
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.models.pocket import pocket_path

NEW_TOKENS = 200
PROMPT = "The for statement"


def test_greedy_text_equals_transformers_over_200_tokens():
    path = pocket_path()
    tokens = AutoTokenizer.from_pretrained(path)(PROMPT, return_tensors="pt")["input_ids"]
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    reference = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    expected = reference.generate(tokens, **options)

    summary = inspect_checkpoint(path, dtype="float32", max_tokens=NEW_TOKENS + 16)
    budget = summary.smallest_budget_bytes + 10 * summary.slot_bytes
    model = moe_runtime.load(
        path, device="cpu", dtype="float32", host_memory=budget, max_tokens=NEW_TOKENS + 16
    )
    with model.moe:
        found = model.generate(tokens, **options)
        model.moe.check()
        stats = model.moe.stats()
    assert torch.equal(found, expected)
    assert stats.misses > 0, "the budget was meant to be too small for all experts"


def test_bf16_experts_stream_below_their_own_size():
    path = pocket_path()
    tokens = AutoTokenizer.from_pretrained(path)(PROMPT, return_tensors="pt")["input_ids"]
    options = {"max_new_tokens": 40, "do_sample": False}
    summary = inspect_checkpoint(path, max_tokens=64)
    assert summary.smallest_budget_bytes < summary.expert_bytes
    texts = []
    for budget in (summary.smallest_budget_bytes, "1GiB"):
        model = moe_runtime.load(path, device="cpu", host_memory=budget, max_tokens=64)
        with model.moe:
            texts.append(model.generate(tokens, **options))
    assert torch.equal(*texts)
