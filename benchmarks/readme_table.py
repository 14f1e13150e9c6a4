"""Writes the tables of README.md and kernels/README.md, so that no number is typed by hand.

python benchmarks/readme_table.py --measure   # README's: half an hour, 28 GB of disk, root for caps
python benchmarks/readme_table.py             # rewrite them from the newest results
python benchmarks/readme_table.py --check     # only say whether they are up to date
"""

import json
import shlex
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks.harness.scripting import (
    RESULTS,
    ROOT,
    machine_name,
    option,
    script,
)
from moe_runtime.config import format_bytes
from moe_runtime.files import write_text
from moe_runtime.lab.this_machine import describe_machine

README, KERNELS = ROOT / "README.md", ROOT / "kernels" / "README.md"
BEGIN, END = "<!-- benchmarks/readme_table.py: begin -->", "<!-- end -->"
OURS = "moe_runtime"
SHAPE = "olmoe-1b-7b"
CAPS = {None: ("transformers:grouped_mm", "llama_cpp"), "7GiB": ("llama_cpp",)}
"""The peers measured under each cap."""
OPTIONS = (
    *("--device", "cpu", "--prompt-tokens", "256", "-n", "9", "--time", "1500", "--keep-shape"),
)
Results = dict[str, Any]


def measure(caps: list[str | None]) -> int:
    """Run `moe-runtime bench latency` for each cap; return the worst exit code."""
    worst = 0
    for cap in caps:
        words = [one for peer in CAPS[cap] for one in ("--peer", peer)]
        words += ["--cap", cap] if cap else []
        name = f"latency-{SHAPE}-{cap or 'none'}-{machine_name(describe_machine())}.json"
        command = ["bench", "latency", "--shape", SHAPE, *words, *OPTIONS]
        command += ["-o", str((RESULTS / name).relative_to(ROOT))]
        print(shlex.join(["moe-runtime", *command]), flush=True)
        program = Path(sys.executable).with_name("moe-runtime")
        worst = max(worst, subprocess.run([program, *command], cwd=ROOT).returncode)
    return worst


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], aligned: str = "") -> list[str]:
    """The lines of a Markdown table; by default all columns but the first are numbers."""
    aligned = aligned or "|".join(["---", *["--:"] * (len(heads) - 1)])
    cells = [f"| {' | '.join(one)} |" for one in (heads, *rows)]
    return [cells[0], f"|{aligned}|", *cells[1:]]


def medians_of(results: Results) -> dict[str, dict[str, float]]:
    return {
        one["system"]: {metric: found["median"] for metric, found in one["summary"].items()}
        for one in results["measurements"]
    }


def table_of(found: list[Results]) -> str:
    """The README's table from results of `bench latency` under different caps."""
    found = sorted(found, key=lambda one: -(one["settings"]["cap_bytes"] or sys.maxsize))
    of_caps = [{one["system"]: one for one in each["measurements"]} for each in found]
    peers = [name for name in dict.fromkeys(n for rows in of_caps for n in rows) if name != OURS]
    lines = []
    for each, systems in zip(found, of_caps, strict=True):
        medians = medians_of(each)
        rates = [  # tokens per second between the first and the last
            f"{1 / medians[name]['between_tokens_s']:.3g}"
            if name in systems and systems[name]["repetitions"]
            else "–"
            for name in (OURS, *peers)
        ]
        first_s, *before_s = (medians[OURS][one] for one in ("first_token_s", "load_s", "import_s"))
        prompt = statistics.mean(each["settings"]["prompt_tokens"]) / first_s
        cells = [_memory(each), f"**{rates[0]}**", *rates[1:]]
        lines.append([*cells, f"{first_s + sum(before_s):.0f} s", f"{prompt:.3g}"])
    settings, machine = found[0]["settings"], found[0]["machine"]
    stopped = "".join(
        f"; the row of {_memory(each)} was interrupted after {_counts([each])}"
        for each in found
        if each["ended"] == "interrupted"
    )
    commits = sorted({each["commit"][:12] for each in found})
    head = (
        f"Decoded tokens per second, `{settings['model']}` shape in bf16, "
        f"{settings['prompt_tokens'][0]} prompt tokens; first token (from the start of the "
        "process) and prompt speed (tokens/s) are ours:"
    )
    foot = (
        f"{machine['cpu']}, {settings['num_threads']} threads, "
        f"{format_bytes(machine['memory_bytes'])}, no GPU; whole process capped, page cache "
        f"included; systems in turn, medians of {_counts(found)}{stopped}; "
        f"{max(each['date'] for each in found)[:10]}, commit {', '.join(commits)}. "
        "Made by `python benchmarks/readme_table.py --measure`."
    )
    heads = ["memory", "moe-runtime", *peers, "first token", "prompt"]
    return "\n".join([head, "", *table(heads, lines), "", foot])


def _counts(found: list[Results]) -> str:
    """The number of repetitions of the systems that have any."""
    counts = {len(one["repetitions"]) for each in found for one in each["measurements"]} - {0}
    shown = " to ".join(map(str, sorted({min(counts), max(counts)})))
    return f"{shown} repetitions"


def _memory(results: Results) -> str:
    cap = results["settings"]["cap_bytes"]
    return "all of it" if cap is None else f"{cap / 2**30:.0f} GiB"


def newest_results() -> list[Results]:
    """The files of the machine measured last."""
    found = [json.loads(file.read_text()) for file in RESULTS.glob(f"latency-{SHAPE}-*.json")]
    newest = max(found, key=lambda one: one["date"], default=None)
    return [one for one in found if newest and one["machine"]["cpu"] == newest["machine"]["cpu"]]


def update(page: Path, body: str, *, is_check: bool) -> int:
    """Replace the marked part of a page, or only return 1 if it is stale."""
    text = page.read_text()
    wanted = replaced(text, body)
    if is_check:
        return int(wanted != text)
    write_text(page, wanted)
    return 0


def replaced(text: str, body: str) -> str:
    """A text with its marked part replaced."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END, maxsplit=1)
    return f"{before}{BEGIN}\n{body}\n{END}{after}"


def ops_table(results: Results) -> list[str]:
    """Milliseconds of each op, forward and with backward: `bench ops`."""
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
    """GPU targets and measurements, and a layer of experts with the speedup over transformers'
    `grouped_mm`: `kernels.py`."""
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
    """Milliseconds of a layer's calls, and the speedup over the best peer."""
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
    """Tokens per second of all systems: `bench training`."""
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
    """Its name and the widest instruction sets."""
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


@script(
    saves=False,
    check=option(False, "change nothing; exit 1 when stale"),
    measure=option(False, "measure first, all caps"),
    cap=option(None, "of --measure: one", choices=[cap or "none" for cap in CAPS]),
)
def main(options: Namespace) -> int:
    caps = [None if options.cap == "none" else options.cap] if options.cap else list(CAPS)
    if options.measure and (code := measure(caps)):
        return code
    if not (found := newest_results()):
        print("benchmarks/results has no results; --measure makes some", file=sys.stderr)
        return 2
    parts = {README: table_of(found), KERNELS: section(RESULTS)}
    return max([update(page, body, is_check=options.check) for page, body in parts.items()])


if __name__ == "__main__":
    sys.exit(main())
