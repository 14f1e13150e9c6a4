"""Batches that decode with fewer slots than they want experts: same text, cache used, few reads."""

import pytest
import torch

import moe_runtime
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.lab.replay.untimed import replay_demand
from moe_runtime.lab.traces import read_trace
from moe_runtime.lab.traces.workload import workload_of
from moe_runtime.models.pocket import pocket_path
from moe_runtime.policies.eviction import Setting, make_policy
from moe_runtime.policies.prediction import Shape

NEW_TOKENS, LENGTH = 16, 9


def left_padded(num_sequences: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 4096, (num_sequences, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(num_sequences):
        mask[row, : row % 5] = 0
    return {"input_ids": ids.where(mask.bool(), 1), "attention_mask": mask}


@pytest.mark.parametrize("num_sequences", [pytest.param(2, marks=pytest.mark.long), 16])
def test_a_batch_reads_what_a_replay_of_its_routing_reads(tmp_path, num_sequences):
    """Of 16 experts a layer holds 6; the slots that experts pass through are a few of the cache's,
    so that the store lies between replays with all slots and without those."""
    path, max_tokens = pocket_path(), num_sequences * (LENGTH + NEW_TOKENS)
    smallest = inspect_checkpoint(path, max_tokens=max_tokens)
    tight = smallest.smallest_budget_bytes + 34 * smallest.slot_bytes
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    texts = []
    for budget, trace in ((tight, tmp_path / "trace.npz"), ("1GiB", None)):
        model = moe_runtime.load(
            path, device="cpu", host_memory=budget, max_tokens=max_tokens, trace=trace
        )
        with model.moe:
            texts.append(model.generate(**left_padded(num_sequences), **options))
            model.moe.check()
            if trace is not None:
                found = model.moe.stats()
    assert torch.equal(*texts)
    workload = workload_of(read_trace(tmp_path / "trace.npz"))
    signature = workload.trace.signature
    shape = Shape(
        num_layers=signature.num_layers, num_experts=signature.num_experts, top_k=signature.top_k
    )

    def hits(num_slots: int) -> int:
        def make(_):
            return make_policy("lru", num_slots=num_slots, setting=Setting(shape=shape))

        return replay_demand(workload, make, num_slots).num_hits

    asked = int(workload.num_keys.sum())
    assert found.hits + found.late_hits + found.misses == asked
    assert found.expert_slots == 36
    # a twentieth for the slots that are lent now and not then
    assert found.hits + found.late_hits <= 1.05 * hits(36)
    num_read = found.bytes_read / found.slot_bytes
    assert found.misses <= num_read <= 1.05 * (asked - hits(36 - 36 // 4))
