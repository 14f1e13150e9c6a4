"""Cases about the words of the command line, and about the streams of a process."""

import signal
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from bad_input_cases import all_files
from bad_input_runner import Case, Maker
from bad_input_values import WORDS
from typer.main import get_command

from moe_runtime.cli.main import build_app

_SOUND = {
    "run": ("model", "-p", "The", "-n", "2", "--host-memory", "1GiB"),
    "serve": (
        *("model", "--port", "0", "--host-memory", "1GiB", "--max-tokens", "64", "--dry-run"),
    ),
    "chat": ("model", "-n", "2", "--host-memory", "1GiB"),
    "generate": (
        *("model", "--prompts", "prompts.jsonl", "-o", "answers.jsonl"),
        *("-n", "2", "--host-memory", "1GiB"),
    ),
    "inspect": ("model",),
    "pack": ("model", "packed"),
    "doctor": (".", "--read-size", "4KiB"),
    "replay": ("trace.npz", "--policy", "lru"),
    "report": ("trace.npz", "--max-accesses", "100"),
    "place": ("trace.npz", "--gpus", "2"),
    "simulate layer": ("--ranks", "8"),
    "simulate serve": ("sizes.toml", "--ranks", "8", "--requests", "9", "--new-tokens", "4"),
    "simulate train": ("sizes.toml", "--ranks", "8"),
    "train": ("train.toml", "--dry-run"),
    "finetune": ("model", "text.txt", "--dry-run", "--context", "16", "--sequences", "1"),
    "predictor fit": ("trace.npz", "-o", "new.npz"),
    "predictor evaluate": ("trace.npz",),
    "models list": (),
    "models remove": ("none/none", "--yes"),
    "predictor list": (),
    "predictor teach": ("model", "trace.npz"),
    "bench kernels": (),
    "bench latency": ("model", "--quick", "--time", "1", "-n", "2", "--host-memory", "1GiB"),
    "bench throughput": (
        *("model", "--quick", "--time", "1", "-n", "2", "--host-memory", "1GiB", "--batch", "2"),
    ),
    "bench quality": (
        *("model", "--text", "text.txt", "--context", "16", "--quick", "--host-memory", "1GiB"),
    ),
    "bench io": ("model", "--quick", "--time", "1", "--experts", "2", "--precision", "1"),
    "bench experts": ("model", "--quick", "--time", "1", "--tokens", "1", "--precision", "1"),
    "bench policies": ("trace.npz", "--quick", "--time", "1", "--precision", "1"),
    "bench predictors": ("trace.npz", "--quick", "--time", "1", "--precision", "1"),
    "bench placements": (
        *("trace.npz", "--gpus", "2", "--quick", "--time", "1", "--precision", "1"),
    ),
    "bench layer": ("model", "--quick", "--time", "1", "--tokens", "1", "--precision", "1"),
    "bench ops": ("--quick", "--time", "1", "--tokens", "1", "--precision", "1"),
    "bench training": (
        *("model", "--quick", "--time", "1", "--layers", "1", "--sequences", "1"),
        *("--context", "8", "--precision", "1"),
    ),
    "bench ablation": ("train.toml", "--vary", "run.seed=1", "--quick", "--steps", "1"),
    "bench dispatch": ("--quick", "--time", "1", "--tokens", "8", "--dim", "4", "--precision", "1"),
    "bench compare": ("results.json", "results.json"),
    "bench report": ("results.json",),
    # Nothing listens at that port: what is wrong is said, or that nobody answers.
    "bench serve": ("--url", "http://127.0.0.1:9", "--timeout", "1"),
}
"""Words with which each command works."""

_OUTPUT_OPTIONS = {"--output", "--trace", "--timeline", "--png", "--plot", "--table"}
_OUTPUT_OPTIONS |= {"--csv", "--markdown"}
_OUTPUTS = ("answers.jsonl", "bench.html", "report.html", "new.npz", "new.json")
_RUN_FOLDERS = ("trained", "tuned", "finetuned", "packed")
# Doctor measures the disk with a file of half a gigabyte, and for seconds.
_RARE = {
    "doctor": 0.02,
    "bench kernels": 0.3,
    "bench latency": 0.1,
    "bench throughput": 0.1,
    "bench io": 0.2,
}


@cache
def commands() -> dict[str, list[tuple[str, bool]]]:
    """Every command with its long options, and whether they take a value.

    A new command needs a row in `_SOUND`.
    """
    nodes: dict[str, Any] = {}
    root: Any = get_command(build_app())
    for name, node in root.commands.items():
        inner = getattr(node, "commands", {})
        nodes |= {f"{name} {one}": command for one, command in inner.items()} or {name: node}
    assert nodes.keys() == _SOUND.keys(), "bad_input_words._SOUND lacks a command"
    return {
        name: [
            (option, not getattr(param, "is_flag", False))
            for param in node.params
            for option in param.opts
            if option.startswith("--") and option != "--help"
        ]
        for name, node in nodes.items()
    }


def option(rng: Random, place: Path, good: Path) -> Case:
    """One or two options of any command with odd values."""
    table = commands()
    names = sorted(table)
    command = rng.choices(names, [_RARE.get(name, 1.0) for name in names])[0]
    all_files(place, good)
    words, outputs = [*command.split(), *_SOUND[command]], list(_OUTPUTS)
    options = [(n, v) for n, v in table[command] if n != "--debug"]
    for name, takes_value in rng.sample(options, min(len(options), rng.choice((1, 1, 2)))):
        if name in words:
            at = words.index(name)
            del words[at : at + (2 if takes_value else 1)]
        value = rng.choice(WORDS)
        words += [name, value] if takes_value else [name]
        if name in _OUTPUT_OPTIONS:
            outputs.append(value)
    return Case(words, outputs=outputs, keeps=[*_RUN_FOLDERS, *outputs])


def argument(rng: Random, place: Path, good: Path) -> Case:
    """Odd words where a model or a file belongs, and words too many or too few."""
    all_files(place, good)
    command = rng.choice(sorted(set(_SOUND) - {*_RARE, "simulate layer", "serve"}))
    words = [*command.split(), *_SOUND[command]]
    at = len(command.split())
    way = rng.randrange(4)
    if way == 0 or len(words) == at:
        words.insert(at, rng.choice(WORDS))
    elif way == 1:
        del words[rng.randrange(at, len(words))]
    else:
        words[rng.randrange(at, len(words))] = rng.choice(WORDS)
    return Case(words, outputs=[*_OUTPUTS, *WORDS], keeps=_RUN_FOLDERS)


_CHEAP = (
    ("replay", "trace.npz", "--policy", "lru"),
    ("predictor", "list"),
    ("simulate", "layer", "--ranks", "8", "--json"),
    ("run", "model", "-p", "The", "-n", "2", "--host-memory", "1GiB"),
    ("replay", "no.npz"),
    ("--version",),
    ("run", "--help"),
)
_STREAMS = (
    *('"$@" >&-', '"$@" 2>&-', '"$@" <&-', '"$@" >&- 2>&-', '"$@" <&- >&- 2>&-'),
    *('"$@" >/dev/full', '"$@" 2>/dev/full', '"$@" >/dev/full 2>/dev/full', '"$@" | true'),
    *('"$@" 2>&1 >&- | cat >&2', '{ sleep 0.05; "$@"; } | head -c 1'),
)


def streams(rng: Random, place: Path, good: Path) -> Case:
    """Streams that are closed, full, or read by nobody; real processes."""
    all_files(place, good)
    shell = rng.choice(_STREAMS)
    is_silent = "2>" in shell
    return Case(rng.choice(_CHEAP), shell=shell, lines=(0, 1) if is_silent else (1,))


def ulimit(rng: Random, place: Path, good: Path) -> Case:
    """`ulimit -v` from the start of the process."""
    all_files(place, good)
    kib = rng.choice((100_000, 300_000, 600_000, 1_000_000, 1_500_000, 2_500_000))
    return Case(_CHEAP[3], shell=f'ulimit -v {kib}; exec "$@"')


def early_interrupt(rng: Random, place: Path, good: Path) -> Case:
    """Ctrl-C while a process imports what it needs."""
    all_files(place, good)
    words = rng.choice((_CHEAP[0], _CHEAP[2], _CHEAP[3]))
    return Case(words, shell='exec "$@"', send=(signal.SIGINT, rng.uniform(0.15, 2.5)))


WORD_MAKERS: dict[str, tuple[Maker, int]] = {"option": (option, 24), "argument": (argument, 8)}
"""As `MAKERS`, for the words of the command line."""

PROCESS_MAKERS: dict[str, tuple[Maker, int]] = {
    "streams": (streams, 4),
    "ulimit": (ulimit, 1),
    "early_interrupt": (early_interrupt, 2),
}
"""Kinds that start a process, and so take seconds."""
