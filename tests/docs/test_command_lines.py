"""The command lines of the pages run, each page's in their order, on a tiny model."""

import io
import shlex
import shutil
import subprocess
from fnmatch import filter as matching
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

import pytest
from command_lines import COMMANDS
from page_blocks import PAGES, command_lines_of

from moe_runtime.benchmarks.suite import Rules
from moe_runtime.cli.main import main
from moe_runtime.lab.traces import read_trace

# What stands for a word of a line.
SMALLER = {
    "./OLMoE-1B-7B": "MODEL",
    "FOLDER": "MODEL",
    "BEFORE.json": "results.json",
    "AFTER.json": "results.json",
    "NAME": "lru",
    "NAME,...": "lru,lfu",
    "N": "4",
    "SIZE": "16MiB",
    "7GiB": "16MiB",
    "6GiB": "64MiB",
    "12GiB": "64MiB",
    "32": "4",
    "40": "8",
    "60": "8",
    "/fast/disk/run": "fast/disk/run",
    "run.steps=4000": "run.steps=9",
    "run.steps=100": "run.steps=1",
    "8,64,512,4096": "8,16",
    "384,4096": "384",
    "256": "16",
}
# Options that end a command soon, where a line has not others.
BRIEFLY = {
    "run": {"--prompt": "Hello", "--max-new-tokens": "4"},
    "chat": {"--max-new-tokens": "4"},
    "generate": {"--max-new-tokens": "4"},
    "simulate layer": {"--ranks": "8"},
    "simulate serve": {"--requests": "20"},
    "finetune": {"--context": "16", "--steps": "1"},
    "bench quality": {"--context": "16", "--chunks": "2"},
    "bench io": {"--time": "1", "--experts": "4"},
    "bench experts": {"--time": "1", "--precision": "0.5", "--tokens": "4"},
    "bench layer": {"--time": "1", "--precision": "0.5", "--tokens": "4"},
    "bench training": {"--time": "1", "--precision": "0.5", "--context": "16"},
    "bench policies": {"--time": "1", "--precision": "0.5"},
    "bench ablation": {"--steps": "1"},
    "bench predictors": {"--time": "1", "--precision": "0.5"},
    "bench placements": {"--time": "1", "--precision": "0.5", "--time-limit": "1"},
}
# Lines that are held against the parser alone.
NOT_RUN = {
    "moe-runtime chat MODEL --device *": "needs a GPU",
    "torchrun *": "several processes: tests/parallel",
    "moe-runtime models remove *": "removes a download: tests/checkpoints/test_hub.py",
    "moe-runtime generate * --ray *": "needs a cluster: tests/integrations",
    "moe-runtime serve *": "serves until it is stopped: tests/serving",
    "moe-runtime bench serve *": "needs a server: tests/serving/test_load_command.py",
    "moe-runtime bench dispatch*": "several processes: tests/bench",
    "moe-runtime bench latency *": "a process for each system: tests/bench",
    "moe-runtime bench throughput *": "a process for each system: tests/bench",
    "moe-runtime predictor teach MODEL*": "needs more tokens than a test decodes: tests/cli",
    "moe-runtime bench kernels*": "needs a GPU: tests/bench/test_product_times.py",
    "moe-runtime bench experts MODEL --tokens *": "takes seconds: tests/bench",
    "moe-runtime bench quality INT4 *": "models are packed first: tests/bench/test_quality.py",
    "moe-runtime bench layer MODEL --tokens *": "takes seconds: tests/bench",
    "moe-runtime bench ops*": "takes seconds: tests/bench/test_op_times.py",
    "moe-runtime bench policies TRACE": "runs with options",
    "moe-runtime bench ablation benchmarks/*": "the text is written first: tests/bench",
    "moe-runtime bench placements": "runs with options",
    "moe-runtime bench experts --shape *": "shapes of gigabytes",
    "moe-runtime bench training --shape small *": "hundreds of megabytes",
    "moe-runtime bench training *--peer *": "DeepSpeed is not installed: tests/bench",
    "moe-runtime bench policies TRACE --golden *": "rows of a trace that is kept elsewhere",
}
# Options whose file a line writes: it must be there afterwards, and made by this line.
OUTPUTS = ("-o", "--output", "--trace")
LINES = [(page, line) for page in PAGES for line in command_lines_of(page)]


def is_only_parsed(line: str) -> bool:
    return any(fnmatchcase(line, pattern) for pattern in NOT_RUN)


def small_words(line: str) -> list[str]:
    """The words of a line after the program's name, as `main` takes them."""
    words = [SMALLER.get(word, word) for word in shlex.split(line.split(" | ")[0])[1:]]
    name = next(name for name in COMMANDS if words[: len(name.split())] == name.split())
    aliases = {word: param.opts for param in COMMANDS[name].params for word in param.opts}
    for option, value in BRIEFLY.get(name, {}).items():
        known = (option, *aliases[option])
        if not any(word.startswith(option) or word in known for word in words):
            words += [option, value]
    return words


def lines_to_run() -> dict[Path, list[str]]:
    """Pages with their lines, without any that a page before it has, once it is made small."""
    found: dict[Path, list[str]] = {}
    known = set()
    for page, line in LINES:
        if not is_only_parsed(line):
            words = line if line.startswith("printf ") else tuple(small_words(line))
            if words not in known:
                known.add(words)
                found.setdefault(page, []).append(line)
    return found


TO_RUN = lines_to_run()


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("page", TO_RUN, ids=lambda page: page.stem)
def test_the_command_lines_of_a_page_run(page, monkeypatch, capsys):
    monkeypatch.setitem(Rules.__init__.__kwdefaults__, "most", 2)  # rounds of a measurement
    for line in TO_RUN[page]:
        if line.startswith("printf "):
            subprocess.run(["sh", "-c", line], check=True)
        else:
            words = small_words(line)
            if "--resume" not in words:
                for folder in ("OUT", "out", "finetuned"):
                    shutil.rmtree(folder, ignore_errors=True)
            outputs = [Path(path) for option, path in pairwise(words) if option in OUTPUTS]
            for file in filter(Path.is_file, outputs):
                file.unlink()
            monkeypatch.setattr("sys.stdin", io.StringIO("A question\n"))
            assert main(words) == 0, (line, words, capsys.readouterr().err)
            assert [path for path in outputs if not path.exists()] == [], line
    if page.name == "prediction.md":  # whose lines read what its first ones recorded
        assert len(set(read_trace(Path("trace.npz")).token_request.tolist())) == 5


def test_the_tables_have_no_row_in_vain():
    lines = [line for _, line in LINES]
    assert [one for one in NOT_RUN if not matching(lines, one)] == []
    run = [line for line in lines if not is_only_parsed(line)]
    assert SMALLER.keys() <= {word for line in run for word in shlex.split(line)}
    assert [name for name in BRIEFLY if not matching(run, f"moe-runtime {name}*")] == []
