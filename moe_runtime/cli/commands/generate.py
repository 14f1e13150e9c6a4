"""``moe-runtime generate``: answer a file of prompts, as many together as memory allows."""

import contextlib
import dataclasses
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_runtime.cli import console, options
from moe_runtime.cli.commands.run import runtime_rows
from moe_runtime.cli.processes import (
    divided,
    follow_first,
    from_first,
    joined_processes,
    start_processes,
)
from moe_runtime.cli.prompts import read_text
from moe_runtime.cli.strict import refuse_given
from moe_runtime.errors import UnsupportedUseError

if TYPE_CHECKING:
    from rich.progress import Progress

    from moe_runtime.serving.batches.batch_run import BatchOutcome, BatchSettings, BatchWork

_INTERRUPTED, _SOME_FAILED = 130, 2
_MOST_TOGETHER = 256
"""Requests at a time, if memory has room. A step of this many uses nearly every expert for several
rows, so more requests would gain little."""
_LINES = 10
"""Lines of progress if stderr is not a terminal."""
_COUNTS = (
    *("requests", "kept", "answered", "failed", "prompt_tokens", "cached_tokens", "new_tokens"),
    "seconds",
)


def generate(
    ctx: typer.Context,
    *,
    model: options.Model,
    prompts: Path,
    output: options.Output,
    chat: bool = False,
    max_new_tokens: options.MaxNewTokens = 128,
    sampling: options.Sampling,
    max_running: options.Count = _MOST_TOGETHER,
    exact: options.Exact = False,
    max_tokens: options.Count | None = None,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS")] = None,
    ray_engines: options.Count | None = None,
    loading: options.AdaptedLoading,
    several: options.SeveralProcesses,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
    config: options.Config = None,
) -> None:
    """Answer a file of prompts, as many together as memory allows.

    Requests are answered in the order that is fastest for all of them. Answers are written as they
    come and put in the order of the prompts at the end. After an interruption the same command
    continues with the requests that have no answer yet. Options in a request line override these
    options.

    Args:
        prompts: File with a request in each line: a JSON string, an object with a prompt or
            messages, or a line of OpenAI's batch format. - reads standard input.
        output: Answers, one line of JSON each; existing answers are kept.
        chat: Put prompts that are text into the model's chat template.
        max_running: Maximum number of running requests; fewer if memory is short.
        max_tokens: Maximum tokens of all running requests together, prompts and answers. [what the
            requests need, in at most a quarter of the memory that experts could use]
        ray: Answer on the machines of a Ray cluster: its HOST:PORT, auto for the one that this
            machine belongs to, or local. The checkpoint is at the same place on all of them.
        ray_engines: Copies of the model on the cluster, each with --host-memory; one for each GPU
            or machine when omitted.
    """
    if ray is None:
        refuse_given(ctx, {"ray_engines"}, "is for a cluster: give --ray ADDRESS too")
    else:
        why = "divides one model on this machine, and --ray uses many copies: give one of them"
        refuse_given(ctx, {"processes", "gpus", "placement"}, why)
    start_processes(several, ctx.obj)
    answer = None if ray is None else _on_ray(ray, ray_engines)
    from moe_runtime.serving.requests import EngineOptions

    # the time of the whole batch counts, not of each token
    engine = EngineOptions(
        most_running=max_running, max_slowdown=math.inf, exact=exact, decode_rows=0
    )
    with joined_processes(ctx.obj) as group:
        text = "" if group is not None and group.rank() else read_text(prompts)
        console.quiet_transformers(ctx.obj)
        from moe_runtime.serving.batches.batch_run import BatchSettings, run_batch

        settings = BatchSettings(
            model=model,
            file=str(prompts),
            output=output,
            chat=chat,
            **dataclasses.asdict(sampling),
            max_new_tokens=max_new_tokens,
            loading={**loading.settings(), **divided(several, group)},
            max_tokens=max_tokens,
            engine=engine,
        )
        if group is not None and group.rank():
            _follow(settings, from_first(group, "room", lambda: 0))
            return
        with contextlib.ExitStack() as shown:
            bar = _Bar(shown)
            outcome = run_batch(
                text,
                settings,
                progress=shown.enter_context(console.loading_bar()),
                on_loaded=bar.begin,
                on_done=bar.show,
                answer=answer,
                on_room=lambda room: from_first(group, "room", lambda: room),
            )
        _tell(outcome, model, as_json=as_json, verbose=verbose)
        if outcome.is_interrupted:
            has_some = outcome.kept or outcome.answered or outcome.failed
            so_far = f"{output} has the answers so far" if has_some else "nothing was answered yet"
            said = f"{so_far}; the same command goes on from there"
        elif outcome.failed:
            said = f"{outcome.failed} of {outcome.requests} requests failed, {output} says why; "
            said += "the same command tries them again"
        else:
            return
        console.say_line(said)
        raise typer.Exit(_INTERRUPTED if outcome.is_interrupted else _SOME_FAILED)


def _follow(settings: "BatchSettings", room: int) -> None:
    """Takes part in the first process's steps, if it has requests."""
    import moe_runtime
    from moe_runtime.serving.batches.offline import batch_options

    if room:
        loaded = moe_runtime.load(settings.model, max_tokens=room, **settings.loading)
        follow_first(loaded, batch_options(settings.engine))


def _on_ray(address: str, num_engines: int | None) -> "Callable[[BatchWork], None]":
    if not importlib.util.find_spec("ray"):
        raise UnsupportedUseError(
            "--ray needs the package ray; install it with pip install 'moe-runtime[ray]'"
        )
    from moe_runtime.integrations.ray import answer_on_ray

    return answer_on_ray(address, num_engines, console.say_line)


def _tell(outcome: "BatchOutcome", model: str, *, as_json: bool, verbose: bool) -> None:
    """Prints the outcome."""
    stats, engine = outcome.stats, outcome.engine
    if as_json:
        counts = {name: getattr(outcome, name) for name in _COUNTS}
        steps = {"steps": engine and engine.steps, "preemptions": engine and engine.preemptions}
        of_model = {} if stats is None else dataclasses.asdict(stats)
        console.print_json(
            {"model": model, "sampling": outcome.sampling, **counts, **steps, **of_model}
        )
        return
    kept = f", {outcome.kept} were there" if outcome.kept else ""
    failed = f", {outcome.failed} failed" if outcome.failed else ""
    rows = [("answered", f"{outcome.answered} of {outcome.requests} requests{kept}{failed}")]
    if outcome.seconds:
        from moe_runtime.inference.generation import sampling_words

        rows.append(("choice of tokens", sampling_words(outcome.sampling)))
        shared = f" ({outcome.cached_tokens} shared)" if outcome.cached_tokens else ""
        rate = outcome.new_tokens / outcome.seconds
        rows += [
            ("tokens", f"{outcome.prompt_tokens} in prompts{shared}, {outcome.new_tokens} new"),
            ("answering", f"{outcome.seconds:.2f} s, {rate:.2f} new tokens/s"),
        ]
    if stats is not None:
        rows.append(("loading", f"{stats.load_s:.2f} s"))
        rows += runtime_rows(stats, verbose=verbose)
    console.print_rows("what the runtime did", rows, to_stderr=True)


class _Bar:
    """Shows the number of answered requests on stderr: a bar, or ten lines without a terminal."""

    def __init__(self, shown: contextlib.ExitStack) -> None:
        self._shown = shown
        self._num_requests = 0
        self._bar: Progress | None = None

    def begin(self, num_requests: int) -> None:
        """Replaces the bar of loading."""
        self._num_requests = num_requests
        self._shown.close()
        if not sys.stderr.isatty():
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

        columns = ("answering", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        bar = console.terminal_bar(*columns, "{task.fields[tokens]} new tokens")
        self._bar = self._shown.enter_context(bar)
        bar.add_task("", total=num_requests, tokens=0)

    def show(self, outcome: "BatchOutcome") -> None:
        """Counts one more answered request."""
        done, total = outcome.answered + outcome.failed, self._num_requests
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=done, tokens=outcome.new_tokens)
        elif done * _LINES // total > (done - 1) * _LINES // total:
            console.say_line(f"{done} of {total} requests, {outcome.new_tokens} new tokens")
