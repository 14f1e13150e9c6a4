"""A tiny transformers model over two ranks, for the tests of `engine.expert_parallel`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def load(path: str, *, is_parallel: bool) -> Any:
    """The checkpoint in fp64, whole or spread over all ranks, with the batch shared by them."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    from moe_runtime.engine.expert_parallel import register_expert_parallelism
    from moe_runtime.parallel import Overlap

    options = {}
    if is_parallel:
        register_expert_parallelism(overlap=Overlap(degree=2), timeout_s=30)
        size = dist.get_world_size()
        options["distributed_config"] = DistributedConfig(
            tp_size=size, ep_size=size, ep_implementation="moe_runtime"
        )
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, experts_implementation="eager", **options
    )


def outputs(path: str, is_parallel: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, greedily generated tokens, and the gradient of the embeddings."""
    model = load(path, is_parallel=is_parallel)
    tokens = torch.arange(7).view(1, 7) * 3 % 50
    logits = model(input_ids=tokens).logits
    logits.square().mean().backward()
    embeddings = model.get_input_embeddings().weight.grad
    generated = model.generate(tokens, max_new_tokens=6, do_sample=False)
    if hasattr(embeddings, "full_tensor"):
        embeddings = embeddings.full_tensor()
    return logits.detach(), generated, embeddings
