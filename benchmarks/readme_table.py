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
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks.harness.scripting import describe_machine, machine_name, parser_of
from moe_runtime.benchmarks.suite.comparing import counted
from moe_runtime.config import format_bytes
from moe_runtime.files import write_text

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = Path("benchmarks") / "results"
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
        file = RESULTS / f"latency-{SHAPE}-{cap or 'none'}-{machine_name(describe_machine())}.json"
        command = ["bench", "latency", "--shape", SHAPE, *words, *OPTIONS, "-o", str(file)]
        print(shlex.join(["moe-runtime", *command]), flush=True)
        program = Path(sys.executable).with_name("moe-runtime")
        worst = max(worst, subprocess.run([program, *command], cwd=ROOT).returncode)
    return worst


def table_of(found: list[Results]) -> str:
    """The README's table from results of `bench latency` under different caps."""
    found = sorted(found, key=lambda one: -(one["settings"]["cap_bytes"] or sys.maxsize))
    of_caps = [{one["system"]: one for one in each["measurements"]} for each in found]
    peers = [name for name in dict.fromkeys(n for rows in of_caps for n in rows) if name != OURS]
    lines = [
        "| memory | " + " | ".join(["moe-runtime", *peers]) + " | first token | prompt |",
        "|---|" + "--:|" * (len(peers) + 3),
    ]
    for each, rows in zip(found, of_caps, strict=True):
        rates = [_decode_rate(rows.get(name)) for name in (OURS, *peers)]
        ours, prompts = rows[OURS]["summary"], each["settings"]["prompt_tokens"]
        seconds = {name: ours[name]["median"] for name in ("first_token_s", "load_s", "import_s")}
        lines.append(
            f"| {_memory(each['settings']['cap_bytes'])} | **{rates[0]}** | "
            f"{' | '.join(rates[1:])} | {sum(seconds.values()):.0f} s | "
            f"{statistics.mean(prompts) / seconds['first_token_s']:.3g} |"
        )
    settings, machine = found[0]["settings"], found[0]["machine"]
    commits = sorted({each["commit"][:12] for each in found})
    return "\n".join(
        [
            f"Decoded tokens per second, `{settings['model']}` shape in bf16, "
            f"{settings['prompt_tokens'][0]} prompt tokens; first token (from the start of the "
            "process) and prompt speed (tokens/s) are ours:",
            "",
            *lines,
            "",
            f"{machine['cpu']}, {settings['num_threads']} threads, "
            f"{format_bytes(machine['memory_bytes'])}, no GPU; whole process capped, page cache "
            f"included; systems in turn, medians of {_counts(found)}{_interrupted(found)}; "
            f"{max(each['date'] for each in found)[:10]}, commit {', '.join(commits)}. "
            "Made by `python benchmarks/readme_table.py --measure`.",
        ]
    )


def _decode_rate(measured: Results | None) -> str:
    """Tokens a second of a system between its first and its last token."""
    if measured is None or not measured["repetitions"]:
        return "–"
    return f"{1 / measured['summary']['between_tokens_s']['median']:.3g}"


def _counts(found: list[Results]) -> str:
    """How many repetitions the systems have that have numbers."""
    counts = {len(one["repetitions"]) for each in found for one in each["measurements"]} - {0}
    shown = " to ".join(map(str, sorted({min(counts), max(counts)})))
    return counted("{} repetitions", shown)


def _interrupted(found: list[Results]) -> str:
    """Names the rows whose measurement was stopped early."""
    rows = [each for each in found if each["ended"] == "interrupted"]
    return "".join(
        f"; the row of {_memory(each['settings']['cap_bytes'])} was interrupted after "
        f"{_counts([each])}"
        for each in rows
    )


def _memory(cap: int | None) -> str:
    return "all of it" if cap is None else f"{cap / 2**30:.0f} GiB"


def newest_results() -> list[Results]:
    """The files of the machine that was measured last."""
    files = (ROOT / RESULTS).glob(f"latency-{SHAPE}-*.json")
    found = [json.loads(file.read_text()) for file in files]
    newest = max(found, key=lambda one: one["date"], default=None)
    return [one for one in found if newest and one["machine"]["cpu"] == newest["machine"]["cpu"]]


def replaced(text: str, begin: str, end: str, body: str) -> str:
    """A text with what is between two marks replaced."""
    before, rest = text.split(begin)
    _, after = rest.split(end, maxsplit=1)
    return f"{before}{begin}\n{body}\n{end}{after}"


def main() -> int:
    """Measures, rewrites or checks; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when stale")
    parser.add_argument("--measure", action="store_true", help="measure first, all caps")
    parser.add_argument("--cap", choices=[cap or "none" for cap in CAPS], help="of --measure: one")
    options = parser.parse_args()
    caps = [None if options.cap == "none" else options.cap] if options.cap else list(CAPS)
    if options.measure and (code := measure(caps)):
        return code
    if not (found := newest_results()):
        print("benchmarks/results has no results; --measure makes some", file=sys.stderr)
        return 2
    readme = README.read_text()
    wanted = replaced(readme, BEGIN, END, table_of(found))
    if options.check:
        return int(wanted != readme)
    write_text(README, wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
