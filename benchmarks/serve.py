"""Servers beside each other under the same clients: `python benchmarks/serve.py --save`.

`moe-runtime serve`, llama.cpp's `llama-server` and `transformers serve` answer the same requests on
the same synthetic weights, in turn, each in a process of its own, with all memory there is and
under memory caps. `moe-runtime bench serve` presses them, once unmeasured: weights are read and
memory is touched for the first time then. Prompts are pieces of Python's language reference;
answers are greedy and have their full length. A random model's answers wander through the
vocabulary, so decoding finds no more of its experts in memory than chance has it.
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
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from harness.checkpoints import is_complete, write_checkpoint
from harness.gguf_export import write_gguf
from harness.interruption import stop_on_termination
from harness.machine import machine_name, num_usable_cores, run_facts
from harness.plan import cap_label, parse_cap
from harness.shapes import SHAPES

from moe_runtime.bench.memory_cap import drop_page_cache, memory_cap, why_unavailable
from moe_runtime.bench.texts import language_reference
from moe_runtime.files import write_text

HERE = Path(__file__).resolve().parent
OURS, LLAMA_CPP, TRANSFORMERS = "ours", "llama.cpp", "transformers"
PROGRAM = Path(sys.executable).with_name("moe-runtime")
READY_S = 900
CHARACTERS_PER_TOKEN = 4


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
    prompts = write_prompts(options.data, options)
    facts = {
        **run_facts(HERE.parent),
        "shape": shape.describe(),
    }
    file = HERE / "results" / f"serve-{shape.name}-{machine_name(facts['machine'])}.json"
    rows = kept_rows(file, facts, options) if options.keep else []
    for cap_bytes in options.caps:
        for _ in range(options.rounds):
            for system in options.systems:
                command = server_command(system, options, checkpoint, gguf)
                for row in press(command, options, prompts, cap_bytes):
                    rows.append({"system": system, "cap": cap_label(cap_bytes), **row})
                    print(_line(rows[-1]), flush=True)
                if options.save:  # after each server: an hour's work is not lost with its last part
                    report = {**facts, "summary": summarize(rows), "rows": rows}
                    write_text(file, json.dumps(report, indent=1) + "\n")
    for row in summarize(rows):
        print(row)


def kept_rows(
    file: Path, facts: dict[str, Any], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The file's rows of caps that are not measured now.

    Raises:
        SystemExit: they are of another commit or machine.
    """
    if not file.is_file():
        return []
    before = json.loads(file.read_text())
    for key in ("commit", "machine"):
        if before[key] != facts[key]:
            raise SystemExit(f"--keep: {file.name} is of another {key}; measure everything again")
    now = {cap_label(cap) for cap in options.caps}
    return [row for row in before["rows"] if row["cap"] not in now]


def write_prompts(folder: Path, options: argparse.Namespace) -> dict[int, Path]:
    """A file of prompts for each number of clients: a server keeps prefixes, so none comes twice.

    That of 0 clients is for warming up: a prompt for each of the most clients. The last line of
    each is for the load generator's probe alone.
    """
    counts = {clients: num_requests(clients, options) for clients in options.clients}
    counts[0] = max(options.clients)
    count, tokens = sum(counts.values()) + len(counts), options.prompt_tokens
    lines: list[str] = []
    line = ""
    for word in language_reference().split():
        line += f"{word} "
        if len(line) >= tokens * CHARACTERS_PER_TOKEN:
            lines.append(line.rstrip())
            line = ""
        if len(lines) == count:
            break
    if len(lines) < count:
        raise SystemExit(f"the text has {len(lines)} prompts of {tokens} tokens, not {count}")
    paths: dict[int, Path] = {}
    for clients, number in counts.items():
        mine, lines = lines[: number + 1], lines[number + 1 :]
        paths[clients] = folder / f"prompts-{clients}.txt"
        write_text(paths[clients], "\n".join(mine) + "\n")
    return paths


def load_command(url: str, clients: int, prompts: Path, options: argparse.Namespace) -> list[str]:
    """How a number of clients press a server with all prompts of a file but the last."""
    number = len(prompts.read_text().splitlines()) - 1
    command = [str(PROGRAM), "bench", "serve", "--url", url, "--prompts", str(prompts)]
    command += ["--concurrency", str(clients), "--requests", str(number), "--json"]
    return [*command, "--output-tokens", str(options.output_tokens), "--timeout", str(READY_S)]


def num_requests(clients: int, options: argparse.Namespace) -> int:
    """As many for each client, whatever their number."""
    return max(clients, options.requests * clients // max(options.clients))


def server_command(
    system: str, options: argparse.Namespace, checkpoint: Path, gguf: Path
) -> list[str]:
    """How a server is started for as many clients as there will be."""
    most = max(options.clients)
    room = most * 2 * (options.prompt_tokens + options.output_tokens)
    port = str(options.port)
    threads = str(num_usable_cores())
    if system == OURS:
        command = [str(PROGRAM), "serve", str(checkpoint), "--port", port]
        return [*command, "--max-tokens", str(room)]
    if system == LLAMA_CPP:
        command = [str(options.llama_server), "--model", str(gguf), "--port", port]
        command += ["--threads", threads, "--threads-batch", threads, "--parallel", str(most)]
        return [*command, "--ctx-size", str(room), "--no-webui", "--no-warmup"]
    command = [str(Path(sys.executable).with_name("transformers")), "serve", "--port", port]
    return [*command, "--force-model", str(checkpoint), "--continuous-batching", "--device", "cpu"]


def press(
    command: Sequence[str],
    options: argparse.Namespace,
    prompts: dict[int, Path],
    cap_bytes: int | None,
) -> Iterator[dict[str, Any]]:
    """One server's life: a row for each number of clients, or one that says why there is none."""
    drop_page_cache()
    url = f"http://127.0.0.1:{options.port}"
    with capped(command, cap_bytes) as (process, peak_bytes):
        try:
            wait_until_ready(process, url)
        except RuntimeError as error:
            yield {"error": str(error)}
            return
        for clients in (0, *options.clients):
            done = subprocess.run(
                load_command(url, clients or max(options.clients), prompts[clients], options),
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                said = done.stderr.strip().splitlines() or ["the load ended without a word"]
                yield {"clients": clients, "error": said[-1]}
                continue
            if (code := process.poll()) is not None:
                # whoever answered was another server at this port
                yield {"clients": clients, "error": f"the server ended with exit code {code}"}
                return
            if not clients:
                continue
            (level,) = json.loads(done.stdout)["levels"]
            yield {"clients": clients, "peak_bytes": peak_bytes(), **level}


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
    """Median tokens a second by cap, clients and system, and ours over each peer."""
    rates: dict[tuple[str, int, str], list[float]] = {}
    for row in rows:
        if "error" not in row and not row["failed"]:
            key = row["cap"], row["clients"], row["system"]
            rates.setdefault(key, []).append(row["output_tokens_per_s"])
    found = {key: statistics.median(values) for key, values in rates.items()}
    return [
        {
            "cap": cap,
            "clients": clients,
            "system": system,
            "output_tokens_per_s": rate,
            "ours_over_it": found[cap, clients, OURS] / rate
            if (cap, clients, OURS) in found
            else None,
        }
        for (cap, clients, system), rate in found.items()
    ]


def _line(row: dict[str, Any]) -> str:
    head = f"{row['system']:>12}  cap {row['cap']:>6}  {row.get('clients', '-')} clients"
    if "error" in row:
        return f"{head}  {row['error']}"
    first = row["time_to_first_token_s"]
    return (
        f"{head}  {row['output_tokens_per_s']:7.2f} tokens/s out, "
        f"{row['total_tokens_per_s']:7.2f} in all, first token p50 {first['p50']:.1f} s, "
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
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="turns of every server")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--llama-server", type=Path, default=Path("llama-server"))
    parser.add_argument("--save", action="store_true", help="write this machine's results file")
    parser.add_argument(
        "--keep", action="store_true", help="keep its other caps, of the same commit and machine"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
