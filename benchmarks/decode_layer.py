"""What a decode step of the pocket model costs in Python, with every expert resident.

`python benchmarks/decode_layer.py` counts the Python functions of this project that one layer of
one token enters, and the files they lie in, and times the step. `--save` writes the numbers to the
results folder, or to the file that it names.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
from harness.machine import commit, describe_machine, machine_name, versions

import moe_runtime
from moe_runtime.files import write_text
from moe_runtime.models.pocket import pocket_path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = str(Path(moe_runtime.__file__).parent)
PROMPT_TOKENS = 16
STEPS = 200
LAYER = 2
"""The layer whose calls are counted: neither the first nor the last."""


def main() -> None:
    """Counts, times, prints and saves."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    model = load_resident()
    calls = layer_calls(model)
    runs = [step_seconds(model) for _ in range(arguments.runs)]
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
    if arguments.save is None:
        return
    machine = describe_machine()
    name = f"decode-layer-{machine_name(machine)}.json"
    output = arguments.save if arguments.save.name else ROOT / "benchmarks" / "results" / name
    results = {
        "command": f"python benchmarks/decode_layer.py --threads {arguments.threads} --save",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(ROOT),
        "machine": machine,
        "versions": versions(),
        "settings": {"model": "pocket", "threads": arguments.threads, "steps": STEPS},
        "row": row,
        "calls": [[file, name, number] for (file, name), number in calls.most_common()],
    }
    write_text(output, json.dumps(results, indent=1) + "\n")
    print(f"wrote {output}")


def load_resident() -> Any:
    """The pocket model after a run that has read all the experts which the counted steps visit."""
    model = moe_runtime.load(pocket_path(), device="cpu", host_memory="1GiB", max_tokens=512)
    decode(model, STEPS)
    before = cast(Any, model).moe.stats().misses
    decode(model, STEPS)
    assert cast(Any, model).moe.stats().misses == before, "not all experts are resident"
    return model


@torch.inference_mode()
def decode(model: Any, num_steps: int) -> list[float]:
    """Decodes given tokens after a given prompt; returns the seconds of each step."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, PROMPT_TOKENS + num_steps)
    tokens = torch.randint(model.config.vocab_size, shape, generator=generator)
    cache = model(tokens[:, :PROMPT_TOKENS], use_cache=True).past_key_values
    seconds = []
    for place in range(PROMPT_TOKENS, tokens.shape[1]):
        begin = time.perf_counter()
        model(tokens[:, place : place + 1], past_key_values=cache, use_cache=True)
        seconds.append(time.perf_counter() - begin)
    return seconds


def step_seconds(model: Any) -> float:
    """The quickest of many steps: what other programs on the machine take is not counted."""
    return min(decode(model, STEPS))


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
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--runs", type=int, default=5, help=f"runs of {STEPS} steps each")
    parser.add_argument("--verbose", action="store_true", help="name every function")
    parser.add_argument("--save", type=Path, nargs="?", const=Path(), help="write the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
