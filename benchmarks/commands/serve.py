"""``moe-runtime bench serve``: how many tokens a server gives many clients, and how soon."""

import importlib.util
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.benchmarks.commands import shared
from moe_runtime.cli import options
from moe_runtime.cli.commands.serve import read_keys
from moe_runtime.cli.console import fetch_model, print_json, say_line
from moe_runtime.cli.prompts import read_prompts
from moe_runtime.cli.strict import refuse_given
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.files import require_not_read

if TYPE_CHECKING:
    from moe_runtime.benchmarks.cases.load import Level, LoadSettings, TimedAnswer
    from moe_runtime.benchmarks.cases.routed import RecordedRouting

_LINES = 10
"""Lines of progress of a level."""
_MOST_CLIENTS = 4096
_START_S = 900.0
_ASKED = ("requests", "turns", "prompt_tokens", "output_tokens", "chat", "ignore_eos", "goodput")
Tokens = Annotated[str, typer.Option(metavar="N|LOW:HIGH")]


def bench_serve(
    run: shared.CaseRun,
    url: str = "http://127.0.0.1:8000",
    start: Annotated[str | None, typer.Option(metavar="COMMAND")] = None,
    cap: options.Size | None = None,
    model: str | None = None,
    api_keys: Path | None = None,
    concurrency: str | None = None,
    rate: str | None = None,
    requests: options.Count = 32,
    warm_up: options.Natural = 0,
    turns: options.Count = 1,
    prompt_tokens: Tokens = "128",
    output_tokens: Tokens = "64",
    prompts: Path | None = None,
    chat: Annotated[bool, typer.Option("--chat/--completions")] = False,
    ignore_eos: bool = True,
    routing: Annotated[Path | None, typer.Option(metavar="TRACE")] = None,
    goodput: Annotated[str | None, typer.Option(metavar="BOUNDS")] = None,
    seed: options.Natural = 0,
    timeout: Annotated[float, typer.Option(min=0.001)] = 600.0,
) -> None:
    """Load-test a server of OpenAI's API: throughput and latencies.

    Two short requests come first. They check that the server answers and count its tokens per
    word. Answers are streamed and greedy. Ctrl-C shows what was measured so far.

    Args:
        url: Address of any server of OpenAI's API, such as http://127.0.0.1:8000.
        start: Start the server with this command and stop it afterwards. Its peak memory and the
            bytes it reads are measured too.
        cap: With --start: limit the server's memory, page cache included, as in 7GiB, with a
            control group or systemd. The page cache is emptied first, where permitted.
        model: Name of its model; several, separated by commas, take turns. The first model when
            omitted.
        api_keys: File with one key per line; the first is sent.
        concurrency: Clients that ask again as soon as they have their answer; several numbers,
            separated by commas, are measured one after the other. 1 when omitted.
        rate: Requests per second that arrive at random times, instead of --concurrency; several
            with commas.
        requests: Requests for each number of clients or rate.
        warm_up: Unmeasured requests before all others.
        turns: Turns of each conversation; later prompts are as long as answers.
        prompt_tokens: Tokens of a prompt of common words.
        output_tokens: Maximum tokens of an answer.
        prompts: File with one prompt per line, sent in turn; - is standard input.
        chat: Use chat completions or text completions.
        routing: With --start 'moe-runtime serve MODEL ...': route by a recorded trace of MODEL
            instead of its gates; each request takes one of the trace. The results then include
            the time of the reads alone. CPU only.
        ignore_eos: Ask for answers of full length; some servers do not know this field.
        goodput: Count requests within bounds, such as ttft=200ms,itl=50ms,e2e=2s: first token,
            mean between tokens, whole answer.
        seed: Seed of words, lengths and arrivals.
        timeout: Maximum seconds of a request.
    """
    if importlib.util.find_spec("httpx2") is None:
        raise UnsupportedModelError(
            "bench serve needs httpx2; install it with pip install 'moe-runtime[serve]'"
        )
    from moe_runtime.benchmarks.cases import load
    from moe_runtime.benchmarks.cases.load import Level, parse_lengths
    from moe_runtime.benchmarks.cases.serve import serve_results, started_server

    if concurrency is not None and rate is not None:
        raise ValueError("--rate and --concurrency are two ways to press a server; give one")
    if cap is not None and start is None:
        raise ValueError("--cap holds a server that --start begins; give its command")
    words = [] if start is None else _words_of(start)
    if routing is not None:
        require_not_read(run.output, "results", [routing])
        models = [*takewhile(lambda word: not word.startswith("-"), words[2:])]
        if words[:2] != ["moe-runtime", "serve"] or len(models) != 1:
            raise ValueError(
                "--routing: expected --start 'moe-runtime serve MODEL OPTION...', of one model and "
                f"of this installation: the server whose experts are routed, got {start!r}"
            )
        refuse_given(run.ctx, {"turns"}, "has no effect: --routing has one answer of each request")
    if prompts is not None:
        refuse_given(run.ctx, {"prompt_tokens"}, "has no effect where --prompts says what to ask")
    load.address_of(url)
    clients = _numbers(concurrency or "1", "--concurrency", int)
    rates = [] if rate is None else _numbers(rate, "--rate", float)
    keys = read_keys(api_keys)
    bounds = load.parse_goodput(goodput) if goodput is not None else {}
    settings = load.LoadSettings(
        url=url,
        key=keys[0] if keys else None,
        model=model,
        chat=chat,
        ignore_eos=ignore_eos,
        timeout_s=timeout,
        levels=[Level(None, one) for one in rates] or [Level(one, None) for one in clients],
        num_requests=requests,
        num_warm_up=warm_up,
        num_turns=turns,
        prompt=parse_lengths(prompt_tokens, "--prompt-tokens"),
        output=parse_lengths(output_tokens, "--output-tokens"),
        texts=() if prompts is None else read_prompts(None, None, prompts),
        seed=seed,
    )

    def on_answer(level: "Level", answers: "Sequence[TimedAnswer]") -> None:
        done, most = len(answers), requests * turns
        if done * _LINES // most > (done - 1) * _LINES // most:
            say_line(f"{level}: {done} of {most} requests")

    limit = shared.cap_bytes(cap)
    with run.stopping() as stop, ExitStack() as running:
        stopping: Any = {"is_stopping": lambda: stop.is_set}
        meters = []
        disk_bytes_per_s = None
        if routing is not None:
            routed = _routing_of(routing, words[2], settings)
            folder = running.enter_context(tempfile.TemporaryDirectory(prefix="moe-benchmark-"))
            disk_bytes_per_s = routed.measured_disk()["bytes_per_s"]
            assert isinstance(disk_bytes_per_s, float)
            words = routed.server_words(words[2:], Path(folder))
        if words:
            own = {"cap_bytes": limit, "timeout_s": _START_S}
            server = running.enter_context(started_server(words, url, **own, **stopping))
            server.disk_bytes_per_s = disk_bytes_per_s
            meters.append(server)
        name, found = load.measure(settings, on_answer=on_answer, meters=meters, **stopping)
    rows = [load.summarize(measured, bounds) for measured in found]
    facts = {"url": url, "model": name or None, "is_interrupted": stop.is_set, "seed": seed}
    about = {"url": url, "model": name, "seed": seed, "cap_bytes": limit}
    about["routing"] = None if routing is None else routing.name
    about |= run.asked("start", "warm_up", *_ASKED)
    results = serve_results(found, bounds, settings=about, is_interrupted=stop.is_set)
    unwritten = shared.keep_results(results, run.output)
    if run.as_json:
        print_json({**facts, "levels": rows})
    else:
        shared.show_results(results, load.SPREADS)
    for one, row in zip(found, rows, strict=True):
        for kind, errors in row["errors"].items():
            say_line(f"{one.level}: {errors['count']} failed: {kind}: {errors['first']}")
        if not row["are_tokens_counted"]:
            why = "the server does not count tokens: pieces of its stream are counted instead"
            say_line(f"{one.level}: {why}")
    if unwritten is not None:
        say_line(unwritten)
    run.exit_if_stopped()
    if unwritten is not None or not any(row["answered"] for row in rows):
        raise typer.Exit(2)


def _routing_of(trace: Path, model: str, settings: "LoadSettings") -> "RecordedRouting":
    """As many requests of a trace as a server gets, its first two included."""
    from moe_runtime.benchmarks.cases.routed import RecordedRouting

    number = 2 + settings.num_warm_up + settings.num_requests * len(settings.levels)
    sizes = settings.prompt.high, settings.output.high
    return RecordedRouting(trace, Path(fetch_model(model)), None, [range(number)], *sizes)


def _words_of(start: str) -> list[str]:
    try:
        words = shlex.split(start)
    except ValueError as error:
        raise ValueError(f"--start {start}: {error}") from None
    if not words:
        raise ValueError("--start must be a command, such as 'moe-runtime serve MODEL'")
    return words


def _numbers(text: str, name: str, kind: type[int] | type[float]) -> list[Any]:
    most = _MOST_CLIENTS if kind is int else 1e6
    words = "whole numbers" if kind is int else "numbers"
    expected = f"{words} above 0, at most {most:g}, with commas"
    return options.numbers_of(text, name, expected, kind, is_sound=lambda one: 0 < one <= most)
