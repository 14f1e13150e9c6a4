"""Writes the table of the README from a results file, so that no number is typed by hand.

python benchmarks/readme_table.py            # rewrite the README's table
python benchmarks/readme_table.py --check    # only say whether it is up to date
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from moe_runtime.config import format_bytes
from moe_runtime.files import write_text

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- benchmarks/readme_table.py: begin -->", "<!-- end -->"
OURS = "ours"
DEFAULT_SHAPE = "olmoe-1b-7b"
COMPARED = {OURS, "transformers", "llama.cpp"}


def table_of(results: dict[str, Any]) -> str:
    """The README's table for one results file of ``generate.py``."""
    peers = [name for name in _systems(results) if name != OURS]
    lines = [
        "| memory | " + " | ".join(["moe-runtime", *peers]) + " | first token | prompt, warm |",
        "|---|" + "--:|" * (len(peers) + 3),
    ]
    for cap in dict.fromkeys(row["cap_bytes"] for row in results["summary"]):
        here = [row for row in results["summary"] if row["cap_bytes"] == cap]
        rows = {row["system"]: row["medians"] for row in here}
        if not rows.get(OURS):
            continue
        cells = [_rate(rows.get(name), "decode_tokens_per_s") for name in [OURS, *peers]]
        ours = rows[OURS]
        lines.append(
            f"| {_memory(cap)} | **{cells[0]}** | "
            + " | ".join(cells[1:])
            + f" | {ours['ttft_s']:.0f} s | {_rate(ours, 'prefill_warm_tokens_per_s')} |"
        )
    shape, machine = results["shape"], results["machine"]
    return "\n".join(
        [
            f"Decoded tokens per second, `{shape['name']}` shape "
            f"({format_bytes(shape['total_bytes'])} in bf16), "
            f"{results['settings']['prompt_tokens']} prompt tokens; first token and prompt speed "
            "(tokens/s) are ours:",
            "",
            *lines,
            "",
            f"{machine['cpu']}, {results['settings']['num_threads']} threads, "
            f"{format_bytes(machine['memory_bytes'])}, no GPU; whole process capped, page cache "
            f"included; medians of {results['settings']['repeats']} runs, systems in turn; "
            f"{results['date'][:10]}, commit {results['commit'][:12]}. "
            f"Made by `{results['command']}`.",
        ]
    )


def _systems(results: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["system"] for row in results["summary"]))


def _is_full(results: dict[str, Any]) -> bool:
    """Whether it has the shape that `generate.py` takes by itself, and the main peers."""
    systems = {system.partition(":")[0] for system in _systems(results)}
    return results["shape"]["name"] == DEFAULT_SHAPE and systems >= COMPARED


def _memory(cap: int | None) -> str:
    return "all of it" if cap is None else f"{cap / 2**30:.0f} GiB"


def _rate(medians: dict[str, float] | None, name: str) -> str:
    value = (medians or {}).get(name)
    return "–" if value is None else f"{value:.3g}"


def with_table(readme: str, results: dict[str, Any]) -> str:
    """The README's text with the table between the two marks replaced."""
    return replaced(readme, BEGIN, END, table_of(results))


def replaced(text: str, begin: str, end: str, body: str) -> str:
    """A text with what is between two marks replaced."""
    before, rest = text.split(begin)
    _, after = rest.split(end, maxsplit=1)
    return f"{before}{begin}\n{body}\n{end}{after}"


def main() -> int:
    """Rewrites or checks the README."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, help="a results file (default: the newest full one)"
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when stale")
    options = parser.parse_args()
    files = [options.results] if options.results else RESULTS.glob("generate-*.json")
    found = [json.loads(file.read_text()) for file in files]
    if not options.results:
        found = [results for results in found if _is_full(results)]
    if not found:
        print("benchmarks/results has no results file; run benchmarks/generate.py", file=sys.stderr)
        return 2
    results = max(found, key=lambda content: content["date"])
    readme = README.read_text()
    wanted = with_table(readme, results)
    if options.check:
        return int(wanted != readme)
    write_text(README, wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
