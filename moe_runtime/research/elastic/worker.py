"""Processes that stand by for an elastic service and compute as a rank on demand."""

from __future__ import annotations

import json
import multiprocessing
import time
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from moe_runtime import __version__
from moe_runtime.errors import CheckpointError, RankFailureError
from moe_runtime.kernels.native import native_library
from moe_runtime.parallel.communication.membership import Store, open_store
from moe_runtime.parallel.communication.watch import DEFAULT_TIMEOUT_S
from moe_runtime.research.elastic.change import Change
from moe_runtime.research.elastic.member import POLL_S, Member
from moe_runtime.research.elastic.paged_experts import SpreadModel, load_spread_model

Address = tuple[str, int]


def ready_model(path: str | Path, *, dtype: str = "auto", threads: int = 1) -> SpreadModel:
    """Loads the dense part of a model, to be computed on so many threads by this process."""
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    library = native_library()
    if library is not None:
        library.set_num_threads(threads)
    # Torch's sums may depend on the number of threads, so it is one on every rank.
    torch.set_num_threads(1)
    return load_spread_model(path, dtype=dtype)


def describe(model: SpreadModel) -> str:
    """What must be equal in all processes of a service, as text."""
    facts = {
        "moe_runtime": __version__,
        "torch": torch.__version__,
        "dtype": str(model.model.dtype),
        "experts": model.expert_form,
    }
    return json.dumps(facts | asdict(model.signature))


def run_worker(
    path: str | Path,
    address: Address,
    *,
    dtype: str = "auto",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    threads: int = 1,
) -> None:
    """Stands by, computes as a rank on demand, and ends when the service ends.

    Raises:
        CheckpointError: the checkpoint is not the service's.
        RankFailureError: the service, or another rank, is gone.
    """
    model = ready_model(path, dtype=dtype, threads=threads)
    host, port = address
    try:
        store = open_store(host, port, is_keeper=False, timeout_s=timeout_s)
        _check_agreement(store.get("model").decode(), describe(model))
        _stand_by(store, Member(model, store, timeout_s=timeout_s))
    except dist.DistError as error:
        raise RankFailureError(
            f"the service at {host}:{port} is not there: {str(error).splitlines()[0]}", ranks=(0,)
        ) from error


def start_local_workers(
    count: int,
    path: str | Path,
    address: Address,
    *,
    dtype: str = "auto",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[BaseProcess]:
    """Starts workers on this machine; they end when the service does, or with this process."""
    # Forked from a clean process: what has threads, as this one has, must not be forked.
    context = multiprocessing.get_context("forkserver")
    # Imported once, where the server has not been started for something else.
    context.set_forkserver_preload([__name__])
    options = {"dtype": dtype, "timeout_s": timeout_s}
    workers = [
        context.Process(target=run_worker, args=(str(path), address), kwargs=options, daemon=True)
        for _ in range(count)
    ]
    for worker in workers:
        worker.start()
    return list(workers)


def _stand_by(store: Store, member: Member) -> None:
    number = store.add("joined", 1)
    num_calls = 0
    while not store.check(["closed"]):
        call = f"call/{number}/{num_calls}"
        if not store.check([call]):
            time.sleep(POLL_S)
            continue
        num_calls += 1
        change = Change.from_json(store.get(call).decode())
        if member.join(change, change.members.index(number)):
            member.serve()
    store.add("left", 1)


def _check_agreement(expected: str, found: str) -> None:
    if expected == found:
        return
    theirs, ours = json.loads(expected), json.loads(found)
    name = next(name for name in theirs if theirs[name] != ours.get(name))
    raise CheckpointError(
        f"this worker does not fit the service: the service has {name} = {theirs[name]}, "
        f"this process {ours.get(name)}; start it with the same checkpoint, dtype and versions"
    )
