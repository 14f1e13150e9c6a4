"""Misses on the CPU, copied, or both: `python benchmarks/hybrid.py --trace TRACE`.

A model on a device with slots for a part of its experts lacks some in every layer of a step. They
are copied over a link (`--link`, GB/s) and stay, as LRU decides; or the CPU computes them where
they lie; or the plan that `load(misses="auto")` makes says who does what, with and without one
expert divided by columns between the two (HeteGen). Recorded routing is replayed in virtual time:
the CPU's times are measured here by the native kernels with experts that come from memory, one
sample a call; the link's and the device's are computed from their speeds. Not in it: the other
layers of the model, and what copies take of the memory's speed while the CPU computes. Without
`--trace` the routing of the pocket model is recorded first.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.hybrid_replay import HOW, Machine, Replay
from harness.machine import commit, describe_machine, machine_name, versions
from quantized import FORMATS, SHAPES, Shape, make_experts
from told_policies import record

from moe_runtime.files import write_text
from moe_runtime.kernels.expert_mlp import expert_ffn
from moe_runtime.lab.traces.readers import read_any_trace
from moe_runtime.lab.traces.routes import routes_of, without_repeats

RESULTS = Path(__file__).parent / "results"
ALL_SHAPES = {"olmoe-1b-7b": Shape(64, 8, 2048, 1024), **SHAPES}
LATENCY_S = 1e-5
"""Of a copy, and of a product on the device."""
ASKED = {
    "error": "at most 0.15: step time against the plan's prediction, median over steps",
    "of_the_better": "at least 0.97 everywhere, and at least 1.3 at 25 % of the experts",
}


def main() -> None:
    arguments = _arguments()
    facts, head = describe_machine(), commit(Path(__file__).parent.parent)
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.trace or record(Path(folder) / "trace.npz")
        trace = read_any_trace(path)
    routes = without_repeats(routes_of(trace))
    num_experts, steps = trace.signature.num_experts, arguments.warm + arguments.steps
    spans = [routes.tokens_of(sequence) for sequence in range(routes.num_sequences)]
    whole = [routes.expert_ids[s][-steps:] for s in spans if s.stop - s.start >= steps]
    order = np.random.default_rng(0).permutation(len(whole))
    rows: list[dict[str, Any]] = []
    most = max(arguments.sequences)
    if most > len(whole):
        raise SystemExit(f"{most} sequences of {steps} tokens were asked for; {len(whole)} found")
    for name in arguments.shapes:
        for kind in arguments.formats:
            machine, measured = measure(ALL_SHAPES[name], kind, most, arguments)
            print(f"{name} {kind}: {measured}", flush=True)
            for count in arguments.sequences:
                paths_NTLK = np.stack([whole[index] for index in order[:count]])
                for capacity in arguments.capacities:
                    row = {"shape": name, "format": kind, "sequences": count, "resident": capacity}
                    row |= measured | replay(paths_NTLK, machine, num_experts, capacity, arguments)
                    rows.append(row)
                    print(_line(row), flush=True)
    if arguments.save:
        report = {
            "subject": "milliseconds of all experts of a decode step, in virtual time",
            "command": "python benchmarks/hybrid.py --trace TRACE --save",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": head,
            "machine": facts,
            "versions": versions(),
            "trace": arguments.trace.parent.name if arguments.trace else "pocket, recorded here",
            "link_gb_per_s": arguments.link,
            "device_gb_per_s": arguments.device,
            "steps": arguments.steps,
            "asked": ASKED,
            "rows": rows,
        }
        output = RESULTS / f"hybrid-{machine_name(facts)}.json"
        write_text(output, json.dumps(report, indent=1) + "\n")
        print(f"written to {output.name}")


def measure(
    shape: Shape, kind: str, most_rows: int, arguments: argparse.Namespace
) -> tuple[Machine, dict[str, float]]:
    """Seconds of one expert here, for up to so many rows, every call with another expert."""
    experts = make_experts(shape, FORMATS[kind], 1 << 30)
    parts = experts[0].gate, experts[0].up, experts[0].down
    num_bytes = sum(part.nbytes for part in parts if part is not None)
    samples: dict[int, list[float]] = {}
    calls = 0
    for rows in range(1, most_rows + 1):
        x_TD = torch.randn(rows, shape.dim_model).bfloat16()
        y_TD, places, samples[rows] = torch.empty_like(x_TD), [*range(rows)], []
        for call in range(arguments.samples + 4):
            calls += 1
            expert, begun_s = experts[calls % len(experts)], time.perf_counter()
            expert_ffn(x_TD, [expert], [rows], places, places, y_TD, activation="silu")
            if call >= 4:
                samples[rows].append(time.perf_counter() - begun_s)
    machine = Machine(
        cpu_s=samples,
        copy_s=num_bytes / (1e9 * arguments.link) + LATENCY_S,
        product_s=num_bytes / (1e9 * arguments.device) + LATENCY_S,
    )
    cpu_ms = {f"cpu_ms_{rows}": 1e3 * float(np.median(samples[rows])) for rows in {1, most_rows}}
    measured = {"expert_mb": num_bytes / 1e6, "copy_ms": 1e3 * machine.copy_s, **cpu_ms}
    return machine, {key: round(value, 3) for key, value in measured.items()}


def replay(
    paths_NTLK: np.ndarray,
    machine: Machine,
    num_experts: int,
    capacity: float,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """What every way takes, and the figures that were asked for."""
    found, row = {}, {}
    for how in HOW:
        layers = Replay(machine, max(1, round(capacity * num_experts)), num_experts, how)
        layers.start(paths_NTLK[:, : arguments.warm])
        found[how] = layers.run(paths_NTLK[:, arguments.warm :])
    misses = {h: round((o.copied + o.computed) / len(o.spent_s), 2) for h, o in found.items()}
    better_s = min(found[how].step_s for how in HOW[:2])
    for how in HOW[2:]:
        row[how] = {
            "of_the_better": round(better_s / found[how].step_s, 3),
            "error": round(found[how].error, 3),
            "computed": round(found[how].computed / len(found[how].spent_s), 2),
        }
    step_ms = {how: round(1e3 * outcome.step_s, 3) for how, outcome in found.items()}
    return {"step_ms": step_ms, "misses_a_step": misses, **row}


def _line(row: dict[str, Any]) -> str:
    times = "  ".join(f"{how} {row['step_ms'][how]:.1f}" for how in HOW)
    figures = "  ".join(
        f"{row[how]['of_the_better']:.2f} x ({row[how]['error']:.0%})" for how in HOW[2:]
    )
    return f"  {row['sequences']} sequences, {row['resident']:.0%}: {times} ms; {figures}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="a recorded trace")
    parser.add_argument(
        "--shapes", nargs="+", choices=ALL_SHAPES, default=["olmoe-1b-7b", "gpt-oss-20b"]
    )
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bf16", "mxfp4"])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--capacities", type=float, nargs="+", default=[0.1, 0.25, 0.5])
    parser.add_argument("--warm", type=int, default=60, help="tokens that fill the slots")
    parser.add_argument("--steps", type=int, default=300, help="tokens each sequence decodes")
    parser.add_argument(
        "--samples", type=int, default=40, help="measured calls for each number of rows"
    )
    parser.add_argument("--link", type=float, default=16.0, help="GB/s to the device")
    parser.add_argument("--device", type=float, default=1000.0, help="GB/s of the device's memory")
    parser.add_argument("--save", action="store_true", help="write this machine's results file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
