"""Writes what was measured on CPUs into kernels/README.md, so that no number is typed by hand.

python benchmarks/kernels_table.py            # rewrite the section
python benchmarks/kernels_table.py --check    # only say whether it is up to date
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks.readme_table import ROOT, replaced
from moe_runtime.config import format_bytes
from moe_runtime.files import write_text

PAGE = ROOT / "kernels" / "README.md"
BEGIN, END = "<!-- benchmarks/kernels_table.py: begin -->", "<!-- end -->"
OURS = "moe_runtime"
Results = dict[str, Any]
Medians = dict[str, dict[str, float]]


def ops_table(results: Results) -> list[str]:
    """Milliseconds of each op, forward and with its backward pass: `bench ops`."""
    settings = results["settings"]
    letters = zip("EKDF", ("num_experts", "top_k", "dim_model", "dim_hidden"), strict=True)
    shape = ", ".join(f"{letter}={settings[name]}" for letter, name in letters)
    kinds = {"forward": "", "backward": ", with backward"}
    metrics = {
        f"{kind}_{t}_s": f"T = {t}{what}"
        for t in settings["tokens"]
        for kind, what in kinds.items()
    }
    head = f"op, {shape}, {settings['dtype']} (`moe-runtime bench ops`)"
    lines = [f"| {head} | {' | '.join(metrics.values())} |", "|---|" + "--:|" * len(metrics)]
    for one in results["measurements"]:
        found = [one["summary"].get(metric) for metric in metrics]
        cells = ["–" if it is None else f"{_number(it['median'] * 1e3)} ms" for it in found]
        lines.append(f"| `{one['system']}` | {' | '.join(cells)} |")
    return [*lines, "", _machine_line(results)]


def gpu_table(results: Results) -> list[str]:
    """What is aimed at on a GPU beside what was measured: `kernels.py`."""
    lines = [
        "| aimed at (`benchmarks/kernels.py`) | figure | asked | measured | verdict |",
        "|---|---|--:|--:|---|",
    ]
    settings, versions = results["settings"], results["versions"]
    for name, aim in settings["aims"].items():
        lines.append(
            f"| {name.replace(': ', ' | ')} | {aim['asked']:.4g} | {aim['measured']:.4g} | "
            f"{'holds' if aim['holds'] else '**missed**'} |"
        )
    lines += (
        ["", *_shapes_table(settings["shapes"], _medians(results))] if settings["shapes"] else []
    )
    speeds = (
        f"dense product {settings['dense_tflops']:.0f} TFLOP/s, copy "
        f"{settings['copy_bytes_s'] / 1e9:,.0f} GB/s"
    )
    return [
        *lines,
        "",
        f"{settings['gpu']}: {speeds}; torch {versions['torch']}, triton {versions['triton']}, "
        f"transformers {versions['transformers']}; commit {results['commit']}.",
    ]


def _shapes_table(shapes: Results, medians: Medians) -> list[str]:
    """A layer of experts, ours and how many times as long transformers' `grouped_mm` takes."""
    lines = [
        "| experts in bf16, × `grouped_mm` | forward | forward, backward | as a CUDA graph |",
        "|---|--:|--:|--:|",
    ]
    for name, shape in shapes.items():
        ours, peer = (medians[f"{name}, {backend}"] for backend in (OURS, "grouped_mm"))
        cells = [name]
        for passes, what in (("forward", "forward"), ("both", "both"), ("graph", "graph_forward")):
            if f"{what}_s" not in ours or f"{what}_s" not in peer:
                cells.append("–")
                continue
            seconds, ratio = ours[f"{what}_s"], peer[f"{what}_s"]
            cell = f"{_number(seconds * 1e3)} ms, **{ratio / seconds:.2f}×**"
            if shape["T"] >= 1024 and passes != "graph":
                cell += f", {ours[f'{passes}_tflops']:.0f} TFLOP/s"
            elif passes == "graph" and shape["T"] < 1024:
                cell += f", reads {ours['graph_read_of_copy']:.0%} of a copy's bandwidth"
            cells.append(cell)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def layers_table(files: list[Results]) -> list[str]:
    """Milliseconds of a layer's calls, and how many times as long the best peer takes."""
    case = files[0]["case"]
    tokens = sorted({number for results in files for number in results["settings"]["tokens"]})
    columns = " | ".join(f"T = {number}" for number in tokens)
    lines = [
        f"| {case} (`moe-runtime bench {case}`) | machine | {columns} |",
        "|---|---|" + "--:|" * len(tokens),
    ]
    for results in files:
        settings, medians = results["settings"], _medians(results)
        rows: dict[str, dict[int, str]] = {}
        for metric, seconds in medians.pop(OURS).items():
            passes, number, _ = metric.split("_")
            best = min(found[metric] for found in medians.values() if metric in found)
            cell = f"{_number(seconds * 1e3)} ms, **{best / seconds:.2f}×**"
            rows.setdefault(passes, {})[int(number)] = cell
        lines += (
            f"| {settings['model']}, {settings['dtype']}, {passes} | {_origin(results)} | "
            f"{' | '.join(cells.get(number, '–') for number in tokens)} |"
            for passes, cells in rows.items()
        )
    return [*lines, "", "× is the ratio of the faster of the peers to ours; – was not measured."]


def training_table(files: list[Results]) -> list[str]:
    """Tokens a second of all systems: files of `bench training`."""
    lines = ["| training (`moe-runtime bench training`) | tokens/s | machine |", "|---|---|---|"]
    for results in files:
        settings = results["settings"]
        found = {
            one["system"]: f"{one['summary']['tokens_per_s']['median']:,.0f}"
            for one in results["measurements"]
            if one["summary"]
        }
        lines.append(
            f"| `{settings['model']}`, {settings['layers']} layers, {settings['sequences']} x "
            f"{settings['context']} tokens a step, {settings['dtype']} | "
            f"{', '.join(f'`{name}` {speed}' for name, speed in found.items())} | "
            f"{_origin(results)} |"
        )
    return lines


def _medians(results: Results) -> Medians:
    return {
        one["system"]: {metric: found["median"] for metric, found in one["summary"].items()}
        for one in results["measurements"]
    }


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _origin(results: Results) -> str:
    """Processor and commit, for a column."""
    return f"{_processor(results)}, {results['commit']}"


def _machine_line(results: Results) -> str:
    machine = results["machine"]
    return (
        f"{_processor(results)}, {machine['num_cores']} cores, "
        f"{format_bytes(machine['memory_bytes'])}; torch {results['versions']['torch']}, "
        f"transformers {results['versions']['transformers']}; commit {results['commit']}."
    )


def _processor(results: Results) -> str:
    """Its name and the widest instructions that it has."""
    machine = results["machine"]
    wide = [name for name in machine["cpu_features"] if name.startswith(("avx512", "amx"))]
    features = wide or [name for name in machine["cpu_features"] if name == "avx2"]
    gpu = results["settings"].get("gpu")
    return f"{machine['cpu']} ({', '.join(features)})" + (f" with an {gpu}" if gpu else "")


def section(folder: Path) -> str:
    """The whole section, from the results files of a folder."""
    parts = [gpu_table(_read(path)) for path in sorted(folder.glob("kernels-*.json"))]
    parts += [ops_table(_read(path)) for path in sorted(folder.glob("bench-ops-*.json"))]
    for case in ("experts", "layer"):
        found = map(_read, sorted(folder.glob(f"bench-{case}-*.json")))
        parts.append(layers_table([one for one in found if "formats" not in one["settings"]]))
    parts.append(training_table([*map(_read, sorted(folder.glob("bench-training-*.json")))]))
    return "\n\n".join("\n".join(part) for part in parts)


def _read(path: Path) -> Results:
    return json.loads(path.read_text())


def main() -> int:
    """Rewrites or checks the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when stale")
    options = parser.parse_args()
    page = PAGE.read_text()
    wanted = replaced(page, BEGIN, END, section(ROOT / "benchmarks/results"))
    if options.check:
        return int(wanted != page)
    write_text(PAGE, wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
