"""Layers on machines that one need not have: `python benchmarks/scaling_predictions.py`.

Predicts one layer of Mixtral's shape on 8 to 4096 ranks, flat and in two levels, in chunks, with
equal and skewed loads, several placements, replicas and a straggler, on the machines of
benchmarks/machines and on the assumed one. Numbers are the simulator's; how far it is from measured
layers is what `benchmarks/scaling.py` says.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from harness.machine import commit, versions

from moe_runtime.cli.commands.simulate import plain_numbers
from moe_runtime.files import write_atomically, write_text
from moe_runtime.lab.simulate.machine_file import ASSUMED, read_machine
from moe_runtime.lab.simulate.scaling import Imbalance, SimulatedLayer, sweep_scaling

LARGEST_SKEWED = 512
HERE = Path(__file__).parent


def predict(ranks: list[int], degrees: list[int]) -> list[dict[str, Any]]:
    """Layers on machines described by files: exchanges, chunks, placements, stragglers."""
    shape = SimulatedLayer()
    variants = {
        "equal loads": Imbalance(),
        "Zipf(0.5), round-robin": Imbalance(zipf=0.5),
        "Zipf(0.5), greedy": Imbalance(zipf=0.5, algorithm="greedy"),
        "Zipf(0.5), eplb, 1 replica a rank": Imbalance(
            zipf=0.5, algorithm="eplb", replicas_per_rank=1
        ),
        "one rank 1.3 x slower": Imbalance(straggler=1.3),
    }
    found = []
    machines = {
        path.stem: read_machine(path) for path in sorted((HERE / "machines").glob("*.toml"))
    }
    for machine, cluster in {"assumed": ASSUMED, **machines}.items():
        for name, imbalance in variants.items():
            few = [size for size in ranks if size <= LARGEST_SKEWED]
            # Thousands of ranks take minutes: for them, equal loads in few chunks.
            many = [] if imbalance != Imbalance() else [s for s in ranks if s > LARGEST_SKEWED]
            for point in itertools.chain(
                sweep_scaling(cluster, shape, imbalance, ranks=few, degrees=degrees),
                sweep_scaling(cluster, shape, imbalance, ranks=many, degrees=degrees[:2]),
            ):
                found.append(
                    {
                        "machine": machine,
                        "loads": name,
                        "ranks": point.num_ranks,
                        "hierarchical": point.hierarchical,
                        "degree": point.degree,
                        "layer_s": point.prediction.layer_s,
                        "exposed_s": point.prediction.exposed_s,
                        "exposed_ratio": point.exposed_ratio,
                    }
                )
    return found


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Layer time over ranks of each machine: the best degree, by exchange and by loads."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    machines = list(dict.fromkeys(row["machine"] for row in found))
    figure, axes = pyplot.subplots(
        1, len(machines), figsize=(5.5 * len(machines), 4), sharey=True, squeeze=False
    )
    for column, machine in enumerate(machines):
        mine = [row for row in found if row["machine"] == machine]
        for number, loads in enumerate(dict.fromkeys(row["loads"] for row in mine)):
            for hierarchical, style in ((False, "--"), (True, "-")):
                best: dict[int, float] = {}
                for row in mine:
                    if row["loads"] == loads and row["hierarchical"] == hierarchical:
                        ranks = row["ranks"]
                        best[ranks] = min(row["layer_s"], best.get(ranks, float("inf")))
                name = f"{loads}, {'two levels' if hierarchical else 'flat'}"
                times = [1e3 * seconds for seconds in best.values()]
                axes[0, column].plot(
                    list(best),
                    times,
                    style,
                    color=f"C{number}",
                    marker="o",
                    markersize=4,
                    label=name,
                )
        axes[0, column].set(xscale="log", yscale="log", xlabel="ranks", title=machine)
        plain_numbers(axes[0, column], sorted({row["ranks"] for row in mine}))
    axes[0, 0].set_ylabel("layer time at the best degree (ms)")
    axes[0, -1].legend(fontsize=6, handlelength=3.5)
    figure.tight_layout()
    with write_atomically(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix(".") or None, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--plot", type=Path, help="draw layer time over ranks (.png, .svg, .pdf)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "scaling-predicted.json")
    options = parser.parse_args()
    found = predict(options.ranks, options.degrees)
    report = {"versions": versions(), "commit": commit(HERE), "predicted": found}
    write_text(options.output, json.dumps(report, indent=1) + "\n")
    print(f"wrote {options.output}")
    if options.plot:
        draw(found, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
