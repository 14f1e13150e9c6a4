"""The size of the project: `python benchmarks/house.py -o FILE [--root CHECKOUT]`.

Counts lines and files by room, words and sentences of the pages, files that `load` walks through,
and Python calls of ours in a decode layer. Another checkout needs its native libraries built.
"""

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from moe_runtime.benchmarks.harness.scripting import ROOT, ScriptResults, option, script
from moe_runtime.benchmarks.suite import Metric
from moe_runtime.lab.this_machine import commit

TOPS = ("moe_runtime", "kernels", "policies", "models", "benchmarks")
SUFFIXES = (".py", ".c", ".h", ".cpp")
LONG = 30
"""Sentences with more words are too long."""
COUNTS = (
    *("lines", "files", "words", "sentences", "words_a_sentence", "files_of_load"),
    *("files_resident", "files_of_a_miss", "calls_resident", "calls_with_misses"),
    "misses",
)
METRICS = {name: Metric("count") for name in COUNTS} | {"long_sentences": Metric("share")}

_WALK = """
import json, sys
from pathlib import Path
import torch, moe_runtime
torch.set_num_threads(1)
root = str(Path(moe_runtime.__file__).resolve().parents[1]) + "/"
tops = tuple(root + top for top in ("moe_runtime/", "kernels/", "policies/", "models/"))
files, known, calls, steps = set(), {}, 0, []

def note(frame, event, arg):
    global calls
    code = frame.f_code
    if event == "call" and "<" not in code.co_name:
        name = code.co_filename
        if name not in known:
            known[name] = name.startswith(tops) or str(Path(name).resolve()).startswith(tops)
        if known[name]:
            files.add(name)
            calls += 1

class Steps:
    def put(self, value):
        steps.append((calls, set(files)))
        files.clear()
    def end(self):
        pass

def load(budget):
    return moe_runtime.load(
        root + "models/pocket", device="cpu", max_tokens=64, host_memory=budget, policy="lru",
        prefetch="off",
    )

def decode(budget):
    model, ids = load(budget), torch.tensor([[1, 2, 3]])
    layers = model.config.num_hidden_layers
    asked = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    model.generate(ids, **asked)
    model.moe.reset_stats()
    sys.setprofile(note)
    model.generate(ids, streamer=Steps(), **asked)
    sys.setprofile(None)
    misses = model.moe.stats().misses / layers / (len(steps) - 1)
    model.moe.close()
    # What is put first is the prompt, then the token that reading it gave.
    each = steps[2:]
    steps.clear()
    mean = (each[-1][0] - each[0][0]) / (len(each) - 1) / layers
    return mean, set.union(*(found for _, found in each[1:])), misses

load("40MiB").moe.close()  # imports
sys.setprofile(note)
loaded = load("40MiB")
sys.setprofile(None)
found = {"files_of_load": len(files)}
loaded.moe.close()
files.clear()
found["calls_resident"], resident, none = decode("40MiB")
assert not none, "the model must be resident"
found["calls_with_misses"], missing, found["misses"] = decode(sys.argv[1])
found |= {"files_resident": len(resident), "files_of_a_miss": len(missing - resident)}
print(json.dumps(found))
"""


def sources(root: Path, tops: tuple[str, ...]) -> Iterator[Path]:
    """Source files tracked by git, relative to the root; links are left out."""
    command = ["git", "ls-files", "-z", "--", *tops]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        path = root / name
        if path.suffix in SUFFIXES and path.is_file() and not path.is_symlink():
            yield Path(name)


def sizes(root: Path) -> dict[str, dict[str, float]]:
    """Lines and files of each room, of the whole product, and of the tests."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"lines": 0, "files": 0})
    for path in sources(root, (*TOPS, "tests")):
        is_room = path.parts[0] == "moe_runtime" and len(path.parts) > 2
        room = "/".join(path.parts[: 1 + is_room])
        for name in {room, "tests" if room == "tests" else "product"}:
            found[name]["lines"] += len((root / path).read_bytes().splitlines())
            found[name]["files"] += 1
    return dict(sorted(found.items()))


def sentences(text: str) -> Iterator[int]:
    """The number of words of each sentence outside code, tables, headings and quotations."""
    for block in re.split(r"\n\s*\n|\n(?=[-*] |\d+\. )", text):
        if block.strip()[:1] not in ("", "|", "#", ">"):
            for sentence in re.split(r"(?<=[.!?:])\s+", " ".join(block.split())):
                if (count := len(re.findall(r"\w[\w'’.,-]*", sentence))) > 2:
                    yield count


def prose(root: Path) -> dict[str, float]:
    """Words of README and docs without code, and the lengths of their sentences."""
    words, lengths = 0, list[int]()
    for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        text = re.sub(r"^```.*?^```|<!--.*?-->", " ", path.read_text(), flags=re.M | re.S)
        text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", text))
        words += len(re.findall(r"[A-Za-z][\w'’-]*", text))
        lengths += sentences(text)
    return {
        "words": words,
        "sentences": len(lengths),
        "words_a_sentence": fmean(lengths),
        "long_sentences": sum(one > LONG for one in lengths) / len(lengths),
    }


def walk(root: Path, budget: str) -> dict[str, float]:
    """Count the files and calls of a checkout's `load` and decode steps, in a new process."""
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _WALK, budget]
    done = subprocess.run(
        command, cwd=root / "tests", env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


@script(
    root=option(ROOT, "another checkout", type=Path),
    budget=option("20MiB", "of the run with misses"),
)
def main(options: Namespace) -> int:
    root = options.root.resolve()
    settings = {"checkout": commit(root), "budget": options.budget}
    results = ScriptResults("house", options, settings, METRICS)
    found = sizes(root) | {"pages": prose(root), "walk": walk(root, options.budget)}
    for name, counts in found.items():
        results.add(name, [counts])
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
