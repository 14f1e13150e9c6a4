"""The bundled model, with a budget smaller than its experts, writes transformers' text."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import moe_runtime
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.models.pocket import pocket_path

NEW_TOKENS = 24
PROMPT = "The for statement"


def test_greedy_text_equals_transformers():
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
