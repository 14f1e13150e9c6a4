"""Servers beside each other under the same clients: `python benchmarks/serve.py --save`.

`moe-runtime serve`, llama.cpp's `llama-server` and `transformers serve` answer the same requests on
the same synthetic weights, in turn, each in a process of its own, with all memory there is and
under memory caps. `moe-runtime bench serve` presses them, once unmeasured: weights are read and
memory is touched for the first time then. Prompts are pieces of Python's language reference;
answers are greedy and have their full length. A random model's answers wander through the
vocabulary, so decoding finds no more of its experts in memory than chance has it.

Prompts of several lengths: `--clients 1 --prompt-tokens 256 2048 8192 --output-tokens 1 --keep`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

from harness.caps import cap_label, parse_cap
from harness.interruption import stop_on_termination
from harness.machine import machine_name, num_usable_cores, run_facts

from moe_runtime.bench.memory_cap import drop_page_cache, memory_cap, why_unavailable
from moe_runtime.bench.synthetic.checkpoint_writer import is_complete, write_checkpoint
from moe_runtime.bench.synthetic.gguf_copy import write_gguf
from moe_runtime.bench.synthetic.model_shapes import SHAPES
from moe_runtime.bench.texts import language_reference
from moe_runtime.files import write_text

HERE = Path(__file__).resolve().parent
OURS, LLAMA_CPP, TRANSFORMERS = "ours", "llama.cpp", "transformers"
PROGRAM = Path(sys.executable).with_name("moe-runtime")
READY_S = 900
CHARACTERS_PER_TOKEN = 4
BLOCK_TOKENS = 32
"""Of a block of keys and values, in `transformers serve`."""


class Load(NamedTuple):
    """What presses a server: so many clients, whose prompts and answers have so many tokens."""

    clients: int
    prompt_length: int
    answer_length: int


def main() -> None:
    """Measures every system under every cap, as often as asked, and prints a line each."""
    options = _arguments()
    stop_on_termination()
    shape = SHAPES[options.shape]
    checkpoint = options.data / shape.name
    gguf = options.data / f"{shape.name}.gguf"
    if not is_complete(shape, checkpoint):
        write_checkpoint(shape, checkpoint)
    if LLAMA_CPP in options.systems and not gguf.is_file():
        write_gguf(shape, checkpoint, gguf)
    if (reason := why_unavailable()) and any(options.caps):
        print(f"without caps: {reason}")
        options.caps = [cap for cap in options.caps if cap is None]
    pressing = write_prompts(options.data, options)
    facts = {
        **run_facts(HERE.parent),
        "shape": shape.describe(),
    }
    file = HERE / "results" / f"serve-{shape.name}-{machine_name(facts['machine'])}.json"
    rows = kept_rows(file, options) if options.keep else []
    for cap_bytes in options.caps:
        for _ in range(options.rounds):
            for system in options.systems:
                command = server_command(system, options, checkpoint, gguf)
                asked = load_options(system, checkpoint)
                for row in press(command, options.port, pressing, cap_bytes, asked):
                    cap, head = cap_label(cap_bytes), facts["commit"]
                    rows.append({"system": system, "cap": cap, "commit": head, **row})
                    print(_line(rows[-1]), flush=True)
                if options.save:  # after each server: an hour's work is not lost with its last part
                    report = {**facts, "summary": summarize(rows), "rows": rows}
                    write_text(file, json.dumps(report, indent=1) + "\n")
    for row in summarize(rows):
        print(row)


def kept_rows(file: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The file's rows of what is not measured now; each says its commit."""
    if not file.is_file():
        return []
    now = {
        (system, cap_label(cap), *load)
        for system in options.systems
        for cap in options.caps
        for load in loads(options)
    }
    named = ("system", "cap", *Load._fields)
    rows = json.loads(file.read_text())["rows"]
    return [row for row in rows if tuple(row.get(field) for field in named) not in now]


def loads(options: argparse.Namespace) -> list[Load]:
    """Every number of clients with every length of prompts."""
    return [
        Load(clients, prompt_tokens, options.output_tokens)
        for prompt_tokens in options.prompt_tokens
        for clients in options.clients
    ]


def write_prompts(folder: Path, options: argparse.Namespace) -> list[tuple[Load, Path]]:
    """Each load and the file of its prompts: a server keeps prefixes, so none comes twice.

    The first is for warming up: the shortest prompts, one for each of the most clients. The last
    line of each, as short, is for the load generator's probe alone.
    """
    most, shortest = max(options.clients), min(options.prompt_tokens)
    counts = {load: num_requests(load.clients, options) for load in loads(options)}
    words = iter(language_reference().split())
    pressing: list[tuple[Load, Path]] = []
    texts: list[str] = []
    for load, count in [(Load(most, shortest, options.output_tokens), most), *counts.items()]:
        lines = _prompts(words, load.prompt_length, count)
        lines += _prompts(words, shortest, 1)
        if len(lines) <= count:
            raise SystemExit(
                f"the text is too short for {count} more prompts of {load.prompt_length} tokens; "
                "ask for fewer --requests, --clients or --prompt-tokens"
            )
        pressing.append((load, folder / f"prompts-{len(pressing)}.txt"))
        texts.append("\n".join(lines) + "\n")
    for (_, path), text in zip(pressing, texts, strict=True):
        write_text(path, text)
    return pressing


def _prompts(words: Iterator[str], tokens: int, count: int) -> list[str]:
    """The next prompts that words make, fewer where they end."""
    lines: list[str] = []
    line = ""
    while len(lines) < count and (word := next(words, None)) is not None:
        line += f"{word} "
        if len(line) >= tokens * CHARACTERS_PER_TOKEN:
            lines.append(line.rstrip())
            line = ""
    return lines


def load_command(port: int, load: Load, prompts: Path, options: Sequence[str] = ()) -> list[str]:
    """How clients press a server with all prompts of a file but the last."""
    number = len(prompts.read_text().splitlines()) - 1
    command = [str(PROGRAM), "bench", "serve", "--url", f"http://127.0.0.1:{port}"]
    command += ["--prompts", str(prompts), "--concurrency", str(load.clients)]
    command += ["--requests", str(number), "--json", "--timeout", str(READY_S)]
    return [*command, "--output-tokens", str(load.answer_length), *options]


def num_requests(clients: int, options: argparse.Namespace) -> int:
    """As many for each client, whatever their number."""
    return max(clients, options.requests * clients // max(options.clients))


def server_command(
    system: str, options: argparse.Namespace, checkpoint: Path, gguf: Path
) -> list[str]:
    """How a server is started for as many clients as there will be."""
    most = max(options.clients)
    room = most * 2 * (max(options.prompt_tokens) + options.output_tokens)
    port = str(options.port)
    threads = str(num_usable_cores())
    if system == OURS:
        command = [str(PROGRAM), "serve", str(checkpoint), "--port", port]
        return [*command, "--max-tokens", str(room)]
    if system == LLAMA_CPP:
        command = [str(options.llama_server), "--model", str(gguf), "--port", port]
        command += ["--threads", threads, "--threads-batch", threads, "--parallel", str(most)]
        return [*command, "--ctx-size", str(room), "--no-webui", "--no-warmup"]
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(checkpoint)]
    command += ["--port", port, "--continuous-batching", "--device", "cpu"]
    # it would take half of the memory for keys and values
    blocks = str(2 * room // BLOCK_TOKENS)
    command += ["--cb-block-size", str(BLOCK_TOKENS), "--cb-num-blocks", blocks]
    return [*command, "--cb-max-batch-tokens", "512"]


def load_options(system: str, checkpoint: Path) -> list[str]:
    """What a server has to be asked in its own way: answers may end before their length then."""
    return ["--model", str(checkpoint), "--no-ignore-eos"] if system == TRANSFORMERS else []


def press(
    command: Sequence[str],
    port: int,
    pressing: Sequence[tuple[Load, Path]],
    cap_bytes: int | None,
    options: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """One server's life: a row for each load, or one that says why there is none."""
    drop_page_cache()
    with capped(command, cap_bytes) as (process, peak_bytes):
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}")
        except RuntimeError as error:
            yield {"error": str(error)}
            return
        for place, (load, path) in enumerate(pressing):
            done = subprocess.run(
                load_command(port, load, path, options),
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                said = done.stderr.strip().splitlines() or ["the load ended without a word"]
                yield {**load._asdict(), "error": said[-1]}
                continue
            if (code := process.poll()) is not None:
                # whoever answered was another server at this port
                yield {**load._asdict(), "error": f"the server ended with exit code {code}"}
                return
            if not place:
                continue
            (level,) = json.loads(done.stdout)["levels"]
            yield {**level, **load._asdict(), "peak_bytes": peak_bytes()}


@contextmanager
def capped(command: Sequence[str], cap_bytes: int | None) -> Iterator[tuple[Any, Any]]:
    """The running server, under a cap if there is one, and a function for the group's peak."""

    @contextmanager
    def started(words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                yield process
            finally:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()

    if cap_bytes is None:
        with started(command) as process:
            yield process, lambda: None
        return
    with memory_cap(cap_bytes) as cap, started(cap.wrap(command)) as process:
        yield process, cap.peak_bytes


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Asks for the server's health until it is well.

    Raises:
        RuntimeError: it ended, or took too long.
    """
    begin = time.monotonic()
    while time.monotonic() - begin < READY_S:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        try:
            with urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the server was not ready within {READY_S} s")


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median tokens a second by cap, load and system, and ours over each peer."""
    groups: dict[tuple[str, Load, str], list[dict[str, Any]]] = {}
    for row in rows:
        if "error" not in row and not row["failed"]:
            load = Load(*(row[field] for field in Load._fields))
            groups.setdefault((row["cap"], load, row["system"]), []).append(row)
    fields = ("input_tokens_per_s", "output_tokens_per_s")
    found = {
        key: {field: statistics.median(row[field] for row in group) for field in fields}
        for key, group in groups.items()
    }
    summary: list[dict[str, Any]] = []
    for (cap, load, system), rates in found.items():
        ours = found.get((cap, load, OURS))
        ratio = ours["output_tokens_per_s"] / rates["output_tokens_per_s"] if ours else None
        summary.append(
            {"cap": cap, **load._asdict(), "system": system, **rates, "ours_over_it": ratio}
        )
    return summary


def _line(row: dict[str, Any]) -> str:
    head = f"{row['system']:>12}  cap {row['cap']:>6}  {row.get('clients', '-')} clients"
    head += f"  prompts of {row.get('prompt_length', '-')}"
    if "error" in row:
        return f"{head}  {row['error']}"
    first = row["time_to_first_token_s"]
    return (
        f"{head}  {row['output_tokens_per_s']:7.2f} tokens/s out, "
        f"{row['input_tokens_per_s']:7.2f} in, first token p50 {first['p50']:.1f} s, "
        f"{row['answered']} answered, {row['failed']} failed"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    systems = (OURS, LLAMA_CPP, TRANSFORMERS)
    parser.add_argument("--systems", nargs="+", choices=systems, default=[OURS, LLAMA_CPP])
    parser.add_argument("--shape", choices=SHAPES, default="olmoe-1b-7b")
    parser.add_argument("--data", type=Path, default=HERE / "data", help="folder of the weights")
    parser.add_argument("--caps", nargs="+", type=parse_cap, default=[None, 7 << 30])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--requests", type=int, default=16, help="of the most clients; fewer: less")
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[128])
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="turns of every server")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--llama-server", type=Path, default=Path("llama-server"))
    parser.add_argument("--save", action="store_true", help="write this machine's results file")
    parser.add_argument("--keep", action="store_true", help="keep the file's other rows")
    return parser.parse_args()


if __name__ == "__main__":
    main()
