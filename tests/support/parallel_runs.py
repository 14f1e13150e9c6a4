"""Training runs of several processes, for the tests of training under a layout."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from moe_runtime.training.config import TrainConfig
from moe_runtime.training.config_tree import read_tree
from moe_runtime.training.ranks import OneProcess, SeveralProcesses
from moe_runtime.training.session import finish, prepare, start


def train(
    path: str, settings: tuple[str, ...], until: int, resume: bool = False, export: bool = False
) -> float:
    """Trains in fp64 until a step, from the beginning or the last checkpoint.

    Returns:
        Share of the dense parameters' elements that this rank holds.
    """
    torch.set_default_dtype(torch.float64)
    try:
        config = read_tree(TrainConfig, Path(path), settings=settings)
        ranks = OneProcess()
        if dist.is_initialized():
            ranks = SeveralProcesses(config)
        with ranks.first_alone():
            preparation = prepare(config, Path(path).parent)
        trainer = start(preparation, resume=resume, ranks=ranks)
        trainer.train(should_stop=lambda: trainer.step >= until, on_record=lambda record: None)
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


def refused(path: str, *settings: str) -> str:
    try:
        SeveralProcesses(read_tree(TrainConfig, Path(path), settings=settings))
    except ValueError as error:
        return str(error)
    return ""
