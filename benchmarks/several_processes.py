"""One model in several processes: `python benchmarks/several_processes.py --save`.

A batch of requests is answered by one process and by two, which divide the experts. Counted are the
bytes read from the disk, with the same slots in all and with the same memory in all, and the bytes
that travel, with those of the rows that each process lacks. `--part plans` has a single text of
the pocket model: what plans take of a step. Answers must be equal. All processes share this
machine.
"""

import dataclasses
import multiprocessing
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import moe_runtime
from moe_runtime.benchmarks.cases.dispatch import CountingTransport
from moe_runtime.benchmarks.harness.scripting import ScriptResults, chosen, option, script
from moe_runtime.benchmarks.suite import facts
from moe_runtime.benchmarks.synthetic.model_shapes import SHAPES
from moe_runtime.benchmarks.synthetic.shape_checkpoint import shape_checkpoint, shapes_folder
from moe_runtime.benchmarks.synthetic.texts import cut_prompts
from moe_runtime.checkpoints.opening import load_tokenizer
from moe_runtime.config import parse_bytes
from moe_runtime.inference.expert_layer import OffloadedExperts
from moe_runtime.inference.hugging_face.loaded_model import resize_cache
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.models.pocket import pocket_path
from moe_runtime.parallel.communication.transport import Pending, Transport
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.following import follow
from moe_runtime.serving.requests import EngineOptions, Event, Finished, GenerationRequest, NewToken

METRICS = {
    **facts("bytes", "read_bytes", "row_bytes", "needed_bytes", "plan_bytes", "used_bytes"),
    **facts("count", "expert_slots", better="more"),
    **facts("share", "reads_of_one", "travel_of_needed", "plan_of_step"),
    **facts("s", "step_s", "plan_s"),
}
OPTIONS = EngineOptions(prompt_tokens=4, idle_prompt_tokens=4, reuses_prefixes=False)
"""Steps of few tokens, as those that decode: the tokens of a text, not those that random weights
choose, which repeat themselves."""


class Counted(CountingTransport):
    """Counts the bytes of plans and of rows, starting with the engine."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.exchange_numbers = self._exchange_numbers
        self.plan_bytes = 0

    def _exchange_numbers(self, numbers_PN: torch.Tensor) -> torch.Tensor:
        self.row_bytes = self.plan_bytes = 0
        return self._inner.exchange_numbers(numbers_PN)

    def exchange(self, rows_RD: torch.Tensor, route: object, **options: Any) -> Pending:
        if rows_RD.dtype == torch.int64:
            self.plan_bytes += rows_RD.nbytes
            return self._inner.exchange(rows_RD, route, **options)
        return super().exchange(rows_RD, route, **options)


@dataclasses.dataclass(frozen=True)
class Work:
    """Requests that processes answer one after another, each process with ``host_memory``.
    ``num_slots`` is the number of slots in all, if it is not what that memory gives."""

    checkpoint: Path
    prompts: Sequence[tuple[int, ...]]
    new_tokens: int
    host_memory: int
    size: int = 1
    num_slots: int | None = None


def answer(work: Work, rank: int, store: str) -> dict[str, Any]:
    """A process's counts; on rank 0 also the tokens, and the seconds of plans and steps."""
    group, transport = None, None
    torch.set_num_threads(1)
    if work.size > 1:
        keeper = dist.FileStore(store, work.size)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=keeper, rank=rank, world_size=work.size)
        group = dist.group.WORLD
    model: Any = moe_runtime.load(
        work.checkpoint,
        device="cpu",
        host_memory=work.host_memory,
        max_tokens=sum(map(len, work.prompts)) + len(work.prompts) * (work.new_tokens + 16),
        policy="lru",
        prefetch="off",
        group=group,
    )
    layers = [part for part in model.modules() if isinstance(part, OffloadedExperts)]
    if layers[0].partition is not None:
        transport = layers[0].partition.transport = Counted(layers[0].partition.transport)
    if work.num_slots is not None:
        resize_cache(model.moe, work.num_slots // work.size)
    with model.moe:
        found: dict[str, Any] = {"tokens": [], "plan_s": [], "begun_s": []}
        if rank:
            follow(model, options=OPTIONS)
        else:
            with Engine(model, OPTIONS) as engine:
                if transport is not None:
                    _time_plans(engine, found)
                found["tokens"] = _texts(engine, work)
        stats = model.moe.stats()
    rows_of_token = len(layers) * model.moe.facts.signature.top_k
    return found | {
        "read_bytes": stats.bytes_read,
        "expert_slots": stats.expert_slots,
        "used_bytes": stats.peak_rss_bytes - stats.baseline_rss_bytes,
        "row_bytes": 0 if transport is None else transport.row_bytes,
        "plan_bytes": 0 if transport is None else transport.plan_bytes,
        "token_bytes": rows_of_token * model.config.hidden_size * model.dtype.itemsize,
    }


def _time_plans(engine: Any, found: dict[str, Any]) -> None:
    send = engine._plans.send

    def timed(kind: str, *args: Any) -> None:
        begun_s = time.perf_counter()
        send(kind, *args)
        if kind == "step":
            found["begun_s"].append(begun_s)
            found["plan_s"].append(time.perf_counter() - begun_s)

    engine._plans.send = timed


def _texts(engine: Engine, work: Work) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in work.prompts]
    ends: list[Future[None]] = [Future() for _ in work.prompts]
    for prompt, tokens, end in zip(work.prompts, found, ends, strict=True):

        def hear(event: Event, tokens: list[int] = tokens, end: Future[None] = end) -> None:
            if isinstance(event, NewToken):
                tokens.append(event.token_id)
            if isinstance(event, Finished):
                end.set_result(None)

        engine.submit(GenerationRequest(prompt_ids=prompt, max_new_tokens=work.new_tokens), hear)
        end.result()
    return found


def answers_of(work: Work) -> list[dict[str, Any]]:
    """The results of all processes, by rank."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store, found = str(Path(folder, "store")), []
        for rank in range(work.size):
            own = stack.enter_context(ProcessPoolExecutor(1, context))
            found.append(own.submit(answer, work, rank, store))
        return [one.result() for one in found]


def counted(work: Work, *, timed: bool) -> dict[str, Any]:
    """Totals over the processes, and the texts."""
    ranks = answers_of(work)
    names = ("read_bytes", "expert_slots", "row_bytes", "plan_bytes", "used_bytes")
    found = {name: sum(one[name] for one in ranks) for name in names}
    first = ranks[0]
    if work.size > 1:
        num_tokens = sum(len(prompt) + work.new_tokens - 1 for prompt in work.prompts)
        needed = num_tokens * first["token_bytes"] * (work.size - 1)
        found |= {"needed_bytes": needed}
        found["travel_of_needed"] = (found["row_bytes"] + found["plan_bytes"]) / needed
    if work.size > 1 and timed:
        pairs = zip(first["begun_s"][1:], first["begun_s"], strict=False)
        found["step_s"] = statistics.median(after - before for after, before in pairs)
        found["plan_s"] = statistics.median(first["plan_s"])
        found["plan_of_step"] = found["plan_s"] / found["step_s"]
    return found | {"tokens": first["tokens"]}


def measure(
    results: ScriptResults, works: dict[str, Work], rounds: int, *, timed: bool = False
) -> None:
    """Add rows of works with equal answers; the first work has one process."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in works}
    for _ in range(rounds):
        texts, of_one = None, None
        for name, work in works.items():
            found = counted(work, timed=timed)
            own = found.pop("tokens")
            if texts is None:
                texts, of_one = own, found["read_bytes"]
            elif own != texts:
                raise SystemExit(f"{name}: another text than that of one process")
            else:
                found["reads_of_one"] = found["read_bytes"] / of_one
            rows[name].append(found)
    for name, found in rows.items():
        results.add(name, found)


@script(
    shape=option("olmoe-small", "as of `bench latency`"),
    host_memory=option("900MiB", "of all processes together"),
    prompts=8,
    prompt_tokens=48,
    new_tokens=16,
    rounds=3,
    part=option("reads", choices=("reads", "plans")),
)
def main(options: Namespace) -> int:
    names = ("shape", "host_memory", "prompts", "prompt_tokens", "new_tokens", "rounds")
    settings = chosen(options, *names) | {"weights": "random"}
    file = f"several-processes-{options.part}"
    file += f"-{options.shape}" * (options.part == "reads")
    if options.part == "plans":
        settings = {"model": "pocket", "rounds": options.rounds}
    results = ScriptResults("several-processes", options, settings, METRICS, file=file)
    if options.part == "plans":
        own = [*map(tuple, cut_prompts(load_tokenizer(pocket_path()), 1, 64))]
        pocket = (pocket_path(), own, 192, 256 << 20)
        works = {"one process": Work(*pocket), "two": Work(*pocket, 2)}
        measure(results, works, options.rounds, timed=True)
        return results.finish()
    total = parse_bytes(options.host_memory)
    writing: dict[str, Any] = {"keep": False, "needs_gguf": False, "say": lambda _: None}
    with shape_checkpoint(SHAPES[options.shape], shapes_folder(), **writing) as files:
        folder = files.checkpoint
        cut = cut_prompts(load_tokenizer(folder), options.prompts, options.prompt_tokens)
        given = (folder, [*map(tuple, cut)], options.new_tokens)
        tokens = options.prompts * (options.prompt_tokens + options.new_tokens + 16)
        found = inspect_checkpoint(folder, max_tokens=tokens)
        slots = found.slots_for(total)
        works = {
            "one process": Work(*given, total),
            "two, the same experts in memory": Work(*given, total // 2, 2, slots),
            "two, the same memory": Work(*given, total // 2, 2),
        }
        measure(results, works, options.rounds)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
