"""Training runs of several processes, for the tests of training under a layout."""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from finetuning_runs import config_of
from finetuning_runs import train as finetune
from torch import Tensor

from moe_runtime.benchmarks.cases.ablation import KeptActivations
from moe_runtime.cli.commands.train import experts_maker
from moe_runtime.digests import digest_of_file
from moe_runtime.errors import CapacityError, CheckpointError, MoERuntimeWarning, RankFailureError
from moe_runtime.models.lm.blocks import ShortcutBlocks
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.parallel.cluster import Link
from moe_runtime.parallel.dispatching import AsyncAllToAll
from moe_runtime.research import pipeoffload
from moe_runtime.research.pipeoffload import StageOffload
from moe_runtime.training import exchange_choice
from moe_runtime.training.checkpoint import checkpoints_in, load_checkpoint
from moe_runtime.training.config_tree import read_tree
from moe_runtime.training.finetune.finetune_run import finish as finish_finetuning
from moe_runtime.training.finetune.finetune_run import prepare as prepare_finetuning
from moe_runtime.training.finetune.finetune_run import start as start_finetuning
from moe_runtime.training.ranks import OneRank, SeveralRanks, together
from moe_runtime.training.run_config import TrainConfig
from moe_runtime.training.sharded import whole_model
from moe_runtime.training.train_run import finish, prepare, start


def begun(
    path: str, settings: tuple[str, ...] = (), *, resume: bool = False
) -> tuple[SeveralRanks, LanguageModel, Any]:
    """A run of all processes, with its experts in memory: its ranks, model and trainer."""
    config = read_tree(TrainConfig, Path(path), settings=settings)
    ranks = SeveralRanks(config)
    with ranks.first_alone():
        preparation = prepare(config, Path(path).parent)
    trainer = start(preparation, resume=resume, ranks=ranks)
    return ranks, preparation.model, trainer


def train(
    path: str,
    settings: tuple[str, ...],
    until: int,
    resume: bool = False,
    export: bool = False,
    stops: bool = True,
) -> float:
    """Trains in fp64 until a step, from the beginning or the last checkpoint; `stops` saves what
    was trained then."""
    torch.set_default_dtype(torch.float64)
    try:
        config = read_tree(TrainConfig, Path(path), settings=settings)
        ranks = OneRank()
        if dist.is_initialized():
            folder = Path(path).parent
            ranks = SeveralRanks(config, folder, experts_maker(config.parallel), StageOffload)
        with ranks.first_alone():
            preparation = prepare(config, Path(path).parent)
        trainer = start(preparation, resume=resume, ranks=ranks)

        def should_stop() -> bool:
            if trainer.step >= until and not stops:
                raise InterruptedError
            return trainer.step >= until

        with contextlib.closing(trainer):
            trainer.train(should_stop=should_stop, on_record=lambda record: None)
            if ranks.rank == 0:
                finish(preparation, trainer, export=export)
        own = [
            (parameter.numel(), getattr(parameter, "to_local", lambda p=parameter: p)().numel())
            for name, parameter in preparation.model.named_parameters()
            if ".experts." not in name
        ]
        return sum(here for _, here in own) / sum(everywhere for everywhere, _ in own)
    finally:
        torch.set_default_dtype(torch.float32)


def train_offloaded(path: str, settings: tuple[str, ...], until: int) -> int:
    """As `train`; the most bytes that autograd kept in memory of micro-batches."""
    plain, kept = StageOffload.saving, list[KeptActivations]()

    def saving(self: StageOffload) -> contextlib.AbstractContextManager[object]:
        found = plain(self)
        if not isinstance(found, contextlib.nullcontext) or not torch.is_grad_enabled():
            return found
        kept.append(kept[0] if kept else KeptActivations(self._module))
        return kept[0].counting()

    with (
        mock.patch.object(pipeoffload, "SMALLEST_BYTES", 1),
        mock.patch.object(StageOffload, "saving", saving),
    ):
        train(path, settings, until)
    return kept[0].most if kept else 0


def train_with_links(
    path: str, inside_s: float, across_s: float, bytes_per_s: float, until: int
) -> str:
    """Trains with all of `[parallel]` that may be "auto", on two machines whose messages take
    these seconds, and with moves that always pay; what was chosen at the end."""
    measure, chosen = exchange_choice.measure_cluster, list[exchange_choice.AutoExchange]()
    plain_follow = exchange_choice.AutoExchange.follow

    def given(*args: Any) -> Any:
        found, transports = measure(*args)
        inside = Link(alpha_s=inside_s, bytes_per_s=1e14)
        across = Link(alpha_s=across_s, bytes_per_s=bytes_per_s)
        return replace(found, intra=inside, inter=across, flops_per_s=1e9, launch_s=0), transports

    def follow(self: exchange_choice.AutoExchange, *args: Any) -> Any:
        chosen.append(self)
        return plain_follow(self, *args)

    settings = [f"parallel.{name}=auto" for name in ("overlap", "transport", "experts")]
    settings += ["parallel.ranks_per_node=2", "parallel.rebalance_every=1"]
    with (
        mock.patch.object(exchange_choice, "measure_cluster", given),
        mock.patch.object(exchange_choice.AutoExchange, "follow", follow),
        mock.patch.object(exchange_choice.SecondsOfMoves, "gain", return_value=1e9),
    ):
        train(path, tuple(settings), until)
    return str(chosen[0])


def interrupted(path: str, settings: tuple[str, ...], at: int, machines: str) -> list[str]:
    """Trains in fp64 as a process of a machine of its own, which ends at once after a step; the
    snapshots that its machine has.

    Args:
        machines: folders that stand for the memory of each machine.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    memory = Path(machines, str(rank))
    memory.mkdir(exist_ok=True)
    in_memory = mock.patch("moe_runtime.training.snapshots.MEMORY", memory)
    with in_memory, contextlib.suppress(InterruptedError):
        train(path, settings, at, resume=True, stops=False)
    return sorted(snapshot.name for snapshot in memory.glob("*/*"))


def resumed(
    path: str, settings: tuple[str, ...], machines: str
) -> tuple[int, dict[str, Tensor], list[str]]:
    """The step that a run in fp64 goes on from, what this process has then, and warnings."""
    memory = Path(machines, str(dist.get_rank()))
    memory.mkdir(exist_ok=True)
    torch.set_default_dtype(torch.float64)
    try:
        with (
            mock.patch("moe_runtime.training.snapshots.MEMORY", memory),
            warnings.catch_warnings(record=True) as told,
        ):
            warnings.simplefilter("always", MoERuntimeWarning)
            *_, trainer = begun(path, settings, resume=True)
        tensors = trainer._shards.tensors()
        found = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        trainer.close()
        return trainer.step, found, [str(one.message) for one in told]
    finally:
        torch.set_default_dtype(torch.float32)


def without_room(
    path: str, settings: tuple[str, ...], culprit: int, memory: str
) -> tuple[list[str], list[str]]:
    """The warnings of a run of three steps, in which a rank finds no room for the second snapshot;
    and the snapshots that are there when the third is taken."""
    calls, held = 0, list[str]()
    folder = Path(memory, f"memory-{dist.get_rank()}")
    folder.mkdir()

    def digest_of(file: Path) -> str:
        nonlocal calls
        calls += file.name.startswith("digests")
        if calls == 2 and dist.get_rank() == culprit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        if calls == 3:
            held.extend(sorted(found.name for found in folder.glob("*/*")))
        return digest_of_file(file)

    with (
        mock.patch("moe_runtime.training.snapshots.MEMORY", folder),
        mock.patch("moe_runtime.training.snapshots.digest_of_file", digest_of),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always", MoERuntimeWarning)
        train(path, settings, 3)
    lines = [str(one.message) for one in told if issubclass(one.category, MoERuntimeWarning)]
    return lines, held


def final_parameters(path: Path) -> dict[str, Tensor]:
    """What a run in fp64 has trained, by name, whoever had which part of it."""
    config = read_tree(TrainConfig, path)
    last = checkpoints_in(path.parent / config.run.output / "checkpoints")[-1]
    if not last.is_dir():
        return dict(load_checkpoint(last).model)
    model = replace(config.model, vocab_size=config.tokenizer.vocab_size)
    torch.set_default_dtype(torch.float64)
    try:
        return whole_model(model, last).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)


def order_of_shortcut(path: str) -> list[str]:
    """In which order the rows for experts of another process and the attention before them go."""
    _, model, trainer = begun(path)
    with contextlib.closing(trainer):
        (block,) = model.own_blocks()
        assert isinstance(block, ShortcutBlocks)
        found: list[str] = []
        transfer, launch, land = AsyncAllToAll, AsyncAllToAll.launch, AsyncAllToAll.land

        def told(name: str, call: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
            def noting(self: AsyncAllToAll, *rows: Tensor, is_gradient: bool) -> Tensor | None:
                if not self._is_return:
                    found.append(f"{'gradients' if is_gradient else 'rows'} {name}")
                return call(self, *rows, is_gradient=is_gradient)

            return noting

        attention = block.pair.second_attention
        attention.register_forward_hook(lambda *_: found.append("attention"))
        attention.register_full_backward_hook(lambda *_: found.append("attention's gradient"))
        ids = torch.arange(33)[None]
        with (
            mock.patch.object(transfer, "launch", told("leave", launch)),
            mock.patch.object(transfer, "land", told("arrive", land)),
        ):
            model.losses(ids[:, :-1], ids[:, 1:]).cross_entropy.backward()
    return found


def finetuned_together(
    model: str, folder: str, changes: dict[str, Any], resume: bool = False
) -> list[float]:
    """The losses of fine-tuning by all processes, which leaves what it trained in a folder."""
    config = config_of(Path(model), Path(folder), export_dtype="float32", **changes)
    ranks = together(dist.group.WORLD)
    assert ranks is not None, "several processes train"
    with ranks.first_alone():
        preparation = prepare_finetuning(config, ranks=ranks)
    with contextlib.closing(start_finetuning(preparation, resume=resume)) as trainer:
        losses = finetune(trainer)
        if ranks.rank == 0:
            finish_finetuning(preparation, trainer, export=True)
    return losses


def draws_of_adapters(
    model: str, folder: str, until: int, resume: bool = False
) -> tuple[list[float], list[float]]:
    """First values of adapters, and what dropout draws first in each step."""
    lora = {"lora": {"rank": 2, "places": ["attention"], "dropout": 0.5}}
    config = config_of(Path(model), Path(folder), **lora)
    ranks = together(dist.group.WORLD) if dist.is_initialized() else None
    with (ranks or OneRank()).first_alone():
        preparation = prepare_finetuning(config, ranks=ranks)
    draws: list[float] = []
    dropout = torch.nn.functional.dropout

    def drawing(values: Tensor, *args: Any, **options: Any) -> Tensor:
        found = dropout(values, *args, **options)
        draws.append(float(found.detach().sum()))
        return found

    with (
        contextlib.closing(start_finetuning(preparation, resume=resume)) as trainer,
        mock.patch("torch.nn.functional.dropout", drawing),
    ):
        named = preparation.model.named_parameters()
        first = next(p for name, p in named if ".lora_A" in name).flatten().tolist()
        finetune(trainer, stop_after=until)
    return first, draws


def smallest_budget(path: str) -> int:
    """Bytes that a run with its experts off memory says it needs at least."""
    with pytest.raises(CapacityError) as failure:
        train(path, ("run.host_memory=1MiB",), 1)
    assert failure.value.smallest_bytes is not None
    return failure.value.smallest_bytes


def train_compiled(path: str, settings: tuple[str, ...], until: int) -> int:
    """As `train`, with `run.compile`, but without a compiler; how many graphs were captured."""
    from torch._dynamo.utils import counters

    compiled = partialmethod(LanguageModel.compile_blocks, backend="aot_eager")
    with mock.patch.object(LanguageModel, "compile_blocks", compiled):
        train(path, (*settings, "run.compile=true"), until)
    return counters["stats"]["unique_graphs"]


def stalled(path: str, settings: tuple[str, ...], where: str, culprit: int) -> str:
    """The error of a run in which a rank stalls until all others have given up."""
    group = dist.group.WORLD
    assert group is not None
    store, rank = group.get_group_store(), dist.get_rank()

    def stall(*_: object) -> None:
        others = set(range(dist.get_world_size())) - {rank}
        store.wait([f"gave up/{path}/{other}" for other in others])
        raise InterruptedError

    _, model, trainer = begun(path, settings)
    if rank == culprit and where == "step":
        *_, block = model.own_blocks()
        block.register_forward_pre_hook(stall)
    if rank == culprit and where == "checkpoint":
        trainer._shards.tensors = stall
    try:
        trainer.train(should_stop=lambda: False, on_record=lambda record: None)
    except RankFailureError as error:
        store.set(f"gave up/{path}/{rank}", "")
        return str(error)
    except InterruptedError:
        return ""
    raise AssertionError("a run with a rank that stalls does not end well")


def shared(path: str, *folders: str) -> str:
    """What is wrong with a folder for all processes, each of which has one of these."""
    ranks = SeveralRanks(read_tree(TrainConfig, Path(path)))
    try:
        ranks.require_shared(Path(folders[ranks.rank]))
    except CheckpointError as error:
        return str(error)
    return ""


def refused(path: str, choices: list[tuple[str, ...]]) -> list[str]:
    """What is said of each of these settings."""
    found = []
    for settings in choices:
        with pytest.raises(ValueError) as failure:  # noqa: PT011
            SeveralRanks(read_tree(TrainConfig, Path(path), settings=settings))
        found.append(str(failure.value))
    return found


def failing_digests(path: str, culprit: int) -> str:
    """The error of a run in which a rank cannot write what it knows of a checkpoint's files."""
    ranks, _, trainer = begun(path, ("run.steps=1",))
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "digests.json")
    target = "moe_runtime.training.sharded.write_digests"
    effect = error if ranks.rank == culprit else None
    with (
        mock.patch(target, side_effect=effect),
        pytest.raises(OSError, match="No space") as failure,
    ):
        trainer.train(should_stop=lambda: False, on_record=lambda record: None)
    return str(failure.value)
