"""Adapters of frozen experts on the CPU: experts are read ahead in the order of their use."""

import dataclasses
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
from finetuning_runs import MIXTRAL, SIZES, config_of, with_run
from text_checkpoint import tiny_tokenizer
from tiny_checkpoints import save, tiny_model

from moe_runtime.memory.store import ExpertStore
from moe_runtime.training.finetune.finetune_run import prepare, start
from moe_runtime.training.offload.memory import FrozenMemory


@pytest.mark.parametrize(("num_experts", "num_slots"), [(16, 12), (32, 40)])
def test_no_expert_is_read_more_often_than_it_is_used(tmp_path, num_experts, num_slots):
    """Except for one read in flight at the end."""
    sizes = SIZES | {"num_hidden_layers": 2, "num_local_experts": num_experts}
    save(tiny_model(dataclasses.replace(MIXTRAL, config=sizes)), tmp_path / "base", sharded=False)
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "run").mkdir()
    config = config_of(
        tmp_path / "base",
        tmp_path / "run",
        lora={"rank": 2, "places": ["experts"]},
        run={"steps": 1},
    )
    config = with_run(config, precision="float32")
    data = dataclasses.replace(
        config.data, context=32, tokens_per_step=64, micro_batches=1, held_out_share=0.0
    )
    preparation = prepare(dataclasses.replace(config, data=data))
    memory: Any = preparation.memory
    host = dataclasses.replace(memory.host, num_slots=num_slots)
    preparation = dataclasses.replace(preparation, memory=FrozenMemory(host=host, device=None))
    reads, uses = Counter[Any](), Counter[Any]()
    begin, lease = ExpertStore._start, ExpertStore.lease

    def noted_read(store: Any, key: Any, *rest: Any, **options: Any) -> Any:
        reads[key] += 1
        return begin(store, key, *rest, **options)

    def noted_use(store: Any, keys: Any, **options: Any) -> Any:
        uses.update(keys)
        return lease(store, keys, **options)

    with (
        patch.object(ExpertStore, "_start", noted_read),
        patch.object(ExpertStore, "lease", noted_use),
    ):
        trainer = start(preparation, resume=False)
        for _ in range(2):
            trainer._run.batches.seek((0,))
            trainer._backward(1e-2)
        trainer.optimizer.check()  # type: ignore[union-attr]
        trainer.close()
    assert len(uses) > num_slots
    assert all(reads[key] <= uses[key] + 1 for key in reads)
