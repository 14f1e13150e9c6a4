"""A tiny transformers model over two ranks, for the tests of `engine.expert_parallel`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def load(model_class: str, path: str, *, is_parallel: bool) -> Any:
    """The checkpoint in fp64, whole or spread over all ranks, with the batch shared by them."""
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    from moe_runtime.inference.hugging_face.dispatcher import register_expert_parallelism
    from moe_runtime.parallel import Overlap

    options = {}
    if is_parallel:
        register_expert_parallelism(overlap=Overlap(degree=2), timeout_s=200)
        size = dist.get_world_size()
        options["distributed_config"] = DistributedConfig(
            tp_size=size, ep_size=size, ep_implementation="moe_runtime"
        )
    return getattr(transformers, model_class).from_pretrained(
        path, dtype=torch.float64, experts_implementation="eager", **options
    )


def outputs(
    model_class: str, path: str, is_parallel: bool
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Logits, greedily generated tokens, all gradients, and logits after a step of SGD."""
    model = load(model_class, path, is_parallel=is_parallel)
    tokens = torch.arange(7).view(1, 7) * 3 % 50
    logits = model(input_ids=tokens).logits
    generated = model.generate(tokens, max_new_tokens=6, do_sample=False)
    logits.square().mean().backward()
    named = {name: p for name, p in model.named_parameters() if p.grad is not None}
    gradients = {name: whole(parameter.grad).clone() for name, parameter in named.items()}
    with torch.no_grad():
        for parameter in named.values():
            parameter -= 0.1 * parameter.grad
        trained = model(input_ids=tokens).logits
    return whole(logits.detach()), generated, gradients, whole(trained)


def whole(tensor: Any) -> torch.Tensor:
    """All of a tensor that may be spread over the ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
