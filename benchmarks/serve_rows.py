"""What clients of the server wait for, in ratios: `python benchmarks/serve_rows.py --save`.

`moe-runtime serve`'s own server and clients over loopback in one process, which a memory cap holds
as a whole. A prompt is token ids out of Python's language reference, an answer greedy and of full
length.

- overhead: seconds a token of one client's answer over those of `model.generate`, in turn;
- stall: the 99th percentile of the time between tokens of four answers while a long prompt
  arrives, over that without it;
- turn: time to the first token of a conversation's second turn over that of its first;
- restart: time to the first token of a prompt that an earlier server kept on the disk over that
  server's;
- decode: tokens a second of several answers at a time over those of one;
- offline: tokens a second of many prompts at a time over those of one after another;
- adapters: tokens a second of eight answers at a time, each with a LoRA adapter of its own, over
  those of eight without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.caps import cap_label, parse_cap
from harness.interruption import stop_on_termination
from harness.machine import machine_name, run_facts
from harness.token_client import Client, Times
from safetensors.torch import save_file

from moe_runtime.bench.memory_cap import drop_page_cache, memory_cap
from moe_runtime.bench.synthetic.checkpoint_writer import is_complete, write_checkpoint
from moe_runtime.bench.synthetic.model_shapes import SHAPES
from moe_runtime.bench.texts import language_reference
from moe_runtime.checkpoints.model_files import load_tokenizer
from moe_runtime.checkpoints.safetensors_index import read_checkpoint_index
from moe_runtime.files import write_text
from moe_runtime.serving.engine_options import EngineOptions
from moe_runtime.serving.http.server import Access, Limits
from moe_runtime.serving.http.starting import Ready, ServeSettings, run_server

HERE = Path(__file__).resolve().parent
LONG_PROMPT = 2000


def overhead(client: Client, model: Any, rounds: int) -> dict[str, Any]:
    """One client's tokens beside those of `model.generate`, behind a prompt of 32 tokens."""
    num_new, ours, plain = 32, [], []
    for _ in range(rounds + 1):  # the first one warms up
        times, _ = client.ask(client.prompt(32), num_new)
        ours.append((times[-1] - times[0]) / (num_new - 1))
        plain.append(_generate_s(model, client.prompt(32), num_new))
    ratios = [one / other for one, other in zip(ours[1:], plain[1:], strict=True)]
    return {
        "token_s": statistics.median(ours[1:]),
        "generate_token_s": statistics.median(plain[1:]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def _generate_s(model: Any, prompt: list[int], num_new: int) -> float:
    """Seconds a token behind the first, which the time for one token alone is taken away for."""
    ids = torch.tensor([prompt])
    took = []
    for count in (1, num_new):
        begin = time.perf_counter()
        model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None)
        took.append(time.perf_counter() - begin)
    return (took[1] - took[0]) / (num_new - 1)


def stall(client: Client, model: Any, rounds: int) -> dict[str, Any]:
    """Four answers go on while a prompt of `LONG_PROMPT` tokens arrives, or while none does."""
    quiet: Times = []
    beside: Times = []
    first_token_s: Times = []
    for _ in range(rounds):
        quiet += _gaps(client.ask_all([client.prompt(32) for _ in range(4)], 64))
        with ThreadPoolExecutor(1) as pool:
            prompts = [client.prompt(32) for _ in range(4)]
            arrives = client.prompt(LONG_PROMPT)
            long = pool.submit(lambda arrives=arrives: (time.sleep(3.0), client.ask(arrives, 1))[1])
            beside += _gaps(client.ask_all(prompts, 160))
            first_token_s.append(long.result()[0][0])
    p99 = [float(np.percentile(gaps, 99)) for gaps in (quiet, beside)]
    p50 = [float(np.percentile(gaps, 50)) for gaps in (quiet, beside)]
    return {
        "without_p50_s": p50[0],
        "without_p99_s": p99[0],
        "beside_p50_s": p50[1],
        "beside_p99_s": p99[1],
        "long_prompt_first_token_s": statistics.median(first_token_s),
        "ratio": p99[1] / p99[0],
    }


def _gaps(answers: Sequence[tuple[Times, list[int]]]) -> Times:
    return [gap for times, _ in answers for gap in np.diff(times).tolist()]


def turn(client: Client, model: Any, rounds: int) -> dict[str, Any]:
    """A conversation of 512 tokens, an answer of 32, and 32 more from the user."""
    first, second = [], []
    for _ in range(rounds + 1):
        prompt = client.prompt(512)
        times, tokens = client.ask(prompt, 32)
        first.append(times[0])
        times, _ = client.ask([*prompt, *tokens, *client.prompt(32)], 1)
        second.append(times[0])
    ratios = [late / early for early, late in zip(first[1:], second[1:], strict=True)]
    return {
        "first_s": statistics.median(first[1:]),
        "second_s": statistics.median(second[1:]),
        "ratio": statistics.median(ratios),
    }


def decode(client: Client, model: Any, rounds: int) -> dict[str, Any]:
    """1, 4 and 16 answers at a time, behind prompts of 8 tokens: while all of them go on.

    Bytes are those of experts read for the whole of the answers: where the disk binds, their ratio
    is what the tokens a second can gain.
    """
    rates: dict[int, Times] = {1: [], 4: [], 16: []}
    token_bytes: dict[int, Times] = {count: [] for count in rates}
    for _ in range(rounds):
        for count, found in rates.items():
            read_before = model.moe.stats().bytes_read
            answers = client.ask_all([client.prompt(8) for _ in range(count)], 24)
            read = model.moe.stats().bytes_read - read_before
            token_bytes[count].append(read / (count * 24))
            found.append(_rate(answers))
    medians = {count: statistics.median(found) for count, found in rates.items()}
    return {
        "tokens_per_s": medians,
        "read_bytes_per_token": {
            count: statistics.median(sizes) for count, sizes in token_bytes.items()
        },
        "ratio": {count: medians[count] / medians[1] for count in (4, 16)},
    }


def _rate(answers: Sequence[tuple[Times, list[int]]]) -> float:
    """Tokens a second in all, while all answers go on."""
    begin = max(times[0] for times, _ in answers)
    end = min(times[-1] for times, _ in answers)
    stamps = [stamp for times, _ in answers for stamp in times if begin < stamp <= end]
    return len(stamps) / (end - begin)


def offline(client: Client, model: Any, rounds: int) -> dict[str, Any]:
    """32 prompts of 64 tokens, 16 new ones each; one after another only the first 8 are asked."""
    num_new, rates = 16, ([], [])
    for _ in range(rounds):
        for place, (count, at_a_time) in enumerate(((32, 32), (8, 1))):
            prompts = [client.prompt(64) for _ in range(count)]
            begin = time.perf_counter()
            for start in range(0, count, at_a_time):
                client.ask_all(prompts[start : start + at_a_time], num_new)
            rates[place].append(count * num_new / (time.perf_counter() - begin))
    together, alone = map(statistics.median, rates)
    return {"tokens_per_s": together, "alone_tokens_per_s": alone, "ratio": together / alone}


def restart(checkpoint: Path, ids: Sequence[int], rounds: int) -> dict[str, Any]:
    """Prompts of 512 tokens to one server, and to the next one, which read none of them."""
    first: Times = []
    second: Times = []
    for found in (first, second):

        def ask(ready: Ready, found: Times = found) -> None:
            client = Client(ready.address, ids)
            for _ in range(rounds + 1):
                found.append(client.ask(client.prompt(512), 1)[0][0])

        serve_once(checkpoint, ask, prefix_disk_bytes=8 << 30)
    ratios = [late / early for early, late in zip(first[1:], second[1:], strict=True)]
    return {
        "first_s": statistics.median(first[1:]),
        "second_s": statistics.median(second[1:]),
        "ratio": statistics.median(ratios),
    }


def adapters(checkpoint: Path, ids: Sequence[int], rounds: int) -> dict[str, Any]:
    """Eight answers of 24 tokens behind prompts of 8, without adapters and with one each.

    Adapters are of rank 16, beside the projections of attention, with random values.
    """
    with tempfile.TemporaryDirectory(prefix="moe-benchmark-") as folder:
        words = [
            f"adapter-{index}={write_adapter(checkpoint, Path(folder) / str(index), index)}"
            for index in range(8)
        ]
        names = [word.partition("=")[0] for word in words]
        plain: Times = []
        beside: Times = []

        def ask(ready: Ready) -> None:
            client = Client(ready.address, ids)
            for _ in range(rounds + 1):  # the first one reads the adapters
                for models, found in ((None, plain), (names, beside)):
                    prompts = [client.prompt(8) for _ in names]
                    found.append(_rate(client.ask_all(prompts, 24, models)))

        serve_once(checkpoint, ask, adapters=words)
    rates = [statistics.median(found[1:]) for found in (plain, beside)]
    return {
        "tokens_per_s": rates[1],
        "plain_tokens_per_s": rates[0],
        "ratio": rates[1] / rates[0],
    }


def write_adapter(checkpoint: Path, folder: Path, seed: int) -> Path:
    """An adapter of rank 16 beside the projections of attention, as PEFT writes it."""
    rank, names = 16, ["q_proj", "k_proj", "v_proj", "o_proj"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, entry in read_checkpoint_index(checkpoint).items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in names:
            outputs, inputs = entry.shape
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = torch.randn(shape, generator=generator) / 100
                tensors[f"base_model.model.{layer}.lora_{part}.weight"] = values.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names}
    write_text(folder / "adapter_config.json", json.dumps(settings))
    return folder


ROWS: dict[str, Callable[[Client, Any, int], dict[str, Any]]] = {
    "overhead": overhead,
    "stall": stall,
    "turn": turn,
    "decode": decode,
    "offline": offline,
}
OF_ITS_OWN: dict[str, Callable[[Path, Sequence[int], int], dict[str, Any]]] = {
    "restart": restart,
    "adapters": adapters,
}
"""Rows that start servers themselves."""
IN_MEMORY = ("overhead", "stall", "turn", *OF_ITS_OWN)
UNDER_A_CAP = ("decode", "offline", "adapters")


def measure(checkpoint: Path, rows: Sequence[str], rounds: int, file: Path) -> None:
    """Serves a checkpoint, measures rows over loopback and writes them as JSON."""
    ids = load_tokenizer(checkpoint)(language_reference())["input_ids"]
    found: dict[str, Any] = {}

    def run(ready: Ready) -> None:
        client = Client(ready.address, ids)
        client.ask_all([client.prompt(32) for _ in range(4)], 16)  # memory is touched
        for row in (row for row in ROWS if row in rows):
            found[row] = ROWS[row](client, ready.loaded[0], rounds)
            file.write_text(json.dumps(found))

    if ROWS.keys() & rows:
        serve_once(checkpoint, run)
    for row in (row for row in OF_ITS_OWN if row in rows):
        found[row] = OF_ITS_OWN[row](checkpoint, ids, rounds)
        file.write_text(json.dumps(found))


def serve_once(
    checkpoint: Path,
    call: Callable[[Ready], None],
    *,
    prefix_disk_bytes: int | None = None,
    adapters: Sequence[str] = (),
) -> None:
    """A server from its start to its end, which comes when ``call`` has returned."""
    begun: list[threading.Thread] = []
    ended = threading.Event()

    def run(ready: Ready) -> None:
        try:
            call(ready)
        finally:
            ended.set()

    def begin(ready: Ready) -> None:
        begun.append(threading.Thread(target=run, args=(ready,)))
        begun[0].start()

    settings = ServeSettings(
        models=[str(checkpoint)],
        names=(),
        adapters=adapters,
        host="127.0.0.1",
        port=0,
        loading={
            "device": "cpu",
            "dtype": "auto",
            "host_memory": "auto",
            "max_tokens": None,
            "cache_code": "none",
        },
        engine=EngineOptions(),
        limits=Limits(),
        access=Access(),
        drain_s=None,
        prefix_disk_bytes=prefix_disk_bytes,
    )
    run_server(settings, log=lambda *_, **__: None, on_ready=begin, is_stopping=ended.is_set)
    begun[0].join()


def main() -> None:
    """Runs a process of its own under each cap, and prints its rows."""
    options = _arguments()
    if options.worker:
        return measure(options.data, options.rows, options.rounds, options.worker)
    stop_on_termination()
    shape = SHAPES[options.shape]
    checkpoint = options.data / shape.name
    if not is_complete(shape, checkpoint):
        write_checkpoint(shape, checkpoint)
    facts = {
        **run_facts(HERE.parent),
        "shape": shape.describe(),
    }
    name = f"serve-rows-{shape.name}-{machine_name(facts['machine'])}.json"
    file = HERE / "results" / name
    caps: dict[str, Any] = {}
    if options.keep and file.is_file():
        caps = json.loads(file.read_text())["caps"]
    for cap in options.caps:
        rows = options.rows or (IN_MEMORY if cap is None else UNDER_A_CAP)
        found = run_under(cap, checkpoint, rows, options.rounds)
        for row, numbers in found.items():
            print(f"cap {cap_label(cap)}, {row}: {json.dumps(numbers)}", flush=True)
            numbers |= {"commit": facts["commit"], "rounds": options.rounds}
            caps.setdefault(cap_label(cap), {})[row] = numbers
        if options.save:
            write_text(file, json.dumps({**facts, "caps": caps}, indent=1) + "\n")


def run_under(
    cap: int | None, checkpoint: Path, rows: Sequence[str], rounds: int
) -> dict[str, Any]:
    """The rows that a process under a cap measured before it ended."""
    drop_page_cache()
    with tempfile.TemporaryDirectory(prefix="moe-benchmark-") as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, str(Path(__file__)), "--worker", str(file)]
        command += ["--data", str(checkpoint), "--rounds", str(rounds)]
        command += ["--rows", *rows]
        with contextlib.nullcontext() if cap is None else memory_cap(cap) as group:
            # what is kept on the disk goes with the folder
            done = subprocess.run(
                group.wrap(command) if group else command,
                check=False,
                env={**os.environ, "XDG_CACHE_HOME": folder},
            )
        if done.returncode:
            print(f"cap {cap_label(cap)}: ended with exit code {done.returncode}", flush=True)
        return json.loads(file.read_text()) if file.is_file() else {}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="olmoe-1b-7b")
    parser.add_argument("--data", type=Path, default=HERE / "data", help="folder of the weights")
    parser.add_argument("--caps", nargs="+", type=parse_cap, default=[None, 7 << 30])
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=(*ROWS, *OF_ITS_OWN),
        help="default: what a cap matters to under one",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write this machine's results file")
    parser.add_argument("--keep", action="store_true", help="keep the file's other rows")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
