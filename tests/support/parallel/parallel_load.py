"""A checkpoint with experts off the device, loaded by several processes together."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import moe_runtime
from moe_runtime.checkpoints.absent import AbsentTensor
from moe_runtime.errors import CheckpointError, RankFailureError, UnsupportedUseError
from moe_runtime.inference import expert_partition, loading
from moe_runtime.inference.expert_partition import ExpertPartition
from moe_runtime.memory.source import ExpertSource

PROMPT = torch.arange(40).mul(37).remainder(300)[None]


def outputs(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Logits of a prompt and of decoded tokens, a continuation, and what was read."""
    group = dist.group.WORLD if dist.is_initialized() else None
    model: Any = moe_runtime.load(path, device="cpu", max_tokens=64, group=group, **options)
    with model.moe, torch.inference_mode():
        out = model(PROMPT, use_cache=True)
        logits = [out.logits[0]]
        for token in (1, 2, 3):
            out = model(torch.tensor([[token]]), past_key_values=out.past_key_values)
            logits.append(out.logits[0])
        tokens = model.generate(PROMPT, max_new_tokens=8, do_sample=False)
        model.moe.check()
        stats = model.moe.stats()
    return {"logits": torch.cat(logits), "tokens": tokens, "stats": stats}


def gradients(path: str, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Of a prompt's loss: that of the embeddings and of a router; and what training a parameter of
    an experts module is answered."""
    group = dist.group.WORLD if dist.is_initialized() else None
    model: Any = moe_runtime.load(path, device="cpu", max_tokens=64, group=group, **options)
    with model.moe:
        embedded = model.get_input_embeddings()(PROMPT).detach().requires_grad_()
        router = model.model.layers[0].mlp.gate.weight.requires_grad_()
        loss = model(inputs_embeds=embedded, labels=PROMPT).loss
        found = torch.autograd.grad(loss, (embedded, router))
        experts = model.model.layers[0].mlp.experts
        experts.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
        answer = ""
        try:
            model(PROMPT)
        except UnsupportedUseError as error:
            answer = str(error)
        model.moe.check()
    return *found, answer


def refusal(path: str, other_dtype_on: int) -> tuple[str, tuple[int, ...]]:
    """The error of a load in which one rank asks for another dtype."""
    dtype = "bfloat16" if dist.get_rank() == other_dtype_on else "float32"
    try:
        moe_runtime.load(path, device="cpu", dtype=dtype, max_tokens=64, group=dist.group.WORLD)
    except RankFailureError as error:
        return str(error), error.ranks
    return "", ()


def refusal_of(paths: Sequence[str]) -> str:
    """The error of a load in which each rank has a checkpoint of its own."""
    path = paths[dist.get_rank()]
    try:
        model = moe_runtime.load(
            path, device="cpu", dtype="float32", max_tokens=64, group=dist.group.WORLD
        )
        model.moe.close()
    except RankFailureError as error:
        return str(error)
    return ""


def too_many(path: str) -> str:
    try:
        moe_runtime.load(Path(path), max_tokens=64, group=dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return ""


def shared(path: str) -> dict[str, Any]:
    """A model's dense weights in all processes, before and after one of them changes a weight."""
    group: Any = dist.group.WORLD
    model: Any = moe_runtime.load(path, device="cpu", max_tokens=64, group=group)
    with model.moe:
        weights = {n: p for n, p in model.named_parameters() if not isinstance(p, AbsentTensor)}
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        dist.barrier()
        if group.rank() == 1:
            model.lm_head.weight.zero_()
        dist.barrier()
        return {
            "weights": before,
            "memories": len({weight.untyped_storage().data_ptr() for weight in weights.values()}),
            "changed": [n for n, w in weights.items() if not torch.equal(w, before[n])],
            "facts": model.moe.facts,
            "slots": model.moe.stats().expert_slots,
        }


def half_loaded(path: str, is_killed: bool) -> str:
    """The error of a load in which the process that reads the dense weights fails or is killed."""
    rank = dist.get_rank()
    fail = mock.Mock(side_effect=CheckpointError("damaged"))
    if is_killed:
        fail.side_effect = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    with mock.patch.object(loading, "finish_dense", loading.finish_dense if rank else fail):
        try:
            moe_runtime.load(path, device="cpu", max_tokens=64, group=dist.group.WORLD)
        except (CheckpointError, RankFailureError) as error:
            return str(error)
    return ""


def divided(path: str, options: list[dict[str, Any]], machines: list[str]) -> dict[str, Any]:
    """As `outputs`, with options and a machine's name and speed for each process; and how many
    experts this process holds. The speeds are 1, 2 and so on."""
    rank = dist.get_rank()
    held: list[int] = []

    def note(layouts: Any, **others: Any) -> Any:
        held.append(len(layouts))
        return ExpertSource(layouts, **others)

    with (
        mock.patch("socket.gethostname", return_value=machines[rank]),
        mock.patch.object(expert_partition, "measure_products", return_value=1 + rank),
        mock.patch.object(loading, "ExpertSource", note),
    ):
        return outputs(path, options[rank]) | {"held": held[0]}


def balanced(path: str, caches: str) -> list[Any]:
    """A run and the next one, with a cache folder for each process: answers, what experts were
    divided by, and the names of the files that were kept."""
    cache = Path(caches, str(dist.get_rank()))
    divide = mock.Mock(side_effect=expert_partition.hold_by_shares)
    with (
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(cache)}),
        mock.patch.object(expert_partition, "hold_by_shares", divide),
    ):
        found = [outputs(path, {"policy": "auto", "teach": False}) for _ in range(2)]
    kept = [file.parent.name for file in cache.rglob("*.npz")]
    return [found, [call.args[2:] for call in divide.call_args_list], kept]


def moved(path: str, caches: str, options: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """As `outputs`, with a look at the loads before every third pass; and where experts lay after
    each."""
    looks: list[Any] = []
    rebalance = ExpertPartition._rebalance

    def note(partition: ExpertPartition) -> None:
        rebalance(partition)
        looks.append([*partition._holders])

    with (
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(Path(caches, str(dist.get_rank())))}),
        mock.patch.object(expert_partition, "PASSES_FOR_A_LOOK", 3),
        mock.patch.object(ExpertPartition, "_rebalance", note),
    ):
        return outputs(path, {"policy": "auto", "teach": False, **options}), looks
