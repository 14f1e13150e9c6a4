"""``moe-runtime serve``: answer requests over HTTP, as OpenAI's API does."""

import contextlib
import gc
import importlib.util
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_runtime.cli import options
from moe_runtime.cli.console import Session, loading_bar, quiet_transformers
from moe_runtime.cli.serve_screen import LOOPBACK, ServerLog, announce
from moe_runtime.cli.stopping import StopRequest, stop_on_signals
from moe_runtime.cli.strict import refuse_given, refuse_idle_predictor
from moe_runtime.config import parse_budget
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.files import read_bounded

if TYPE_CHECKING:
    from moe_runtime.serving.http.starting import Ready

_NEEDED = ("starlette", "pydantic", "uvicorn", "prometheus_client", "llguidance")
_MOST_KEY_BYTES = 1 << 20
_STOPPING = (
    "finishing running answers; Ctrl-C or SIGTERM once more cuts them off",
    "cutting answers off; ends with the step that runs, once more stops at once",
)
"""What is said at the first signal, and at the second one."""

Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help="Folders of safetensors checkpoints, GGUF files, or names on the hub; requests that "
        "name no model get the first.",
    ),
]
Name = Annotated[
    list[str] | None,
    typer.Option(
        help="By which requests ask for the model, its folder's name when omitted; once for each "
        "of several models, in their order.",
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=FOLDER",
        help="LoRA adapter, as PEFT writes it, that requests ask for by this name; several times "
        "for several. MODEL:NAME=FOLDER says whose it is where there are several models.",
    ),
]
AdapterMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for the adapters of a model, out of --host-memory: those asked for are read, "
        "and those used last stay. That of all when omitted.",
    ),
]
Host = Annotated[
    str, typer.Option(help="Address to listen at; 0.0.0.0 for all, and then give --api-keys.")
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")]
ApiKeys = Annotated[
    Path | None,
    typer.Option(help="File with a key in each line; requests must come with one of them."),
]
Cors = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        help="Pages of this origin may read answers in a browser, * for all; several times for "
        "several.",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens of all requests at a time, prompts and answers, that memory is set aside "
        "for; as many as the model knows when omitted, at most 4096.",
    ),
]
MaxRunning = Annotated[int, typer.Option(min=1, help="Requests that are answered at a time.")]
MaxWaiting = Annotated[int, typer.Option(min=1, help="Requests that may wait; more get 429.")]
StepTokens = Annotated[
    int,
    typer.Option(
        min=1,
        help="Most tokens of prompts in a step: more reads experts less often, fewer holds up "
        "those less who get their answer meanwhile.",
    ),
]
MaxSlowdown = Annotated[
    float,
    typer.Option(
        help="Times as long that a step may take with a prompt's tokens as without: fewer tokens "
        "of it are read at a time then, as long as they cost less than three times as much each; "
        "with inf they grow to --step-tokens.",
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="A request gets the bits that it would get alone, whatever runs beside it; slower.",
    ),
]
DecodeRows = Annotated[
    int,
    typer.Option(
        min=0,
        max=16,
        help="On a GPU, answers at a time whose steps are recorded and replayed; what they keep "
        "takes half of --max-tokens, a row each. Fewer rows are longer: an answer that outgrows "
        "its row, or has none, goes on in steps that are not recorded. 0 records none.",
    ),
]
PrefixCache = Annotated[
    bool, typer.Option(help="Keep what was computed of prompts for those that begin alike.")
]
SharePrefixes = Annotated[
    bool,
    typer.Option(
        "--share-prefixes",
        help="With --api-keys, requests of one key find what requests of other keys left in the "
        "prefix cache; their users can tell by cached_tokens and by time what others sent.",
    ),
]
PrefixDisk = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Keep it on the disk too, at most so much of it, for what memory forgets and for "
        "later servers: in $XDG_CACHE_HOME/moe-runtime/prefixes, or ~/.cache/...",
    ),
]
MaxBody = Annotated[
    str, typer.Option(help="Longest body of a request; 1MiB is a text of 200,000 tokens.")
]
MaxSeconds = Annotated[
    float, typer.Option(min=0.001, help="Seconds that a request may take, its wait included.")
]
DrainSeconds = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Seconds that running answers get to finish after SIGTERM or Ctrl-C; as many as they "
        "need when omitted.",
    ),
]
WarmUp = Annotated[
    bool,
    typer.Option(
        "--warm-up",
        help="Read experts as far as memory has room, and compile kernels, before the first "
        "request rather than while it waits.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Load the models, say how they would be served, and stop.")
]
JsonLog = Annotated[
    bool,
    typer.Option("--json", help="Log in JSON lines; say on stdout in JSON where the server is."),
]


def serve(
    ctx: typer.Context,
    models: Models,
    name: Name = None,
    adapters: Adapters = None,
    adapter_memory: AdapterMemory = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_keys: ApiKeys = None,
    cors: Cors = None,
    host_memory: options.HostMemory = "auto",
    device_memory: options.DeviceMemory = "auto",
    max_tokens: MaxTokens = None,
    max_running: MaxRunning = 32,
    max_waiting: MaxWaiting = 256,
    step_tokens: StepTokens = 256,
    max_slowdown: MaxSlowdown = 3.0,
    exact: Exact = False,
    decode_rows: DecodeRows = 4,
    prefix_cache: PrefixCache = True,
    share_prefixes: SharePrefixes = False,
    prefix_disk: PrefixDisk = None,
    max_body: MaxBody = "1MiB",
    max_seconds: MaxSeconds = 3600.0,
    drain_seconds: DrainSeconds = None,
    policy: options.Policy = "auto",
    shares: options.Shares = "auto",
    cache_code: options.CacheCode = "none",
    activations: options.Activations = "exact",
    misses: options.Misses = "device",
    prefetch: options.Prefetch = "auto",
    predictor: options.Predictor = "auto",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    warm_up: WarmUp = False,
    dry_run: DryRun = False,
    as_json: JsonLog = False,
    debug: options.Debug = False,
    config: options.Config = None,
) -> None:
    """Answer requests over HTTP as OpenAI's API does; experts that do not fit stream from disk.

    Several models divide one budget between them and compute one at a time, in turns.

    Clients of that API work as they are: give them the address with /v1 behind it. A page to chat
    and to watch hit rate and reads is at the address itself, metrics for Prometheus at /metrics.

    The first Ctrl-C or SIGTERM takes no more requests and lets running answers finish; a second
    one cuts them off with an error. docs/serving.md has units, containers, dashboards and sizes.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    _require_packages()
    keys = read_keys(api_keys)
    body_bytes = options.bytes_of(max_body, "--max-body")
    disk_bytes = None
    if prefix_disk is not None:
        disk_bytes = options.bytes_of(prefix_disk, "--prefix-disk", needs_unit=True)
    adapter_bytes = None
    if adapter_memory is not None:
        adapter_bytes = options.bytes_of(adapter_memory, "--adapter-memory", needs_unit=True)
        if not adapters:
            raise ValueError("--adapter-memory is for adapters: give --adapter NAME=FOLDER too")
    refuse_idle_predictor(ctx, policy, prefetch, predictor)
    for budget, option in ((host_memory, "--host-memory"), (device_memory, "--device-memory")):
        parse_budget(budget, name=option)
    quiet_transformers(session)
    from moe_runtime.allocator import use_one_heap
    from moe_runtime.serving.engine_options import EngineOptions
    from moe_runtime.serving.http.dividing import is_on_cpu
    from moe_runtime.serving.http.server import Access, Limits
    from moe_runtime.serving.http.starting import ServeSettings, run_server

    if is_on_cpu({"device": device}):
        why = "has no effect: steps are recorded on a GPU, and this server computes on the CPU"
        refuse_given(ctx, {"decode_rows"}, f"{why} (--device {device}); leave it out")
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
        loading={
            "device": device,
            "dtype": dtype,
            "host_memory": host_memory,
            "device_memory": device_memory,
            "policy": policy,
            "shares": shares,
            "cache_code": cache_code,
            "activations": activations,
            "misses": misses,
            "prefetch": prefetch,
            "predictor": predictor,
            "max_tokens": max_tokens,
            "warm_up": warm_up,
        },
        engine=EngineOptions(
            most_waiting=max_waiting,
            most_running=max_running,
            prompt_tokens=step_tokens,
            max_slowdown=max_slowdown,
            reuses_prefixes=prefix_cache,
            exact=exact,
            decode_rows=decode_rows,
        ),
        limits=Limits(body_bytes=body_bytes, seconds=max_seconds),
        # Without a key, pages of other sites whose names were made to lead here must not ask.
        access=Access(
            keys=keys,
            origins=tuple(cors or ()),
            hosts=(*LOOPBACK, "[::1]") if host in LOOPBACK and not keys else None,
            shares_prefixes=share_prefixes,
        ),
        drain_s=drain_seconds,
        prefix_disk_bytes=disk_bytes,
        adapter_bytes=adapter_bytes,
    )
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(loading_bar())
        stop: StopRequest | None = None
        # An interrupt would end the connections in the middle of what is sent.
        answering = threading.Event()

        def begin(ready: "Ready") -> None:
            nonlocal stop
            stack.close()  # the loading bar
            # What is loaded stays: passing over it, Python looks for cycles of requests often, and
            # not for half a second at a time.
            gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)  # libraries report what is left at the end of Python
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


def _require_packages() -> None:
    absent = [name for name in _NEEDED if not importlib.util.find_spec(name)]
    if absent:
        raise UnsupportedModelError(
            f"the server needs {', '.join(absent)}; install them with "
            "pip install 'moe-runtime[serve]'"
        )


def read_keys(file: Path | None) -> tuple[str, ...]:
    """The keys of a file, one in each line; lines that begin with ``#`` are comments.

    Raises:
        ValueError: it has none, or they cannot stand in a header.
        OSError: it cannot be read.
    """
    if file is None:
        return ()
    text = read_bounded(file, max_bytes=_MOST_KEY_BYTES).decode("utf-8", errors="replace")
    lines = (line.strip() for line in text.splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys or not all(key.isascii() and key.isprintable() for key in keys):
        raise ValueError(f"--api-keys {file}: expected a key of printable ASCII in each line")
    return keys
