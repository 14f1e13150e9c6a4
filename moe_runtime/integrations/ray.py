"""Many copies of a model on a Ray cluster: files of prompts, and a Ray Serve application.

`answer_on_ray` divides a batch between actors with an engine each. It gives requests as they are
needed and takes answers one by one, so an actor that is lost costs only what it had not answered.

`application` is `moe-runtime serve` on every replica, behind Ray Serve's prefix-aware router:

    serve run moe_runtime.integrations.ray:application model=PATH host_memory=7GiB
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import moe_runtime
from moe_runtime.config import parse_budget
from moe_runtime.errors import RankFailureError
from moe_runtime.serving.batches.batch_run import (
    Answered,
    Batch,
    BatchSettings,
    BatchWork,
    Job,
    answer_jobs,
    needs_of,
    room_of,
)
from moe_runtime.serving.batches.offline import News, order_of_work

# Not by a statement: where Ray is absent, type checkers take this module for it.
ray: Any = importlib.import_module("ray")
RayActorError: Any = ray.exceptions.RayActorError
RayTaskError: Any = ray.exceptions.RayTaskError

HELD_SHARE = 0.75
"""An engine gets this part of its share of the open requests; the rest goes to idle engines."""
MOST_LOSSES = 4
"""Engines that may be lost one after another without an answer in between."""
LOOK_S = 0.5
ANSWERS_S = 10.0
PLACED_S = 5.0
"""A cluster that is this long without room for an engine is busy."""


class BatchEngine:
    """A model in an actor, which answers jobs as they come."""

    def __init__(self, settings: BatchSettings, num_threads: int | None) -> None:
        self._settings = settings
        self._num_threads = num_threads
        self._jobs: dict[int, Job] = {}
        self._news: News = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Answered | BaseException | None] = queue.SimpleQueue()

    def is_placed(self) -> bool:
        """The cluster has found room for the actor once it answers."""
        return True

    def load(self, needs: Mapping[str, int]) -> None:
        """Loads the model with room for such requests. Raises as `moe_runtime.load`."""
        if self._num_threads is not None:
            import torch

            torch.set_num_threads(self._num_threads)
        settings = self._settings
        self._batch, room = Batch((), settings), room_of(needs, settings)
        self._loaded: Any = moe_runtime.load(settings.model, max_tokens=room, **settings.loading)

    def add(self, jobs: Mapping[int, Job]) -> None:
        self._jobs.update(jobs)
        self._news.put({number: self._batch.request_of(job) for number, job in jobs.items()})

    def answers(self) -> Iterator[Answered]:
        """Every answer as soon as it is there; ends with the actor."""
        threading.Thread(target=self._answer, name="moe-batch", daemon=True).start()
        while (one := self._done.get()) is not None:
            if isinstance(one, BaseException):
                raise one
            yield one

    def _answer(self) -> None:
        try:
            engine, take = self._settings.engine, self._done.put
            answer_jobs(self._loaded, self._batch, self._jobs, engine, take, self._news)
        finally:
            self._done.put(sys.exception())


@dataclasses.dataclass(eq=False)
class _Worker:
    """An actor, its jobs, and the reference that is awaited: of its loading, or its answers."""

    actor: Any
    awaited: Any
    is_ready: bool = False
    held: dict[int, Job] = dataclasses.field(default_factory=dict)


def answer_on_ray(
    address: str, num_engines: int | None, say: Callable[[str], None]
) -> Callable[[BatchWork], None]:
    """Makes an ``answer`` for `run_batch`: engines on the nodes of a Ray cluster.

    Checkpoint, pictures and adapters must be at the same place on all nodes.

    Args:
        address: HOST:PORT of the cluster, ``auto`` for the one that this machine belongs to, or
            ``local`` for one that begins and ends with this call.
        num_engines: None for one on each GPU, or on each node where there is no GPU.
        say: takes a line about an engine that was lost.
    """
    if address.startswith("ray://"):
        raise ValueError(
            f"--ray {address}: expected the cluster's HOST:PORT, such as HOST:6379, or auto, on a "
            "machine of the cluster"
        )

    def answer(work: BatchWork) -> None:
        with _connected(address):
            _Pool(work, num_engines, say).run()

    return answer


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    """A connection to a cluster; one that was open before stays open."""
    if ray.is_initialized():
        yield
        return
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    host, has_port, port = address.rpartition(":")
    try:
        if has_port:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=ANSWERS_S).close()
        ray.init(address, logging_level="ERROR", log_to_driver=False, include_dashboard=None)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise RankFailureError(f"--ray {address}: no cluster answers there: {reason}") from error
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
    try:
        yield
    finally:
        ray.shutdown()


class _Layout(NamedTuple):
    """Engines of a cluster and the processors and GPUs of each."""

    num_engines: int
    num_cpus: int
    num_gpus: int


def _layout(nodes: list[Mapping[str, float]], device: str, wanted: int | None) -> _Layout:
    """Divides the resources of all nodes among ``wanted`` engines of one size."""
    gpus = [] if device == "cpu" else [int(node.get("GPU", 0)) for node in nodes]
    if any(gpus) or device.startswith("cuda"):
        most = sum(gpus)
        if not 1 <= (wanted or most) <= most:
            raise ValueError(f"--ray-engines {wanted or 1}: the cluster has {most} GPUs")
        return _Layout(wanted or most, 1, 1)
    cpus = [int(node.get("CPU", 0)) for node in nodes if node.get("CPU", 0) >= 1]
    count = wanted or len(cpus)
    for size in range(max(cpus, default=0), 0, -1):
        if sum(num // size for num in cpus) >= count > 0:
            return _Layout(count, size, 0)
    raise ValueError(f"--ray-engines {count}: the cluster has {sum(cpus)} free processors")


class _Pool:
    """Gives jobs to engines and takes their answers, on the driver."""

    def __init__(
        self, work: BatchWork, num_engines: int | None, say: Callable[[str], None]
    ) -> None:
        self._work, self._say = work, say
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        loading = work.settings.loading
        self._layout = _layout(nodes, loading["device"], num_engines)
        budget = parse_budget(loading["host_memory"], name="--host-memory")
        if budget.num_bytes is None and self._layout.num_engines > len(nodes):
            raise ValueError(
                f"{self._layout.num_engines} engines on {len(nodes)} machines: --host-memory "
                "must say what each may take, such as 7GiB"
            )
        self._needs = ray.put(needs_of(work.jobs.values()))
        requests = {number: job.request for number, job in work.jobs.items()}
        self._queue = deque(order_of_work(requests))
        self._left = len(self._queue)
        self._workers: list[_Worker] = []
        self._losses = 0

    def run(self) -> None:
        try:
            for _ in range(self._layout.num_engines):
                self._start()
            if self._work.progress is not None:
                self._work.progress(f"loading on Ray, {len(self._workers)} engines", 0, 0)
            placed = [worker.actor.is_placed.remote() for worker in self._workers]
            if not ray.wait(placed, num_returns=1, timeout=PLACED_S)[0]:
                self._say(self._lacking())
            while not any(worker.is_ready for worker in self._workers):
                self._look()
            with self._work.answering():
                while self._left:
                    self._look()
        finally:
            for worker in self._workers:
                ray.kill(worker.actor)

    def _lacking(self) -> str:
        """What a busy cluster has no room for."""
        _, num_cpus, num_gpus = self._layout
        free = ray.available_resources()
        what = "a processor and a GPU" if num_gpus else f"{num_cpus} processors"
        found = f"{free.get('CPU', 0):g} processors, {free.get('GPU', 0):g} GPUs"
        return f"the cluster is busy: an engine waits for {what} on one machine; free are {found}"

    def _start(self) -> None:
        _, num_cpus, num_gpus = self._layout
        kind: Any = ray.remote(BatchEngine)
        actor = kind.options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_concurrency=2,  # jobs are added while answers are taken
            scheduling_strategy="SPREAD",
        ).remote(self._work.settings, None if num_gpus else num_cpus)
        self._workers.append(_Worker(actor, actor.load.remote(self._needs)))

    def _look(self) -> None:
        """Takes the answers that have come from any engine."""
        by_ref = {worker.awaited: worker for worker in self._workers}
        done, _ = ray.wait(list(by_ref), num_returns=1, timeout=LOOK_S, fetch_local=False)
        for ref in done:
            worker = by_ref[ref]
            try:
                self._take(worker)
            except RayTaskError as error:
                # No other machine could load the model, or answer this, either.
                cause: Any = error.cause
                if not worker.is_ready or isinstance(cause, ValueError):
                    raise cause from None
                self._lose(worker, cause)
            except RayActorError as error:
                self._lose(worker, error)

    def _take(self, worker: _Worker) -> None:
        if not worker.is_ready:
            ray.get(worker.awaited)
            worker.is_ready = True
            worker.awaited = worker.actor.answers.options(num_returns="streaming").remote()
        else:
            answered: Answered = ray.get(next(worker.awaited))
            del worker.held[answered[0]]
            self._left -= 1
            self._losses = 0
            self._work.take(answered)
        self._give(worker)

    def _give(self, worker: _Worker) -> None:
        """Gives an engine more jobs, many at a time."""
        num_ready = sum(one.is_ready for one in self._workers)
        most = 2 * self._work.settings.engine.most_running
        wanted = min(math.ceil(HELD_SHARE * self._left / num_ready), most)
        lacking = min(wanted - len(worker.held), len(self._queue))
        if lacking > 0 and (not worker.held or lacking > wanted // 8):
            numbers = [self._queue.popleft() for _ in range(lacking)]
            jobs = {number: self._work.jobs[number] for number in numbers}
            worker.held |= jobs
            worker.actor.add.remote(jobs)

    def _lose(self, worker: _Worker, error: BaseException) -> None:
        """Gives the jobs of a dead engine to others, and starts another engine."""
        self._workers.remove(worker)
        ray.kill(worker.actor)
        self._losses += 1
        reason = str(error).splitlines()[0]
        if self._losses >= MOST_LOSSES:
            raise RankFailureError(
                f"{self._losses} engines on Ray ended without an answer in between: {reason}"
            ) from error
        self._say(f"an engine on Ray was lost; others answer its {len(worker.held)} requests")
        self._queue.extendleft(reversed(worker.held))
        self._start()
        for one in self._workers:
            if one.is_ready:
                self._give(one)


# ray.serve.llm has it too, where vLLM or SGLang is installed.
ROUTER = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router"
    ".PrefixCacheAffinityRouter"
)
MOST_BODY_BYTES = 64 << 20
# The fields of a body that a prompt begins with, in any of the protocols.
_BEGINNINGS = ("instructions", "system", "messages", "prompt", "input")
_OF_A_CONNECTION = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}
# A server that ends when the replica does: then the pipe closes.
_SERVER = """
import os, signal, sys, threading
def watch():
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=watch, daemon=True).start()
from moe_runtime.cli.program import program
sys.exit(program())
"""


@dataclasses.dataclass(frozen=True, slots=True)
class AskedRequest:
    """A request over HTTP; the router compares ``prompt`` with earlier prompts of replicas."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    prompt: str


def beginning_of(body: bytes) -> str:
    """The text that a request's prompt begins with, never empty."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return "{}"
    return json.dumps([fields[name] for name in _BEGINNINGS if fields.get(name)])


class Replica:
    """`moe-runtime serve` in a process of its own, and its requests."""

    def __init__(self, words: list[str]) -> None:
        command = [sys.executable, "-P", "-c", _SERVER, "serve", *words]
        pipe = subprocess.PIPE
        self._server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", "0", "--json"],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
        )
        self._last = ""
        threading.Thread(target=self._read_log, daemon=True).start()
        stdout: Any = self._server.stdout
        first = stdout.readline()
        if not first:
            self._server.wait()
            raise RuntimeError(self._last or f"the server ended: {self._server.returncode}")
        import httpx2

        self._http = httpx2.AsyncClient(
            base_url=json.loads(first)["address"],
            timeout=None,
            limits=httpx2.Limits(max_connections=None),
        )

    async def answer(self, asked: AskedRequest) -> AsyncIterator[Any]:
        """Status and headers, then the body as it comes."""
        async with self._http.stream(
            asked.method, asked.target, headers=asked.headers, content=asked.body
        ) as response:
            yield response.status_code, _carried(response.headers.items())
            async for piece in response.aiter_raw():
                yield piece

    def check_health(self) -> None:
        if self._server.poll() is not None:
            raise RuntimeError(f"the server ended: {self._last}")

    def __del__(self) -> None:
        self._server.terminate()
        self._server.wait()

    def _read_log(self) -> None:
        stderr: Any = self._server.stderr
        for line in stderr:
            self._last = line.decode(errors="replace").strip() or self._last
            print(self._last, file=sys.stderr)


class Entrance:
    """Takes requests of Ray Serve's proxies to the replica that suits their prompts."""

    def __init__(self, replicas: Any) -> None:
        self._answer = replicas.options(stream=True).answer

    async def __call__(self, request: Any) -> Any:
        from starlette.responses import PlainTextResponse, StreamingResponse

        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BODY_BYTES:
                return PlainTextResponse("the body is longer than 64 MiB", 413)
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        answer = self._answer.remote(
            AskedRequest(
                method=request.method,
                target=target,
                headers=_carried(request.headers.items()),
                body=bytes(body),
                prompt=beginning_of(bytes(body)),
            )
        )
        status, headers = await anext(answer)
        response = StreamingResponse(_until_cancelled(answer), status)
        response.raw_headers = [(key.encode(), value.encode()) for key, value in headers]
        return response


async def _until_cancelled(answer: Any) -> AsyncIterator[bytes]:
    try:
        async for piece in answer:
            yield piece
    finally:
        answer.cancel()  # no effect on one that has ended


def _carried(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(key, value) for key, value in headers if key.lower() not in _OF_A_CONNECTION]


def application(options: Mapping[str, str]) -> Any:
    """A Ray Serve application; requests are those of `moe-runtime serve`.

    Args:
        options: ``model``, and options of `moe-runtime serve` by name, such as ``host_memory``;
            ``true`` for those without a value. ``min_replicas`` and ``max_replicas`` (1) bound
            the number of replicas, each with ``num_cpus`` (1) and ``num_gpus`` (0). Replicas
            are added while more than ``target_requests`` (``max_running``, 32) wait or run on
            each.

    Raises:
        ValueError: there is no ``model``, or a number is none.
    """
    serve: Any = importlib.import_module("ray.serve")
    words = dict(options)
    if "model" not in words:
        raise ValueError("expected model=PATH, the checkpoint that replicas serve")
    most_running = _number(options, "max_running", 32)
    numbers = {"min_replicas": 1, "max_replicas": 1, "num_cpus": 1, "num_gpus": 0}
    given = {name: _number(options, name, default) for name, default in numbers.items()}
    target = _number(options, "target_requests", most_running)
    if not 1 <= given["min_replicas"] <= given["max_replicas"]:
        raise ValueError(f"expected 1 <= min_replicas <= max_replicas, got {given}")
    line = [words["model"]]
    for name, value in words.items():
        if name not in {"model", "target_requests", *numbers}:
            line += [f"--{name.replace('_', '-')}", *([] if value == "true" else [value])]
    replicas = serve.deployment(
        name="moe-runtime",
        max_ongoing_requests=2 * max(most_running, target),
        autoscaling_config={
            "min_replicas": given["min_replicas"],
            "max_replicas": given["max_replicas"],
            "target_ongoing_requests": target,
        },
        request_router_config={
            "request_router_class": ROUTER,
            # for a prefix, one replica may have this many requests more than another
            "request_router_kwargs": {"imbalanced_threshold": most_running, "do_eviction": True},
        },
        ray_actor_options={"num_cpus": given["num_cpus"], "num_gpus": given["num_gpus"]},
    )(Replica)
    front = serve.deployment(
        name="front", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0}
    )(Entrance)
    return front.bind(replicas.bind(line))


def _number(options: Mapping[str, Any], name: str, default: int) -> int:
    value = str(options.get(name, default))
    if not value.isdigit():
        raise ValueError(f"{name} must be a number, got {value!r}")
    return int(value)
