"""Writes what was measured on CPUs into kernels/README.md, so that no number is typed by hand.

python benchmarks/kernels_table.py            # rewrite the section
python benchmarks/kernels_table.py --check    # only say whether it is up to date
"""

import json
import sys
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks.harness.scripting import RESULTS, ROOT, parser_of
from moe_runtime.benchmarks.readme_table import OURS, medians_of, table, update
from moe_runtime.config import format_bytes

PAGE = ROOT / "kernels" / "README.md"
BEGIN = "<!-- benchmarks/kernels_table.py: begin -->"
Results = dict[str, Any]


def ops_table(results: Results) -> list[str]:
    """Milliseconds of each op, forward and with its backward pass: `bench ops`."""
    settings = results["settings"]
    letters = zip("EKDF", ("num_experts", "top_k", "dim_model", "dim_hidden"), strict=True)
    shape = ", ".join(f"{letter}={settings[name]}" for letter, name in letters)
    metrics = {
        f"{kind}_{t}_s": f"T = {t}{what}"
        for t in settings["tokens"]
        for kind, what in (("forward", ""), ("backward", ", with backward"))
    }
    rows = [
        [f"`{name}`", *(_ms(found[one]) if one in found else "–" for one in metrics)]
        for name, found in medians_of(results).items()
    ]
    head = f"op, {shape}, {settings['dtype']} (`moe-runtime bench ops`)"
    machine, versions = results["machine"], results["versions"]
    origin = (
        f"{_processor(results)}, {machine['num_cores']} cores, "
        f"{format_bytes(machine['memory_bytes'])}; torch {versions['torch']}, transformers "
        f"{versions['transformers']}; commit {results['commit']}."
    )
    return [*table([head, *metrics.values()], rows), "", origin]


def gpu_table(results: Results) -> list[str]:
    """What is aimed at on a GPU beside what was measured, and a layer of experts, ours and how many
    times as long transformers' `grouped_mm` takes: `kernels.py`."""
    settings, versions, medians = results["settings"], results["versions"], medians_of(results)
    rows = [
        [
            *name.split(": "),
            *(f"{aim[one]:.4g}" for one in ("asked", "measured")),
            "holds" if aim["holds"] else "**missed**",
        ]
        for name, aim in settings["aims"].items()
    ]
    heads = ["aimed at (`benchmarks/kernels.py`)", "figure", "asked", "measured", "verdict"]
    lines = table(heads, rows, "---|---|--:|--:|---")
    layers = []
    for name, shape in settings["shapes"].items():
        ours, peer = (medians[f"{name}, {backend}"] for backend in (OURS, "grouped_mm"))
        layers.append([name])
        for passes, metric in (("forward",) * 2, ("both",) * 2, ("graph", "graph_forward")):
            seconds, theirs, more = ours.get(f"{metric}_s"), peer.get(f"{metric}_s"), ""
            if shape["T"] >= 1024 and passes != "graph":
                more = f", {ours[f'{passes}_tflops']:.0f} TFLOP/s"
            elif passes == "graph" and shape["T"] < 1024 and seconds:
                more = f", reads {ours['graph_read_of_copy']:.0%} of a copy's bandwidth"
            cell = f"{_ratio(seconds, theirs)}{more}" if seconds and theirs else "–"
            layers[-1].append(cell)
    columns = ("forward", "forward, backward", "as a CUDA graph")
    if layers:
        lines += ["", *table(["experts in bf16, × `grouped_mm`", *columns], layers)]
    origin = (
        f"{settings['gpu']}: dense product {settings['dense_tflops']:.0f} TFLOP/s, copy "
        f"{settings['copy_bytes_s'] / 1e9:,.0f} GB/s; torch {versions['torch']}, triton "
        f"{versions['triton']}, transformers {versions['transformers']}; commit "
        f"{results['commit']}."
    )
    return [*lines, "", origin]


def layers_table(files: list[Results]) -> list[str]:
    """Milliseconds of a layer's calls, and how many times as long the best peer takes."""
    tokens, lines = sorted({n for results in files for n in results["settings"]["tokens"]}), []
    for results in files:
        settings, medians = results["settings"], medians_of(results)
        rows: dict[str, dict[int, str]] = {}
        for metric, seconds in medians.pop(OURS).items():
            passes, number, _ = metric.split("_")
            best = min(found[metric] for found in medians.values() if metric in found)
            rows.setdefault(passes, {})[int(number)] = _ratio(seconds, best)
        name, origin = f"{settings['model']}, {settings['dtype']}", _origin(results)
        for passes, cells in rows.items():
            every = (cells.get(number, "–") for number in tokens)
            lines.append([f"{name}, {passes}", origin, *every])
    case = files[0]["case"]
    heads = [f"{case} (`moe-runtime bench {case}`)", "machine", *(f"T = {n}" for n in tokens)]
    note = "× is the ratio of the faster of the peers to ours; – was not measured."
    return [*table(heads, lines, "---|---|" + "|".join(["--:"] * len(tokens))), "", note]


def training_table(files: list[Results]) -> list[str]:
    """Tokens a second of all systems: files of `bench training`."""
    rows = []
    for results in files:
        of, found = results["settings"], medians_of(results)
        what = f"`{of['model']}`, {of['layers']} layers, {of['sequences']} x {of['context']} tokens"
        speeds = (f"`{name}` {one['tokens_per_s']:,.0f}" for name, one in found.items() if one)
        rows.append([f"{what} a step, {of['dtype']}", ", ".join(speeds), _origin(results)])
    heads = ["training (`moe-runtime bench training`)", "tokens/s", "machine"]
    return table(heads, rows, "---|---|---")


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _ratio(seconds: float, theirs: float) -> str:
    return f"{_ms(seconds)}, **{theirs / seconds:.2f}×**"


def _origin(results: Results) -> str:
    """Processor and commit, for a column."""
    return f"{_processor(results)}, {results['commit']}"


def _processor(results: Results) -> str:
    """Its name and the widest instructions that it has."""
    machine, gpu = results["machine"], results["settings"].get("gpu")
    wide = [name for name in machine["cpu_features"] if name.startswith(("avx512", "amx"))]
    features = wide or [name for name in machine["cpu_features"] if name == "avx2"]
    return f"{machine['cpu']} ({', '.join(features)})" + (f" with an {gpu}" if gpu else "")


def section(folder: Path) -> str:
    """The whole section, from the results files of a folder."""

    def read(pattern: str) -> list[Results]:
        return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]

    parts = [*map(gpu_table, read("kernels-*.json")), *map(ops_table, read("bench-ops-*.json"))]
    for case in ("experts", "layer"):
        found = read(f"bench-{case}-*.json")
        parts.append(layers_table([one for one in found if "formats" not in one["settings"]]))
    parts.append(training_table(read("bench-training-*.json")))
    return "\n\n".join("\n".join(part) for part in parts)


def main() -> int:
    """Rewrites or checks the page."""
    options = parser_of(__doc__, "--check=change nothing; exit 1 when stale").parse_args()
    return update(PAGE, BEGIN, section(RESULTS), is_check=options.check)


if __name__ == "__main__":
    sys.exit(main())
