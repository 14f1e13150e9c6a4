"""Commands in several processes, which `torchrun` or the command itself starts.

The first process prints results; an error is one line on the terminal.
"""

import contextlib
import json
import logging
import os
import re
import secrets
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import typer

from moe_runtime.cli import options
from moe_runtime.cli.console import Session, launched_rank, num_launched
from moe_runtime.cli.stopping import handlers_in_force, handling, stop_on_signals
from moe_runtime.cli.strict import refuse_given
from moe_runtime.errors import RankFailureError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

    from moe_runtime.parallel.communication.watch import CollectiveMonitor
    from moe_runtime.serving.requests import EngineOptions

ValueT = TypeVar("ValueT")

_ERRORS = "moe/errors"
_NEWEST = "moe/newest"
# Our collectives have a shorter limit, and name the missing process.
_BACKEND_LIMIT = timedelta(hours=6)
_FIRST_SPEAKS = timedelta(seconds=1)
_POLL_S = 0.01
_SEEN_S = 0.5


def divided(several: options.SeveralProcesses, group: "ProcessGroup | None") -> dict[str, Any]:
    """Arguments of `moe_runtime.load` that divide a model among processes."""
    is_divided = group is not None and group.size() > 1
    given = {"placement": several.placement, "group": group if is_divided else None}
    return {name: value for name, value in given.items() if value is not None}


def start_processes(several: options.SeveralProcesses, session: Session) -> None:
    """Runs the command in several processes if asked to, and exits with its exit code.

    torch's launcher starts them and ends all when one fails. Signals are forwarded to all of them.
    """
    if not several.are_asked_for:
        return
    visible = _visible_gpus(several.gpus)
    size = several.processes or len(visible)
    if launched_rank() is not None:
        if num_launched() != size:
            name = "--processes" if several.gpus is None else "--gpus"
            raise ValueError(f"{name} asks for {size} processes, torchrun started {num_launched()}")
        return
    import torch
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # Without it torch takes all cores in each process.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // size)))
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    words = ("-P", "-m", "moe_runtime.cli.program", *session.words)
    with _forwarded_signals(), tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=size,
            run_id=secrets.token_hex(8),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # this machine's own name may lead nowhere
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGQUIT",
        )
        try:
            elastic_launch(config, sys.executable)(*words)
        except ChildFailedError as error:
            codes = {rank: one.exitcode for rank, one in sorted(error.failures.items())}
            said = [code for code in codes.values() if code > 0]
            killed = tuple(rank for rank, code in codes.items() if code == -signal.SIGKILL)
            if killed and not {*said} - {128 + signal.SIGTERM}:
                # the launcher ended the others before one could report it
                raise ended_error(killed, size) from None
            raise typer.Exit(said[0] if said else 128 - min(codes.values())) from None
    raise typer.Exit


def _visible_gpus(gpus: str | None) -> list[str]:
    """The GPUs of an option, by CUDA's names, among those that this command sees."""
    if gpus is None:
        return []
    import torch

    here = [str(number) for number in range(torch.cuda.device_count())]
    asked = here if gpus == "all" else gpus.split(",")
    if launched_rank() is not None and gpus != "all":
        return asked  # this process sees only these
    if len(asked) < 2 or not {*asked} <= {*here} or len({*asked}) < len(asked):
        found = f"{len(here)} here: {', '.join(here)}" if here else "none here"
        raise ValueError(f"--gpus {gpus}: expected two different GPUs or more, there are {found}")
    inherited = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = inherited.split(",") if inherited else here
    return [names[int(number)].strip() for number in asked]


@contextlib.contextmanager
def _forwarded_signals() -> Iterator[None]:
    """Forwards the signals that end a command to its child processes."""
    import psutil

    def forward(number: int, frame: FrameType | None) -> None:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)

    with handling(forward, handlers_in_force()):
        yield


def elastic_place(
    ctx: typer.Context, elastic: str | None, join: str | None
) -> tuple[str, int, tuple[int, int] | None] | None:
    """Host and port of the rendezvous of `--elastic` and `--join`, and the sizes of its groups."""
    from moe_runtime.parallel.communication.elastic import PORT
    from moe_runtime.serving.http.dividing import is_on_cpu

    if elastic is None and join is None:
        return None
    if elastic is not None and join is not None:
        raise ValueError("--join joins the server that has --elastic: leave one of them out")
    name = "--join" if elastic is None else "--elastic"
    refuse_given(ctx, {"processes", "gpus", "placement"}, f"divides it too: leave {name} out")
    if launched_rank() is not None:
        raise ValueError(f"{name} starts without torchrun")
    if not is_on_cpu({"device": ctx.params["device"]}):
        raise ValueError(f"{name} divides a model among CPUs: give --device cpu too")
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if join is not None:
        found = re.fullmatch(r"\[?(.+?)\]?:(\d+)", join)
        if found is None:
            raise ValueError(f"--join {join}: expected HOST:PORT")
        return found[1], int(found[2]), None
    found = re.fullmatch(r"(\d+):(\d+)(?:@(\d+))?", elastic or "")
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"--elastic {elastic}: expected MIN:MAX, such as 1:4")
    return "localhost", int(found[3] or PORT), (int(found[1]), int(found[2]))


def follow_first(
    model: Any, engine: "EngineOptions | None" = None, *, may_leave: bool = False
) -> None:
    """Takes part in the steps of the first process's engine until it ends. Signals are held: the
    first process obeys them. One that may leave does so at once."""
    from moe_runtime.serving.following import follow

    with contextlib.ExitStack() as stack:
        if not may_leave:
            stack.enter_context(contextlib.closing(model.moe))
            stack.enter_context(stop_on_signals(is_held=lambda: True))
        follow(model, options=engine)


@contextlib.contextmanager
def joined_processes(session: Session) -> Iterator["ProcessGroup | None"]:
    """The group of the processes that `torchrun` started; None without it.

    Within the block only the first process has a stdout and stderr.

    Raises:
        RankFailureError: a process of the group ended, so that `torchrun` ended this one.
    """
    if launched_rank() is None:
        yield None
        return
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    from moe_runtime.parallel.communication.watch import CollectiveMonitor

    has_devices = torch.cuda.is_available()
    if has_devices:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    store, rank, size = next(rendezvous("env://", timeout=_BACKEND_LIMIT))
    store.set_timeout(_BACKEND_LIMIT)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_devices else "gloo",
        store=PrefixStore(_fresh_prefix(store, rank, size), store),
        rank=rank,
        world_size=size,
        timeout=_BACKEND_LIMIT,
    )
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    session.say = _speaker(group.get_group_store(), dist.get_rank(), sys.stderr)
    with contextlib.ExitStack() as stack:
        if dist.get_rank() > 0:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        stack.enter_context(named_end(CollectiveMonitor(group)))
        yield group
    # Not after an error: the other processes may be gone.
    dist.destroy_process_group()


def _fresh_prefix(store: "Store", rank: int, size: int) -> str:
    """A new prefix of keys in the store, the same in all processes.

    `torchrun` keeps its store when it restarts processes, and launchers on several machines count
    restarts separately. So the first process makes the prefix up, and confirms it to each process
    under that process's own number: an older prefix is never confirmed.
    """
    if size == 1:
        return f"moe/{secrets.token_hex(8)}"
    own = secrets.token_hex(8)
    if rank == 0:
        prefix = f"moe/{own}"
        store.set(_NEWEST, prefix)
        for other in range(1, size):
            while not store.check([f"{prefix}/came/{other}"]):
                time.sleep(_POLL_S)
            store.set(f"{prefix}/go/{store.get(f'{prefix}/came/{other}').decode()}", "")
        return prefix
    while True:
        if store.check([_NEWEST]):
            prefix = store.get(_NEWEST).decode()
            store.set(f"{prefix}/came/{rank}", own)
            if store.check([f"{prefix}/go/{own}"]):
                return prefix
        time.sleep(_POLL_S)


def _speaker(store: "Store", rank: int, terminal: TextIO) -> Callable[[Exception, str], None]:
    """Prints each error once for all processes, on the terminal of this one.

    The failure of another process is printed only if nothing else was: that process knows why.
    """

    def may_speak(error: Exception, line: str) -> bool:
        if isinstance(error, RankFailureError):
            return store.add(_ERRORS, 1) == 1
        key = f"{_ERRORS}/{zlib.crc32(line.encode())}"
        if rank > 0:
            # the first process prints an error that all have
            with contextlib.suppress(RuntimeError):
                store.wait([key], _FIRST_SPEAKS)
        store.add(_ERRORS, 1)
        return store.add(key, 1) == 1

    def say(error: Exception, line: str) -> None:
        try:
            is_ours = may_speak(error, line)
        except RuntimeError:
            is_ours = True  # the process with the store is gone
        if is_ours:
            where = f"rank {rank}: " if rank and not isinstance(error, RankFailureError) else ""
            print(f"moe-runtime: error: {where}{line}", file=terminal, flush=True)

    return say


class _Terminated(BaseException):
    """SIGTERM came."""


@contextlib.contextmanager
def named_end(watch: "CollectiveMonitor") -> Iterator[None]:
    """Turns a SIGTERM, or an error of torch, into an error that names the ended process."""

    def end(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    # after an error SIGTERM is ignored: `torchrun` must not cut off the last line
    after = signal.SIG_IGN
    try:
        try:
            yield
        except typer.Exit:
            raise
        except (RuntimeError, OSError) as error:
            # torch's own exchanges (FSDP2, checkpoints, gates) do not name the missing rank
            deadline = time.monotonic() + _SEEN_S
            while not (ended := watch.ended_ranks()):
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)
            raise ended_error(ended, watch.size) from error
        after = before
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ended = watch.ended_ranks()
        if not ended:
            raise typer.Exit(128 + signal.SIGTERM) from None
        raise ended_error(ended, watch.size) from None
    finally:
        signal.signal(signal.SIGTERM, after)


def ended_error(ranks: tuple[int, ...], size: int) -> RankFailureError:
    noun = "rank" if len(ranks) == 1 else "ranks"
    verb = "has" if len(ranks) == 1 else "have"
    names = ", ".join(map(str, ranks))
    return RankFailureError(f"{noun} {names} of {size} {verb} ended", ranks=ranks)


def from_first(group: "ProcessGroup | None", name: str, make: Callable[[], ValueT]) -> ValueT:
    """A JSON value that the first process makes for all; each value has its own `name`."""
    if group is None:
        return make()
    store, key = group.get_group_store(), f"moe/shared/{name}"
    if group.rank() == 0:
        value = make()
        store.set(key, json.dumps(value))
        return value
    while not store.check([key]):
        time.sleep(_POLL_S)
    return json.loads(store.get(key))


def at_first(group: "ProcessGroup | None", name: str, text: str) -> list[str]:
    """The texts of all processes in the first one; an empty list in the others."""
    if group is None:
        return [text]
    store = group.get_group_store()
    store.set(f"moe/gathered/{name}/{group.rank()}", text)
    if group.rank() > 0:
        return []
    keys = [f"moe/gathered/{name}/{rank}" for rank in range(group.size())]
    while not store.check(keys):
        time.sleep(_POLL_S)
    return [store.get(key).decode() for key in keys]
