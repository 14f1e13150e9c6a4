"""Peers: their names, their environments, and the processes that run them.

Requests and answers are lines of JSON; ``peers/host.py`` is the other end.
"""

import ast
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks.suite import PeerFailedError
from moe_runtime.benchmarks.suite.memory_cap import MemoryCap, forget, memory_cap
from moe_runtime.benchmarks.suite.programs import running
from moe_runtime.config import format_bytes, require_known
from moe_runtime.files import at_home

_FOLDER = Path(__file__).resolve().parents[1] / "peers"
_SHOWN = 300
# The error of an interpreter that is too old for -P.
_OLD_PYTHON = "unknown option -P"


@dataclass(frozen=True, kw_only=True)
class PeerProgram:
    name: str
    file: Path
    python: Path
    settings: dict[str, Any]
    cap_bytes: int | None = None
    failure: str | None = None
    cache: Path | None = None
    gpus: str | None = None


class PeerProcess:
    """A running peer. With ``stands_still`` its threads run only while it answers."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        log: Any,
        timeout_s: float,
        cap: MemoryCap | None = None,
        *,
        stands_still: bool = False,
    ) -> None:
        self._process, self._stands_still = process, stands_still
        self._log = log
        self._timeout_s = timeout_s
        self._cap = cap
        self._unread = b""

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        requests = self._process.stdin
        assert requests is not None
        self._signal(signal.SIGCONT)
        try:
            requests.write(json.dumps({"do": what, **more}).encode() + b"\n")
            requests.flush()
        except BrokenPipeError:
            raise PeerFailedError(self._why()) from None
        answer = json.loads(self._line(what))
        self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise PeerFailedError(answer["error"][:_SHOWN])
        return answer

    def _signal(self, number: signal.Signals) -> None:
        """Stop or continue all threads; returns once they have stopped."""
        if self._stands_still and self._process.poll() is None:
            os.killpg(self._process.pid, number)
            if number == signal.SIGSTOP:
                # leaves the exit status to `wait`
                os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _line(self, what: str) -> bytes:
        answers = self._process.stdout
        assert answers is not None
        end = time.monotonic() + self._timeout_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([answers], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise PeerFailedError(f"no answer to {what!r} after {self._timeout_s:.0f} s")
            part = os.read(answers.fileno(), 1 << 16)
            if not part:
                raise PeerFailedError(self._why())
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _why(self) -> str:
        code = self._process.wait(self._timeout_s)
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "")
        if _OLD_PYTHON in lines[:1]:
            return "its interpreter is older than Python 3.11, which peers need"
        if self._cap is not None and self._cap.num_oom_kills():
            return f"killed: it takes more than the cap of {format_bytes(self._cap.limit_bytes)}"
        if code < 0:
            name = signal.Signals(-code).name
            return f"killed by {name}" + (", for want of memory?" if name == "SIGKILL" else "")
        return last[:_SHOWN] or f"ended with exit code {code}"


@contextmanager
def started(
    program: PeerProgram, timeout_s: float, *, stands_still: bool = False
) -> Iterator[PeerProcess]:
    """Run a peer within the block. At its end the peer and all its children are killed."""
    if program.failure is not None:
        raise PeerFailedError(program.failure)
    threads = program.settings["num_threads"]
    command = ["env", f"OMP_NUM_THREADS={threads}", "HF_HUB_OFFLINE=1"]
    command += [] if program.cache is None else [f"XDG_CACHE_HOME={program.cache}"]
    command += [] if program.gpus is None else [f"CUDA_VISIBLE_DEVICES={program.gpus}"]
    # -P keeps the folder of host.py off sys.path.
    command += [str(program.python), "-P", str(_FOLDER / "host.py"), str(program.file)]
    if not program.python.is_file():
        raise PeerFailedError(f"{program.python} is not there")
    limit = program.cap_bytes
    with (
        tempfile.TemporaryFile() as log,
        nullcontext() if limit is None else memory_cap(limit) as cap,
    ):
        if cap is not None:
            command = cap.wrap(command)
            forget(files_under(Path(program.settings["model"])))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        with running(command, **pipes) as process:
            yield PeerProcess(process, log, timeout_s, cap, stands_still=stands_still)


def why_unable(program: PeerProgram, timeout_s: float) -> str | None:
    """Why a peer cannot run, in one line; None if it starts in its environment."""
    try:
        with started(replace(program, cap_bytes=None), timeout_s) as process:
            process.ask("start", settings=program.settings)
    except PeerFailedError as error:
        return str(error)
    return None


def files_under(model: Path) -> list[Path]:
    """All files of a model, which is a file or a folder."""
    return [file for file in (model, *model.rglob("*")) if file.is_file()]


def this_python() -> Path:
    return Path(sys.executable)


_NOT_PEERS = ("__init__", "host")
OURS = "moe_runtime"
GGUF_PEERS = ("llama_cpp",)
"""Peers that read only GGUF files."""
EXPORTED_PEERS = ("openvino",)
"""Peers that read a folder exported from a checkpoint by another program."""
TEXT_CASES = ("latency", "throughput")
"""The cases of a peer that names none."""
_OPTIONAL: dict[str, Any] = {
    "VARIANTS": (),
    "CASES": TEXT_CASES,
    "FORMATS": ("bf16",),
    "DEVICES": ("cpu",),
}
_WORD = re.compile(r"[\w.+-]+")


def peer_names() -> list[str]:
    return sorted(file.stem for file in _FOLDER.glob("*.py") if file.stem not in _NOT_PEERS)


def peer_file(name: str, case: str | None = None) -> Path:
    """The file of a peer: one of the package by name, any other by a path ending in ``.py``."""
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise ValueError(f"--peer {name}: no such file")
        return Path(name).resolve()
    plain = name.replace(".", "_").replace("-", "_")
    if plain not in (known := peer_names()):
        takes_part = [
            one
            for one in known
            if case is None or case in describe_peer(_FOLDER / f"{one}.py")["CASES"]
        ]
        require_known("peer", name, takes_part)
    return _FOLDER / f"{plain}.py"


def describe_peer(file: Path) -> dict[str, Any]:
    """Read ``INSTALL``, ``PACKAGES`` and other constants of a peer's file without running it."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), file.name)
        found = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id in ("INSTALL", "PACKAGES", *_OPTIONAL)
        }
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{file}: not the file of a peer: {error}") from None
    if missing := [name for name in ("INSTALL", "PACKAGES") if name not in found]:
        raise ValueError(f"{file}: not the file of a peer: it says no {' and no '.join(missing)}")
    for name, value in found.items():
        texts = [value] if name == "INSTALL" else value
        if not isinstance(texts, list | tuple) or not all(isinstance(one, str) for one in texts):
            expected = "a text" if name == "INSTALL" else "a tuple of texts"
            raise ValueError(f"{file}: {name} must be {expected}, got {value!r}")
    made = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Peer"]
    parts = [part for peer in made for part in peer.body if not peer.bases]
    methods = [part.name for part in parts if isinstance(part, ast.FunctionDef)]
    assigned = [target for part in parts if isinstance(part, ast.Assign) for target in part.targets]
    methods += [target.id for target in assigned if isinstance(target, ast.Name)]
    reads_batches = not methods or "prefill_batch" in methods
    cases = TEXT_CASES if reads_batches else ("latency",)
    return {**_OPTIONAL, "CASES": cases, **found, "METHODS": methods}


def find_peer(asked: str, settings: dict[str, Any], case: str = "latency") -> PeerProgram:
    """Parse ``NAME[:VARIANT][@PYTHON][=MODEL]``, as in ``llama_cpp@bin/python=olmoe.gguf``."""
    name, variant, python, model = split_peer(asked)
    file = peer_file(name, case)
    described = describe_peer(file)
    if case not in described["CASES"]:
        cases = " and ".join(f"bench {one}" for one in described["CASES"])
        why = " (it reads one sequence at a time)" if case == "throughput" else ""
        raise ValueError(f"--peer {asked}: takes part in {cases}, not in bench {case}{why}")
    if lacking := _lacking(described["METHODS"], case):
        raise ValueError(f"--peer {asked}: its class Peer has no {' and no '.join(lacking)}")
    for word in variant.split("+") if variant else ():
        require_known(f"variant of {file.stem}", word, described["VARIANTS"])
    device = settings.get("device")
    if device and device.partition(":")[0] not in described["DEVICES"]:
        raise ValueError(
            f"--peer {asked}: computes on {' and '.join(described['DEVICES'])} alone (its DEVICES),"
            f" and all systems of this run on {device}; leave it out, or give another --device"
        )
    if python and not Path(python).is_file():
        raise ValueError(f"--peer {asked}: no interpreter {python}")
    if python and not os.access(python, os.X_OK):
        raise ValueError(f"--peer {asked}: {python} is not an interpreter: it cannot be run")
    if model and not Path(model).exists():
        raise ValueError(f"--peer {asked}: {model} is not there")
    own = {"model": str(Path(model).absolute())} if model else {}
    return PeerProgram(
        name=file.stem + (f":{variant}" if variant else ""),
        file=file,
        python=Path(python).absolute() if python else this_python(),
        settings={**settings, **own, "variant": variant or None},
        cap_bytes=settings.get("cap_bytes"),
    )


def _lacking(methods: Sequence[str], case: str) -> list[str]:
    """Methods that a case calls and the peer's class lacks, as far as its source shows."""
    if not methods or case not in TEXT_CASES:
        return []
    ways = [["stream"], ["prefill_batch", "step_batch"], ["prefill", "step"]]
    meant = next((way for way in ways if way[0] in methods), ways[-1])
    return [name for name in ("load", *meant, "close") if name not in methods]


def find_peers(
    asked: Sequence[str], settings: dict[str, Any], case: str = "latency", names: Sequence[str] = ()
) -> list[PeerProgram]:
    """Parse all ``--peer`` options. Peers of one name get a suffix that tells them apart."""
    programs = [find_peer(one, settings, case) for one in asked]
    taken = {OURS, *names}
    of_name = Counter([*taken, *(program.name for program in programs)])
    found = []
    for one, program in zip(asked, programs, strict=True):
        plain = program.name + (_difference(one) if of_name[program.name] > 1 else "")
        numbered = (f"{plain}#{number}" for number in count(2))
        name = next(name for name in chain([plain], numbered) if name not in taken)
        taken.add(name)
        found.append(replace(program, name=name))
    return found


def _difference(asked: str) -> str:
    """A suffix made of the environment and the model, without their folders."""
    _, _, python, model = split_peer(asked)
    place = Path(python).absolute()
    environment = place.parent.parent if place.parent.name == "bin" else place
    return (f"@{environment.name}" if python else "") + (
        f"={Path(model).absolute().name}" if model else ""
    )


def require_takes_shapes(programs: Sequence[PeerProgram]) -> None:
    """Refuse peers whose file format ``--shape`` cannot write."""
    for one in programs:
        if one.file.stem in EXPORTED_PEERS and "model" not in one.settings:
            raise ValueError(
                f"--peer {one.name}: reads a folder that is exported from a checkpoint, and "
                "--shape writes none; export what --keep-shape kept, and name it: "
                f"--peer {one.name}=FOLDER"
            )


def writes_own_text(program: PeerProgram) -> bool:
    """Whether a peer generates on its own, so that it cannot be given tokens."""
    return "stream" in describe_peer(program.file)["METHODS"]


def split_peer(asked: str) -> tuple[str, str, str, str]:
    """The name, variant, interpreter and model in ``NAME[:VARIANT][@PYTHON][=MODEL]``."""
    ways = [
        (at_home(name), variant, at_home(python), at_home(model))
        for words, model in _ways(asked, "=")
        for named, python in _ways(words, "@")
        for name, variant in _ways(named, ":")
    ]
    return next((way for way in ways if _is_there(*way)), ways[0])


def _ways(text: str, sign: str) -> Iterator[tuple[str, str]]:
    """All splits of a text at a sign, the first sign first; last the whole text."""
    for place in (place for place, char in enumerate(text) if char == sign):
        yield text[:place], text[place + 1 :]
    yield text, ""


def _is_there(name: str, variant: str, python: str, model: str) -> bool:
    is_peer = Path(name).is_file() if name.endswith(".py") else _WORD.fullmatch(name) is not None
    return (
        is_peer
        and (not variant or _WORD.fullmatch(variant) is not None)
        and (not python or Path(python).is_file())
        and (not model or Path(model).exists())
    )


def our_program(settings: dict[str, Any], cap_bytes: int | None = None) -> PeerProgram:
    """This project as a peer, optionally with capped memory."""
    file, python = _FOLDER / f"{OURS}.py", this_python()
    return PeerProgram(name=OURS, file=file, python=python, settings=settings, cap_bytes=cap_bytes)
