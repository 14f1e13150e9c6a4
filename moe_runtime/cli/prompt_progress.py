"""How far a model has read a prompt, on a terminal, until its first new token."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from moe_runtime.config import format_bytes


@contextlib.contextmanager
def prompt_progress(model: Any, on_read: Callable[[], None]) -> Iterator[None]:
    """Shows on stderr how many layers a prompt has passed; nothing where stderr is no terminal.

    The bar comes with the first forward pass within the block and goes with its end, or with the
    block. Later passes run without a hook.

    Args:
        model: a loaded model.
        on_read: called once when the bar is gone, for what is then written to the terminal; at once
            where there is none.
    """
    if not sys.stderr.isatty():
        on_read()
        yield
        return
    with contextlib.ExitStack() as shown:
        passed = _show_first_pass(model, shown)

        def end(*_: Any) -> None:
            shown.close()
            on_read()

        shown.callback(model.register_forward_hook(end).remove)
        for block in _blocks(model):
            shown.callback(block.register_forward_hook(passed).remove)
        yield


def _show_first_pass(model: Any, shown: contextlib.ExitStack) -> Callable[..., None]:
    """Makes the bar, which starts when the model does; returns what is called after each block."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    columns = (*columns, TextColumn("layers{task.fields[speed]}"))
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    num_blocks = len(_blocks(model))
    bytes_before = model.moe.stats().bytes_read
    task = bar.add_task("", total=num_blocks or None, speed="")
    num_tokens, started_s = 0, 0.0

    def start(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal num_tokens, started_s
        tokens = kwargs.get("input_ids", args[0] if args else None)
        num_tokens, started_s = (0 if tokens is None else tokens.numel()), time.perf_counter()
        bar.update(task, description=f"reading a prompt of {num_tokens:,} tokens")
        shown.enter_context(bar)

    def passed(*_: Any) -> None:
        bar.advance(task)
        done = num_tokens * bar.tasks[0].completed / num_blocks
        rate = done / (time.perf_counter() - started_s)
        read = format_bytes(model.moe.stats().bytes_read - bytes_before)
        bar.update(task, speed=f", {rate:,.0f} tokens/s, {read} read")

    shown.callback(model.register_forward_pre_hook(start, with_kwargs=True).remove)
    return passed


def _blocks(model: Any) -> Any:
    """The layers that a token passes one after another; none where they are not found."""
    from torch.nn import ModuleList

    lists = [part for part in model.get_decoder().children() if isinstance(part, ModuleList)]
    return max(lists, key=len, default=())
