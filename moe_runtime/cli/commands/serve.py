"""``moe-runtime serve``: answer requests over HTTP, as OpenAI's API does."""

import contextlib
import dataclasses
import gc
import importlib.util
import json
import socket
import sys
import threading
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.cli import console, options
from moe_runtime.cli.processes import (
    divided,
    elastic_place,
    follow_first,
    joined_processes,
    start_processes,
)
from moe_runtime.cli.stopping import StopRequest, stop_on_signals
from moe_runtime.cli.strict import refuse_given
from moe_runtime.config import format_bytes
from moe_runtime.errors import MoERuntimeWarning, UnsupportedModelError
from moe_runtime.files import read_bounded

if TYPE_CHECKING:
    from moe_runtime.serving.http.model_loader import ServeSettings
    from moe_runtime.serving.http.starting import Ready

_NEEDED = ("starlette", "pydantic", "uvicorn", "prometheus_client", "llguidance")
_MOST_KEY_BYTES = 1 << 20
_OF_ONE_PROCESS = frozenset(
    {
        *("on_demand", "unload_idle", "adapters", "adapter_memory", "allow_adapter_loading"),
        "prefix_disk",
    }
)
_ALIKE = ("max_tokens", "dtype", "activations", "kv_cache", "routing", "skip_below")
"""Options of loading on which the bits of all processes depend."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_STOPPING = (
    "finishing running answers; Ctrl-C or SIGTERM once more cuts them off",
    "cutting answers off; ends with the step that runs, once more stops at once",
)
"""Messages at the first and the second signal."""


def serve(
    ctx: typer.Context,
    *,
    models: Annotated[list[str], typer.Argument(metavar="MODEL...")],
    name: list[str] | None = None,
    on_demand: bool = False,
    unload_idle: Annotated[float | None, typer.Option(min=0.001, metavar="SECONDS")] = None,
    adapters: Annotated[list[str] | None, typer.Option("--adapter", metavar="NAME=FOLDER")] = None,
    adapter_memory: options.Size | None = None,
    allow_adapter_loading: bool = False,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    api_keys: Path | None = None,
    cors: Annotated[list[str] | None, typer.Option(metavar="ORIGIN")] = None,
    max_tokens: options.Count | None = None,
    loading: options.Loading,
    several: options.SeveralProcesses,
    elastic: Annotated[str | None, typer.Option(metavar="MIN:MAX")] = None,
    join: Annotated[str | None, typer.Option(metavar="HOST:PORT")] = None,
    max_running: options.Count = 32,
    max_waiting: options.Count = 256,
    step_tokens: options.Count = 256,
    max_slowdown: float = 3.0,
    exact: options.Exact = False,
    decode_rows: Annotated[int, typer.Option(min=0, max=16)] = 4,
    prefix_cache: bool = True,
    share_prefixes: bool = False,
    prefix_disk: options.Size | None = None,
    max_body: str | None = None,
    allow_remote_images: bool = False,
    max_seconds: Annotated[float, typer.Option(min=0.001)] = 3600.0,
    drain_seconds: options.NotNegative | None = None,
    warm_up: bool = False,
    dry_run: bool = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    config: options.Config = None,
) -> None:
    """Answer requests over HTTP as OpenAI's API does; experts that do not fit stream from disk.

    Several models share one budget and take turns to compute. POST /models/load and /models/unload
    load and unload them.

    Clients of that API work as they are: give them the address followed by /v1. The address itself
    has a page to chat and to watch hit rate and reads; /metrics has metrics for Prometheus.

    After the first Ctrl-C or SIGTERM the server accepts no requests and finishes running answers; a
    second one cuts them off with an error. docs/serving.md has units, containers and dashboards.

    Args:
        models: Folders of safetensors checkpoints, GGUF files, or names on the hub; requests that
            name no model get the first.
        name: Name by which requests ask for the model, its folder's name when omitted; repeat it
            for several models, in their order.
        on_demand: Load a model when a request asks for it, and unload the least recently used ones
            where memory is short. Without it, all are loaded at the start.
        unload_idle: Unload a model after so many seconds without a request; the next one loads it
            again.
        adapters: LoRA adapter, in PEFT's format, that requests ask for by this name; repeatable.
            MODEL:NAME=FOLDER names its model where there are several.
        adapter_memory: Memory for the adapters of a model, part of --host-memory: adapters are read
            when requested, and the least recently used are evicted. Enough for all when omitted.
        allow_adapter_loading: Requests to /v1/load_lora_adapter and /v1/unload_lora_adapter add and
            remove adapters, from any folder that the server can read, within --adapter-memory.
        host: Address to listen at; 0.0.0.0 for all, and then give --api-keys.
        port: 0 takes any free port.
        api_keys: File with a key in each line; requests must have one of them.
        cors: Pages of this origin may read answers in a browser, * for all; repeatable.
        max_tokens: Maximum tokens of all running requests together, prompts and answers, which
            take memory. [4096, or more if all experts fit anyway]
        elastic: Divide the experts among so many processes, which come and go while requests go on;
            the others are started with --join. MIN:MAX@PORT has another port for them than 29400.
            CPU only.
        join: Compute for the server with --elastic at this address; with its model and options.
        max_running: Requests that are answered at a time.
        max_waiting: Requests that may wait; more get 429.
        step_tokens: Maximum prompt tokens per step. A higher value gives more throughput; a lower
            value keeps running answers smooth.
        max_slowdown: How many times as long a step may take with prompt tokens as without. A step
            takes fewer prompt tokens to keep to it, unless each then costs three times as much. inf
            always allows --step-tokens.
        decode_rows: On a GPU, answers at a time whose steps are CUDA graphs. Their KV cache takes
            half of --max-tokens, divided into rows. An answer that outgrows its row, or has none,
            continues without graphs. 0 uses no graphs.
        prefix_cache: Keep the KV cache of prompts for later prompts that begin alike.
        share_prefixes: With --api-keys, requests of one key use the prefix cache of other keys.
            Their users can tell by cached_tokens and by time what others sent.
        prefix_disk: Also keep the prefix cache on disk, up to this size, for later servers too, and
            requests that others preempt: in $XDG_CACHE_HOME/moe-runtime/prefixes, or ~/.cache/...
            So are responses, within the same size.
        max_body: Longest body of a request. 1MiB by default, a text of 200,000 tokens; 64MiB if a
            model takes pictures.
        allow_remote_images: Fetch pictures from the http addresses in requests, as this machine
            reaches them.
        max_seconds: Seconds that a request may take, waiting included.
        drain_seconds: How long running answers may take after SIGTERM or Ctrl-C. No limit by
            default.
        warm_up: Fill memory with experts and compile kernels before accepting requests.
        dry_run: Load the models, show how they would be served, and stop.
        as_json: Log in JSON lines; print the server's address as JSON.
    """
    absent = [package for package in _NEEDED if not importlib.util.find_spec(package)]
    if absent:
        raise UnsupportedModelError(
            f"the server needs {', '.join(absent)}; install them with "
            "pip install 'moe-runtime[serve]'"
        )
    keys = read_keys(api_keys)
    body_bytes = None if max_body is None else options.bytes_of(max_body, "--max-body")
    disk_bytes = None
    if prefix_disk is not None:
        disk_bytes = options.bytes_of(prefix_disk, "--prefix-disk", needs_unit=True)
    adapter_bytes = None
    if adapter_memory is not None:
        adapter_bytes = options.bytes_of(adapter_memory, "--adapter-memory", needs_unit=True)
        if not (adapters or allow_adapter_loading):
            raise ValueError("--adapter-memory is for adapters: give --adapter NAME=FOLDER too")
    elif allow_adapter_loading:
        raise ValueError("--allow-adapter-loading needs memory for them: give --adapter-memory too")
    console.quiet_transformers(ctx.obj)
    from moe_runtime.allocator import use_one_heap
    from moe_runtime.serving.http.dividing import is_on_cpu
    from moe_runtime.serving.http.model_loader import ServeSettings, load_to_follow
    from moe_runtime.serving.http.server import Access, Limits
    from moe_runtime.serving.http.starting import run_server
    from moe_runtime.serving.requests import EngineOptions

    if is_on_cpu({"device": loading.device}):
        why = "has no effect: steps are recorded on a GPU, and this server computes on the CPU"
        refuse_given(ctx, {"decode_rows"}, f"{why} (--device {loading.device}); leave it out")
    use_one_heap()
    log = ServerLog(as_json=as_json)
    if as_json:
        warnings.showwarning = lambda message, *_, **__: log("warning", {"message": str(message)})
    settings = ServeSettings(
        models=models,
        names=name or (),
        adapters=adapters or (),
        host=host,
        port=port,
        loading={**loading.settings(), "max_tokens": max_tokens, "warm_up": warm_up},
        engine=EngineOptions(
            most_waiting=max_waiting,
            most_running=max_running,
            prompt_tokens=step_tokens,
            max_slowdown=max_slowdown,
            reuses_prefixes=prefix_cache,
            exact=exact,
            decode_rows=decode_rows,
        ),
        limits=Limits(seconds=max_seconds),
        body_bytes=body_bytes,
        # without keys: refuse requests of other sites by DNS rebinding
        access=Access(
            keys=keys,
            origins=tuple(cors or ()),
            hosts=(*LOOPBACK, "[::1]") if host in LOOPBACK and not keys else None,
            shares_prefixes=share_prefixes,
        ),
        drain_s=drain_seconds,
        prefix_disk_bytes=disk_bytes,
        adapter_bytes=adapter_bytes,
        loads_adapters=allow_adapter_loading,
        fetches_pictures=allow_remote_images,
        on_demand=on_demand,
        idle_s=unload_idle,
    )
    place = elastic_place(ctx, elastic, join)
    if console.num_launched() > 1 or several.are_asked_for or place is not None:
        refuse_given(ctx, _OF_ONE_PROCESS, "is for one process: leave it out")
        if len(models) > 1:
            raise ValueError(f"several processes serve one model, got {len(models)}")
    start_processes(several, ctx.obj)
    with joined_processes(ctx.obj) as group, contextlib.ExitStack() as stack:
        own = {**settings.loading, **divided(several, group)}
        if place is not None:
            from moe_runtime.parallel.communication.elastic import ElasticGroup

            own["group"] = ElasticGroup(*place, lambda line: log("processes", {"message": line}))
            same = {"the options of serve": str([*map(own.get, _ALIKE), settings.engine])}
            own["group"].agree("serve", same)
            if elastic is not None:
                log("rendezvous", {"join": f"{socket.gethostname()}:{own['group'].port}"})
        settings = dataclasses.replace(settings, loading=own)
        if join is not None or (group is not None and group.rank()):
            follow_first(load_to_follow(settings), settings.engine, may_leave=join is not None)
            return
        progress = stack.enter_context(console.loading_bar())
        stop: StopRequest | None = None
        # set while an interrupt would cut connections off
        answering = threading.Event()

        def begin(ready: "Ready") -> None:
            nonlocal stop
            if ctx.obj.on_loaded is not None:
                ctx.obj.on_loaded(ready.loaded)
            stack.close()  # the loading bar
            # without the loaded objects, a garbage collection does not take half a second
            gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)  # libraries report objects that remain at exit
            answering.set()
            messages = map(log.line_of, _STOPPING)
            stop = stack.enter_context(stop_on_signals(*messages, is_held=answering.is_set))
            announce(ready, settings, as_json=as_json)

        run_server(
            settings,
            log=log if not dry_run else lambda *_: None,
            on_ready=begin,
            is_stopping=lambda: dry_run or (stop is not None and stop.is_set),
            is_cut_off=lambda: stop is not None and stop.num_signals > 1,
            on_answered=answering.clear,
            progress=progress,
        )
        if stop is not None and stop.is_set:
            raise typer.Exit(stop.exit_code)


def read_keys(file: Path | None) -> tuple[str, ...]:
    """The keys of a file, one in each line; lines that begin with `#` are comments."""
    if file is None:
        return ()
    text = read_bounded(file, max_bytes=_MOST_KEY_BYTES).decode("utf-8", errors="replace")
    lines = (line.strip() for line in text.splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys or not all(key.isascii() and key.isprintable() for key in keys):
        raise ValueError(f"--api-keys {file}: expected a key of printable ASCII in each line")
    return keys


def announce(ready: "Ready", settings: "ServeSettings", *, as_json: bool) -> None:
    """Prints the models, the address, and how to call it."""
    if settings.host not in LOOPBACK and not settings.access.keys:
        # as a line, or in JSON through the log
        warnings.warn(
            f"any client that reaches {settings.host} may ask, and so may pages in its browser; "
            "give --api-keys",
            MoERuntimeWarning,
            stacklevel=1,
        )
    models = [place.served[place.name] for place in ready.places if place.served]
    counts = [model.engine.statistics() for model in models]  # of all processes
    adapters = {name: place.name for place in ready.places for name in place.adapters}
    if as_json:
        described: dict[str, dict[str, Any]] = {
            place.name: {"model": place.name, "status": place.status} for place in ready.places
        }
        for model, working in zip(models, counts, strict=True):
            described[model.name] |= {
                "max_request_tokens": model.engine.most_request_tokens,
                "budget_bytes": working.experts.budget_bytes,
                "adapter_bytes": working.adapter_bytes,
            }
        every = list(described.values())
        console.print_json(
            {"address": ready.address, **every[0], "models": every, "adapters": adapters}
        )
        return
    from moe_runtime.inference.generation import sampling_words

    rows = [
        ("address", f"{ready.address}/v1" + ("" if settings.access.keys else " (no key needed)")),
        ("page, metrics", f"{ready.address}/  {ready.address}/metrics"),
    ]
    for place in ready.places:
        if not place.served:
            rows.append(("model", f"{place.name}, loaded when it is asked for"))
    for model, working, loaded in zip(models, counts, ready.loaded, strict=True):
        some = working.experts
        kept = min(some.expert_slots * some.slot_bytes, some.expert_bytes)
        rows += [
            ("model", model.name),
            (
                "memory",
                f"{format_bytes(some.budget_bytes)}; {format_bytes(kept)} of "
                f"{format_bytes(some.expert_bytes)} of experts fit",
            ),
            (
                "requests",
                f"{model.engine.most_request_tokens} tokens each, {working.kv_capacity} together: "
                f"{loaded.moe.facts.context.reason}",
            ),
        ]
        if some.draft_bytes:
            rows.append(("drafts", f"{format_bytes(some.draft_bytes)} of that memory"))
        chosen = sampling_words(model.defaults)
        rows.append(("choice of tokens", f"{chosen}, unless a request says otherwise"))
        if working.adapter_bytes:
            rows.append(("adapters", f"{format_bytes(working.adapter_bytes)} of memory beside it"))
    rows += [("adapter", f"{name} of {parent}") for name, parent in adapters.items()]
    console.print_rows("serving", rows, to_stderr=True)
    path, asked = "completions", '"prompt": "Once upon a time", "max_tokens": 32'
    if models and models[0].template is not None:
        path, asked = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
    key = " -H 'authorization: Bearer KEY'" if settings.access.keys else ""
    print(
        f"curl {ready.address}/v1/{path} -H 'content-type: application/json'{key} \\\n"
        f"  -d '{{{asked}}}'",
        file=sys.stderr,
        flush=True,
    )


class ServerLog:
    """Writes events to stderr, as text or JSON lines."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def line_of(self, message: str) -> str:
        """A message as a line of the log."""
        return json.dumps({"event": "signal", "message": message}) if self._as_json else message

    def __call__(self, event: str, fields: Mapping[str, Any]) -> None:
        now = datetime.now(UTC)
        if self._as_json:
            time = now.isoformat(timespec="milliseconds")
            line = json.dumps({"time": time, "event": event, **fields})
        else:
            words = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
            line = f"{now.astimezone():%H:%M:%S} {event} {words}".rstrip()
        print(line, file=sys.stderr, flush=True)


def _shown(value: Any) -> str:
    """A value as one printable word."""
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)
