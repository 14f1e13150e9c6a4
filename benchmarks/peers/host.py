"""Runs one peer: ``python host.py PEER.py``, with requests and answers as lines of JSON.

It runs in the peer's own environment, so it uses the standard library alone and imports nothing of
this project. An error ends it.

Requests, each answered by one line:
    {"do": "start", "settings": {...}}                      imports what the peer needs
    {"do": "load"}                                          loads the model
    {"do": "measure", "prompts": [[...], ...], "num_new": N, "given": [[...], ...] or null}
        with "requests": [...] the sequences are routed as these of a trace
    {"do": "load_experts", "folder": F}                     hands it a layer of experts
    {"do": "experts", "folder": F, "tokens": T, "block_s": S}    times calls, or writes a result
    {"do": "train", "windows": [[...], ...]}                an optimizer step, timed
    {"do": "end"}                                           its peaks of memory; frees the model
An error is answered as {"error": "..."}, and ends it.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any

# A call this long needs no warm-up.
_LONG_S = 4.0


class ImportClock:
    """Counts the seconds that the main thread spends on imports, wherever they happen."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._depth = 0
        bootstrap: Any = importlib._bootstrap  # type: ignore[attr-defined]
        # The import statement and `import_module` both look it up there for new modules.
        find_and_load = bootstrap._find_and_load

        def timed(*args: Any) -> Any:
            is_outermost = not self._depth and threading.current_thread() is threading.main_thread()
            if not is_outermost:
                return find_and_load(*args)
            self._depth += 1
            begin = time.perf_counter()
            try:
                return find_and_load(*args)
            finally:
                self.spent_s += time.perf_counter() - begin
                self._depth -= 1

        bootstrap._find_and_load = timed


def answer_requests(peer_file: str, requests: Any, answers: Any) -> None:
    """Read requests until they end and answer them in turn."""
    clock = ImportClock()
    peer: Any = None
    for line in requests:
        asked = json.loads(line)
        if asked.get("requests") is not None:
            peer.take(asked["requests"])
        begin, imported = time.perf_counter(), clock.spent_s
        if asked["do"] == "start":
            module, peer = _made(peer_file, asked["settings"])
            found = {"start_s": time.perf_counter() - begin, "versions": _versions(module)}
            found["rss_after_imports_bytes"] = _status_bytes("VmRSS")
        elif asked["do"] == "load":
            peer.load()
            import_s = clock.spent_s - imported
            found = {"load_s": time.perf_counter() - begin - import_s, "import_s": import_s}
        elif asked["do"] == "measure":
            if asked.get("is_text") and hasattr(peer, "stream"):
                raise NotImplementedError("this peer generates by itself, and the text is given")
            found = measure(peer, asked["prompts"], asked["num_new"], asked["given"])
        elif asked["do"] == "load_experts":
            found = load_experts(peer, asked["folder"])
        elif asked["do"] == "experts":
            found = run_experts(peer, asked["folder"], asked["tokens"], asked["block_s"])
        elif asked["do"] == "train":
            begin = time.perf_counter()
            loss = float(peer.train(asked["windows"]))
            found = {"loss": loss, "seconds": time.perf_counter() - begin}
        else:
            found = {"peak_rss_bytes": _status_bytes("VmHWM"), **device_facts()}
            found["counts"] = getattr(peer, "counts", dict)()
            peer.close()
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def answer_error(stream: Any, kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Report the fatal error in one line; libraries may print more at exit."""
    words = [kind.__name__, *str(error).strip().splitlines()[:1]]
    frames = traceback.extract_tb(trace)
    lines = [one.lineno for one in frames if one.filename == sys.argv[1]]
    if len(words) > 1 and kind.__module__ == "moe_runtime.errors":  # says what to change
        words, lines = words[1:], []
    where = f" ({os.path.basename(sys.argv[1])}, line {lines[-1]})" if lines else ""
    stream.write(json.dumps({"error": ": ".join(words) + where}) + "\n")
    stream.flush()
    sys.__excepthook__(kind, error, trace)


def measure(
    peer: Any, prompts: list[list[int]], num_new: int, given: list[list[int]] | None
) -> dict[str, Any]:
    """Read prompts and append tokens: the given ones, or the peer's own top tokens.

    Returns:
        ``prompts_s``, until every sequence has its first token; ``steps_s`` of each further token
        of all of them; ``ids`` of each sequence: the likeliest token after the prompt and after
        each one appended; what the kernel counted.
    """
    is_alone = len(prompts) == 1
    if hasattr(peer, "stream") and is_alone:
        return _listen(peer, prompts[0], num_new)
    if hasattr(peer, "prefill") and is_alone:
        prefill, step = lambda prompts: [peer.prefill(*prompts)], lambda ids: [peer.step(*ids)]
    elif hasattr(peer, "prefill_batch"):
        prefill, step = peer.prefill_batch, peer.step_batch
    else:
        raise NotImplementedError("this peer reads one sequence at a time: no prefill_batch")
    with grown(_counts) as counts:
        begin = time.perf_counter()
        tokens = prefill(prompts)
        prompts_s = time.perf_counter() - begin
        likeliest, steps_s = [[token] for token in tokens], []
        with grown(getattr(peer, "counts", dict)) as of_steps:
            for number in range(num_new - 1):
                if given is not None:
                    tokens = [ids[number] for ids in given]
                begin = time.perf_counter()
                tokens = step(tokens)
                steps_s.append(time.perf_counter() - begin)
                for ids, token in zip(likeliest, tokens, strict=True):
                    ids.append(token)
    found = {"prompts_s": prompts_s, "steps_s": steps_s, "of_steps": of_steps}
    return {**found, "ids": [_numbers(ids) for ids in likeliest], **counts}


def _listen(peer: Any, ids: list[int], num_new: int) -> dict[str, Any]:
    """Like ``measure``, for a peer that generates on its own."""
    with grown(_counts) as counts:
        begin = time.perf_counter()
        likeliest, at_s, stream = [], [], peer.stream(ids, num_new)
        if not isinstance(stream, Iterator):
            kind = type(stream).__name__
            raise TypeError(
                f"stream must yield tokens one by one, as they are made; it returned {kind}"
            )
        for token in itertools.islice(stream, num_new + 1):
            likeliest.append(token)
            at_s.append(time.perf_counter() - begin)
    if len(likeliest) != num_new:
        came = "more" if len(likeliest) > num_new else len(likeliest)
        raise RuntimeError(f"{came} tokens came, {num_new} were asked for")
    steps_s = [later - sooner for sooner, later in itertools.pairwise(at_s)]
    return {"prompts_s": at_s[0], "steps_s": steps_s, "ids": [_numbers(likeliest)], **counts}


def _numbers(tokens: Iterable[Any]) -> list[int]:
    """Tokens as ints; refuses values that a device has not computed yet."""
    found = [*tokens]
    for token in found:
        if not isinstance(token, Integral) or isinstance(token, bool):
            kind = type(token).__name__
            raise TypeError(f"a token must be its number, an int, got {token!r:.60} ({kind})")
    return [*map(int, found)]


def load_experts(peer: Any, folder: str) -> dict[str, Any]:
    """Give a peer ``gate.npy``, ``up.npy`` and ``down.npy`` of a folder, and scales if any."""
    numpy: Any = importlib.import_module("numpy")
    names = [f"{name}{part}.npy" for part in ("", "_scales") for name in ("gate", "up", "down")]
    files = [file for name in names if (file := Path(folder, name)).exists()]
    peer.load_experts(*map(numpy.load, files))
    return {}


def run_experts(peer: Any, folder: str, num_tokens: int, block_s: float | None) -> dict[str, Any]:
    """Run calls of a number of tokens, each with another routing of a file.

    Args:
        folder: ``T.npz`` has ``x`` ``[T, D]``, ``ids`` and ``weights`` ``[R, T, K]``.
    """
    numpy: Any = importlib.import_module("numpy")
    with numpy.load(f"{folder}/{num_tokens}.npz") as file:
        x, ids, weights = (file[name] for name in ("x", "ids", "weights"))

    def in_memory(*given: Any) -> Callable[[], Any]:
        out = numpy.zeros_like(x)

        def call() -> Any:
            peer.experts(*given, out)
            return out

        return call

    prepare = getattr(peer, "prepare", in_memory)
    calls = [prepare(x, *routing) for routing in zip(ids, weights, strict=True)]
    if block_s is not None:
        return {"seconds": time_block(lambda number: calls[number % len(calls)](), block_s)}
    fetch = getattr(peer, "fetch", numpy.asarray)
    numpy.save(f"{folder}/{num_tokens}.npy", fetch(calls[0]()))
    return {}


def time_block(run: Callable[[int], object], block_s: float) -> list[float]:
    """Seconds of calls: one untimed, then as many as fit into the block, 1 to 200."""
    start = time.perf_counter()
    run(0)
    first_s = time.perf_counter() - start
    if first_s > _LONG_S:
        return [first_s]
    samples = []
    for index in range(max(1, min(200, math.ceil(block_s / first_s) - 1))):
        start = time.perf_counter()
        run(index + 1)
        samples.append(time.perf_counter() - start)
    return samples


def device_facts() -> dict[str, Any]:
    """``device_name`` and ``peak_device_bytes`` of the GPU that torch used here, if any."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return {}
    peaks = {cuda.max_memory_allocated(index): index for index in range(cuda.device_count())}
    peak = max(peaks, default=0)
    name = cuda.get_device_name(peaks[peak]) if peak else None
    return {"device_name": name, "peak_device_bytes": peak} if peak else {}


def _made(peer_file: str, settings: dict[str, Any]) -> tuple[Any, Any]:
    """The module and the peer of a file."""
    spec: Any = importlib.util.spec_from_file_location("peer", peer_file)
    if spec is None:
        raise ValueError(f"{peer_file}: expected a Python file")
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        return module, module.Peer(settings)
    except ImportError as error:
        needs = f"its environment ({sys.executable}) needs: {module.INSTALL}"
        raise ImportError(f"{error}; {needs}") from error


def _versions(module: Any) -> dict[str, str]:
    found = {"python": platform.python_version()}
    installed = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    return found | {name: installed[name] for name in module.PACKAGES if name in installed}


@contextmanager
def grown(counts: Callable[[], dict[str, Any]]) -> Iterator[dict[str, float]]:
    """The increase of counters within the block."""
    found: dict[str, float] = {}
    before = counts()
    yield found
    after = counts().items()
    found |= {name: value - before[name] for name, value in after if isinstance(value, int | float)}


def _counts() -> dict[str, int]:
    """The kernel's counters of this process: ``read_call_bytes`` through system calls,
    ``storage_bytes`` from the disk itself, ``major_faults``."""
    import resource

    lines = Path("/proc/self/io").read_text().splitlines()
    values = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return {
        "read_call_bytes": values["rchar"],
        "storage_bytes": values["read_bytes"],
        "major_faults": faults,
    }


def _status_bytes(field: str) -> int:
    """A field of /proc/PID/status, summed over this process and its descendants."""
    # The peak of `getrusage` includes the process image before `exec`.
    homes, found = [Path("/proc/self")], []
    for home in homes:
        try:
            lines = (home / "status").read_text().splitlines()
            started = [file.read_text().split() for file in home.glob("task/*/children")]
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        homes += [Path("/proc", number) for numbers in started for number in numbers]
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")]
    if not found:
        raise OSError(f"the kernel does not report {field}")
    return sum(found)


if __name__ == "__main__":
    # Keeps library output out of the answers; a library that waits for a key gets none.
    stream, requests = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.excepthook = functools.partial(answer_error, stream)
    answer_requests(sys.argv[1], requests, stream)
