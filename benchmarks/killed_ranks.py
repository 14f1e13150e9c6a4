"""Kill ranks of `serve` and `generate` at random moments: `python benchmarks/killed_ranks.py`.

`torchrun --max-restarts` starts two and four processes, and `serve --elastic` three. Every kill is
of a random rank. Checked: the log and the clients name that rank, nothing waits longer than
`PATIENCE_S`, the service answers again with the same text, and batches end complete, with the
answers of one process and no line twice.
"""

import contextlib
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil

from moe_runtime.benchmarks.harness.scripting import ScriptResults, option, script
from moe_runtime.benchmarks.suite import facts
from moe_runtime.errors import MoERuntimeError
from moe_runtime.models.pocket import pocket_path

METRICS = {
    **facts("count", "kills", "named", "kills_at_start", "answers", "batches"),
    **facts("s", "longest_s"),
}
PATIENCE_S = 240.0
"""Four processes on two busy cores start in half of it."""
PROMPT = "The for statement is used to iterate"
ANSWER = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
PROGRAM = ("-m", "moe_runtime.cli.program")
LOADING = ("--host-memory", "64MiB", "--policy", "lru", "--prefetch", "off")
NAMED = re.compile(r"ranks? ([\d, ]+) of \d+ ha")


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as free:
        return free.getsockname()[1]


def until(is_done: Callable[[], Any], what: str) -> float:
    """Seconds until something was done."""
    begin_s = time.monotonic()
    while not is_done():
        if time.monotonic() > begin_s + PATIENCE_S:
            raise MoERuntimeError(f"{what}: not within {PATIENCE_S:g} s")
        time.sleep(0.05)
    return time.monotonic() - begin_s


class Started(contextlib.ExitStack):
    """A command with its output in a file, and its processes."""

    def __init__(self, words: list[str], log: Path) -> None:
        super().__init__()
        self._log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-P", *words], stdout=subprocess.DEVNULL, stderr=file
            )
        self.callback(self.end)

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes that torchrun has started, by rank."""
        found = {}
        for one in psutil.Process(self.process.pid).children() if self.is_running else ():
            with contextlib.suppress(psutil.Error, KeyError):
                if _is_there(one):
                    found[int(one.environ()["RANK"])] = one
        return found

    def kill(self, dice: random.Random) -> int | None:
        """Kills a random rank, and returns when the others have ended; None if there was none."""
        ranks = self.ranks()
        if not ranks:
            return None
        rank = dice.choice(sorted(ranks))
        with contextlib.suppress(psutil.Error):
            ranks[rank].kill()
        until(lambda: not any(map(_is_there, ranks.values())), "the other ranks end")
        return rank

    def end(self) -> None:
        with contextlib.suppress(psutil.Error):
            for one in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    one.kill()
        self.process.kill()
        self.process.wait()


def _is_there(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def torchrun(size: int, *words: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return [*launcher, "--max-restarts", "1000", *PROGRAM, *words]


def ask(port: int, **more: Any) -> Any:
    body = json.dumps({**ANSWER, **more}).encode()
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
    return urllib.request.urlopen(asked, timeout=PATIENCE_S)


def text_of(port: int) -> str | None:
    """The answer of a service; None while there is none."""
    try:
        return json.loads(ask(port).read())["choices"][0]["text"]
    except (urllib.error.URLError, OSError, HTTPException):
        return None


def check_names(said: str, killed: list[int]) -> bool:
    """Whether a text names the ranks that were killed; refuses others."""
    found = {int(rank) for ranks in NAMED.findall(said) for rank in ranks.split(",")}
    if not found <= {*killed}:
        raise MoERuntimeError(f"ranks {sorted(found)} were named, {killed} killed: {said[-2000:]}")
    return bool(found)


def disturb_service(size: int, kills: int, dice: random.Random, folder: Path) -> dict[str, float]:
    """Every fourth kill comes while the processes start, and may have no group to be named in."""
    port = free_port()
    words = ["serve", str(pocket_path()), "--port", str(port), "--max-tokens", "2048", *LOADING]
    counts = dict.fromkeys(METRICS, 0.0)
    texts = set[str]()

    def answers() -> bool:
        text = text_of(port)
        texts.update([] if text is None else [text])
        return text is not None

    with Started(torchrun(size, *words), folder / "log") as service:
        while counts["kills"] < kills:
            before, is_start = len(service.said), counts["kills"] % 4 == 3
            if is_start:
                until(service.ranks, "the processes start")
                time.sleep(dice.uniform(0, 6))
                rank, heard = service.kill(dice), ""
            else:
                waited_s = until(answers, "the service answers again")
                counts["longest_s"] = max(counts["longest_s"], waited_s)
                counts["answers"] += 1
                rank, heard = killed_while_answering(service, port, dice)
            assert rank is not None
            counts["kills"] += 1
            counts["kills_at_start"] += is_start
            is_named = check_names(service.said[before:], [rank])
            counts["named"] += is_named
            if not is_start and not is_named:
                raise MoERuntimeError(f"no line names rank {rank}: {service.said[before:]}")
            if not is_start and rank and not check_names(heard, [rank]):
                raise MoERuntimeError(f"clients did not hear of rank {rank}: {heard[-500:]}")
        until(answers, "the service answers again")
        if len(texts) > 1:
            raise MoERuntimeError(f"the service has given different texts: {texts}")
    return counts


def killed_while_answering(service: Started, port: int, dice: random.Random) -> tuple[int, str]:
    """Kills a rank while it answers; the rank, and what the client heard."""
    heard: list[bytes] = []

    def listen() -> None:
        with (
            contextlib.suppress(OSError, HTTPException),
            ask(port, max_tokens=1900, stream=True, ignore_eos=True) as response,
        ):
            heard.extend(response)

    client = threading.Thread(target=listen)
    client.start()
    time.sleep(dice.uniform(0, 3))
    rank = service.kill(dice)
    assert rank is not None
    client.join(PATIENCE_S)
    if client.is_alive():
        raise MoERuntimeError(f"a client still waits after the death of rank {rank}")
    return rank, b"".join(heard).decode(errors="replace")


def disturb_elastic(kills: int, dice: random.Random, folder: Path) -> dict[str, float]:
    """Kills processes that joined, and starts others; no answer may end."""
    port, rendezvous = free_port(), free_port()
    words = ["serve", str(pocket_path()), "--max-tokens", "2048", "--exact", *LOADING, "--port"]
    counts = dict.fromkeys(METRICS, 0.0)
    with contextlib.ExitStack() as stack:
        first = [*PROGRAM, *words, str(port), "--elastic", f"1:3@{rendezvous}"]
        service = stack.enter_context(Started(first, folder / "log"))
        until(lambda: text_of(port) is not None, "the service answers")
        expected = json.loads(ask(port, max_tokens=400).read())["choices"][0]["text"]
        others: list[Started] = []
        ends, got = threading.Event(), list[str]()

        def listen() -> None:
            while not ends.is_set():
                got.append(json.loads(ask(port, max_tokens=400).read())["choices"][0]["text"])

        clients = [threading.Thread(target=listen) for _ in range(2)]
        for client in clients:
            client.start()
        while counts["kills"] < kills:
            while len(others) < 2:
                joining = [*PROGRAM, *words, "0", "--join", f"localhost:{rendezvous}"]
                others.append(stack.enter_context(Started(joining, folder / "joined")))
                size, before = len(others) + 1, len(service.said)
                until(
                    lambda before=before, size=size: f"{size} processes" in service.said[before:],
                    "a process joins",
                )
            time.sleep(dice.uniform(0, 3))
            before = len(service.said)
            others.pop(dice.randrange(2)).process.kill()
            counts["kills"] += 1
            waited_s = until(lambda before=before: "2 processes" in service.said[before:], "a loss")
            counts["longest_s"] = max(counts["longest_s"], waited_s)
            counts["named"] += check_names(service.said[before:], [1, 2])
        ends.set()
        for client in clients:
            client.join(PATIENCE_S)
        counts["answers"] = len(got)
        if {*got} != {expected} or any(client.is_alive() for client in clients):
            raise MoERuntimeError(f"answers differ, or do not end: {[*{expected, *got}]}")
    return counts


def disturb_batches(size: int, kills: int, dice: random.Random, folder: Path) -> dict[str, float]:
    prompts, alone = folder / "in.jsonl", folder / "alone.jsonl"
    lines = [{"prompt": PROMPT[: 5 + n], "max_tokens": 20 + 9 * (n % 7)} for n in range(30)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def words(output: Path) -> list[str]:
        given = ["generate", str(pocket_path()), "--prompts", str(prompts), "-o", str(output)]
        return [*given, "--max-running", "4", "--exact", *LOADING]

    def lines_of(output: Path) -> list[tuple[str, str]]:
        found = [json.loads(line) for line in output.read_text().splitlines()]
        return [(one["id"], one["text"]) for one in found]

    subprocess.run([sys.executable, "-P", *PROGRAM, *words(alone)], check=True, capture_output=True)
    counts = dict.fromkeys(METRICS, 0.0)
    while counts["kills"] < kills:
        output = folder / f"out-{counts['batches']:g}.jsonl"
        with Started(torchrun(size, *words(output)), folder / "batches") as batch:
            while counts["kills"] < kills and batch.is_running:
                before = len(batch.said)
                time.sleep(dice.uniform(0, 12))
                rank = batch.kill(dice)
                if rank is not None:
                    counts["kills"] += 1
                    counts["named"] += check_names(batch.said[before:], [rank])
            waited_s = until(lambda: not batch.is_running, "the batch ends")
            counts["longest_s"] = max(counts["longest_s"], waited_s)
            if batch.process.returncode or lines_of(output) != lines_of(alone):
                raise MoERuntimeError(f"the batch is not that of one process: {batch.said[-2000:]}")
            counts["batches"] += 1
            counts["answers"] += len(lines)
    return counts


@script(
    kills=option(50, "half with each number of ranks; a fifth more of --elastic"),
    seed=0,
)
def main(options: Namespace) -> int:
    dice, kills = random.Random(options.seed), options.kills
    settings = {"model": "pocket", "kills": kills, "seed": options.seed}
    results = ScriptResults("killed-ranks", options, settings, METRICS)
    for size in (2, 4):
        of_services = round(0.3 * kills)
        for what, disturb, part in (
            ("serve", disturb_service, of_services),
            ("generate", disturb_batches, kills // 2 - of_services),
        ):
            with tempfile.TemporaryDirectory() as folder:
                found = disturb(size, part, dice, Path(folder))
            results.add(f"{what}, {size} processes", [found])
    with tempfile.TemporaryDirectory() as folder:
        found = disturb_elastic(kills // 5, dice, Path(folder))
    results.add("serve --elastic, 3 processes", [found])
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
