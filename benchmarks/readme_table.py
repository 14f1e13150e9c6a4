"""Measures the table of the README, and writes it, so that no number is typed by hand.

python benchmarks/readme_table.py --measure   # half an hour, 28 GB of disk, root for the cap
python benchmarks/readme_table.py             # rewrite the table from the newest results
python benchmarks/readme_table.py --check     # only say whether it is up to date
"""

import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks.harness.scripting import RESULTS, ROOT, machine_name, parser_of
from moe_runtime.config import format_bytes
from moe_runtime.files import write_text
from moe_runtime.lab.this_machine import describe_machine

README = ROOT / "README.md"
BEGIN, END = "<!-- benchmarks/readme_table.py: begin -->", "<!-- end -->"
OURS = "moe_runtime"
SHAPE = "olmoe-1b-7b"
CAPS = {None: ("transformers:grouped_mm", "llama_cpp"), "7GiB": ("llama_cpp",)}
"""What is measured beside this project under each cap."""
OPTIONS = (
    *("--device", "cpu", "--prompt-tokens", "256", "-n", "9", "--time", "1500", "--keep-shape"),
)
Results = dict[str, Any]


def measure(caps: list[str | None]) -> int:
    """Runs `moe-runtime bench latency` for each cap; the worst of its exit codes."""
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
    """Lines of a table in Markdown; numbers in all columns but the first, if nothing else."""
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
        rates = [  # tokens a second between the first and the last one
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
    """How many repetitions the systems have that have numbers."""
    counts = {len(one["repetitions"]) for each in found for one in each["measurements"]} - {0}
    shown = " to ".join(map(str, sorted({min(counts), max(counts)})))
    return f"{shown} repetitions"


def _memory(results: Results) -> str:
    cap = results["settings"]["cap_bytes"]
    return "all of it" if cap is None else f"{cap / 2**30:.0f} GiB"


def newest_results() -> list[Results]:
    """The files of the machine that was measured last."""
    found = [json.loads(file.read_text()) for file in RESULTS.glob(f"latency-{SHAPE}-*.json")]
    newest = max(found, key=lambda one: one["date"], default=None)
    return [one for one in found if newest and one["machine"]["cpu"] == newest["machine"]["cpu"]]


def update(page: Path, begin: str, body: str, *, is_check: bool) -> int:
    """Replaces what is between a mark and its end in a page; or says, by 1, that it is stale."""
    text = page.read_text()
    wanted = replaced(text, begin, END, body)
    if is_check:
        return int(wanted != text)
    write_text(page, wanted)
    return 0


def replaced(text: str, begin: str, end: str, body: str) -> str:
    """A text with what is between two marks replaced."""
    before, rest = text.split(begin)
    _, after = rest.split(end, maxsplit=1)
    return f"{before}{begin}\n{body}\n{end}{after}"


def main() -> int:
    """Measures, rewrites or checks; returns the exit code."""
    flags = ("--check=change nothing; exit 1 when stale", "--measure=measure first, all caps")
    parser = parser_of(__doc__, *flags)
    parser.add_argument("--cap", choices=[cap or "none" for cap in CAPS], help="of --measure: one")
    options = parser.parse_args()
    caps = [None if options.cap == "none" else options.cap] if options.cap else list(CAPS)
    if options.measure and (code := measure(caps)):
        return code
    if not (found := newest_results()):
        print("benchmarks/results has no results; --measure makes some", file=sys.stderr)
        return 2
    return update(README, BEGIN, table_of(found), is_check=options.check)


if __name__ == "__main__":
    sys.exit(main())
