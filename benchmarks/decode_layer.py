"""What a decode step of the pocket model costs in Python, with every expert resident.

`python benchmarks/decode_layer.py` counts the Python functions of this project that one layer of
one token enters, and the files they lie in, and times the step. `--against PYTHON` times another
version as well, in turn with this one: PYTHON is the interpreter of the environment that has it.
`--model FOLDER` times another checkpoint. `--save` writes the numbers to the results folder, or to
the file that it names.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from harness.decode_step import STEPS, decode, load_resident, step_seconds
from harness.machine import commit, describe_machine, machine_name, versions

import moe_runtime
from moe_runtime.files import write_text
from moe_runtime.models.pocket import pocket_path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = str(Path(moe_runtime.__file__).parent)
STEP = ROOT / "benchmarks" / "harness" / "decode_step.py"
LAYER = 2
"""The layer whose calls are counted: neither the first nor the last."""


def main() -> None:
    """Counts, times, prints and saves."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    model = load_resident(arguments.model, arguments.host_memory, arguments.steps)
    with model.moe:
        calls = layer_calls(model)
        runs = [step_seconds(model, arguments.steps) for _ in range(arguments.runs)]
    row = {
        "calls_per_layer": calls.total(),
        "files_per_layer": len({file for file, _ in calls}),
        "step_us": round(1e6 * statistics.median(runs), 1),
        "step_us_of_runs": [round(1e6 * seconds, 1) for seconds in runs],
    }
    if arguments.verbose:
        for (file, name), number in calls.most_common():
            print(f"{number:4}  {file}  {name}")
    print(
        f"{row['calls_per_layer']} Python calls of ours in {row['files_per_layer']} files for a "
        f"layer of a token; {row['step_us']:.0f} us for a step ({arguments.threads} threads)"
    )
    if arguments.against is not None:
        row["against"] = compare(arguments)
    if arguments.save is not None:
        save(arguments, row, calls)


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Quickest steps (microseconds) of the other version and of this one, each in a process.

    They run in turn; the ratio is the median over the pairs of other / this.
    """
    where = "import moe_runtime; print(moe_runtime.__file__)"
    package = subprocess.check_output([arguments.against, "-P", "-c", where], text=True).strip()
    pairs = []
    for number in range(arguments.pairs):
        pair = [_time_step(python, arguments) for python in (arguments.against, sys.executable)]
        pairs.append(pair)
        print(f"pair {number + 1}: {pair[0]:.0f} us before, {pair[1]:.0f} us now", flush=True)
    ratio = statistics.median(other / this for other, this in pairs)
    print(f"{ratio:.2f} x as fast as before (median of {len(pairs)} pairs)")
    return {"commit": commit(Path(package).parent), "pairs_us": pairs, "ratio": round(ratio, 3)}


def _time_step(python: str, arguments: argparse.Namespace) -> float:
    command = [python, "-P", str(STEP), str(arguments.model), "--threads", str(arguments.threads)]
    command += ["--steps", str(arguments.steps), "--runs", str(arguments.runs)]
    command += ["--host-memory", arguments.host_memory]
    return float(subprocess.check_output(command, text=True))


def save(arguments: argparse.Namespace, row: dict[str, Any], calls: Counter[Any]) -> None:
    """Writes the results file."""
    machine = describe_machine()
    model = "pocket" if arguments.model == pocket_path() else Path(arguments.model).name
    of_model = "" if model == "pocket" else f"{model}-"
    name = f"decode-layer-{of_model}{machine_name(machine)}.json"
    output = arguments.save if arguments.save.name else ROOT / "benchmarks" / "results" / name
    chosen = "" if model == "pocket" else f" --model {model} --host-memory {arguments.host_memory}"
    against = "" if arguments.against is None else " --against BEFORE"
    results = {
        "command": f"python benchmarks/decode_layer.py --threads {arguments.threads}{chosen}"
        f"{against} --save",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(ROOT),
        "machine": machine,
        "versions": versions(),
        "settings": {"model": model, "threads": arguments.threads, "steps": arguments.steps},
        "row": row,
        "calls": [[file, name, number] for (file, name), number in calls.most_common()],
    }
    write_text(output, json.dumps(results, indent=1) + "\n")
    print(f"wrote {output}")


def layer_calls(model: Any) -> Counter[tuple[str, str]]:
    """Functions of this project that one layer enters in a decode step, by file and name.

    A generator counts every time it goes on. The layer comes after many steps, in which the
    modules have prepared what they prepare once.
    """
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            calls[str(Path(file).relative_to(PACKAGE)), frame.f_code.co_qualname] += 1

    def begin(*_: Any) -> None:
        calls.clear()  # only the last step counts
        sys.setprofile(note)

    layer = model.model.layers[LAYER]
    hooks = [
        layer.register_forward_pre_hook(begin),
        layer.register_forward_hook(lambda *_: sys.setprofile(None)),
    ]
    decode(model, 4)
    for hook in hooks:
        hook.remove()
    return calls


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=pocket_path())
    parser.add_argument("--host-memory", default="1GiB", help="all experts must fit")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--against", metavar="PYTHON", help="time this interpreter's version too")
    parser.add_argument("--pairs", type=int, default=7, help="of the two versions, in turn")
    parser.add_argument("--verbose", action="store_true", help="name every function")
    parser.add_argument("--save", type=Path, nargs="?", const=Path(), help="write the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
