"""Generation with experts streamed from disk, beside its peers, on the same weights and prompt.

Makes a synthetic Mixture-of-Experts checkpoint of a named shape, runs each system in a process of
its own (systems in turn, several repeats), uncapped and under memory caps, and prints medians.
README.md in this folder says what is measured and how.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

from harness.interruption import stop_on_termination
from harness.kept import check_circumstances
from harness.machine import commit, describe_machine, machine_name, num_usable_cores, versions
from harness.plan import Settings, cap_label, parse_cap
from harness.prompt import Prompt, make_prompt
from harness.report import print_report, write_results
from harness.session import Findings, measure_disk, prepare_files, run_all, trace_routes
from harness.systems import SYSTEM_NAMES, VARIANTS
from rich.console import Console

from moe_runtime.bench.memory_cap import CapUnavailableError, why_unavailable
from moe_runtime.bench.synthetic.model_shapes import SHAPES

HERE = Path(__file__).resolve().parent
POCKET_MODEL = HERE.parent / "models" / "pocket"
WARMUP_TOKENS = 2
LEAST_WIDTH = 110
DEFAULT_SHAPE = "olmoe-1b-7b"
EXAMPLES = """examples:
  python benchmarks/generate.py --quick
      everything on a checkpoint of 19 MB in under a minute: does it all work here?
  python benchmarks/generate.py
      the full comparison: 28 GB of disk for the files, about an hour, root for the caps
  python benchmarks/generate.py --systems ours,llama.cpp --caps 7GiB --repeats 1
      one cap, two systems, once
  python benchmarks/generate.py --systems ours,accelerate,llama.cpp --caps 7GiB --keep
      one cap more, beside the others that the results file has of this commit and machine
  python benchmarks/generate.py --only prepare
      make the files now, measure later

systems: ours, transformers (also transformers:eager, transformers:grouped_mm), accelerate,
llama.cpp; ours:planes reads the checkpoint that `moe-runtime pack --code planes` made of it;
ours:int8 rounds activations to 8 bits, as llama.cpp does (`--activations int8`).
Peers need `pip install '.[peers]'`; those not installed are left out with a word."""


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    console = Console(highlight=False)
    # Output that goes to a file has no width; the tables need this much.
    console.width = max(console.width, LEAST_WIDTH)
    stop_on_termination()
    try:
        settings, options = parse(sys.argv[1:])
        return run(settings, options, console)
    except (ValueError, OSError, CapUnavailableError) as error:
        console.print(f"[red]error:[/red] {error}", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; child processes and control groups are gone")
        return 130


def parse(arguments: list[str]) -> tuple[Settings, argparse.Namespace]:
    """Reads the command line.

    Raises:
        ValueError: an option has a value that makes no sense.
    """
    options = _parser().parse_args(arguments)
    if options.quick:
        options.shape, options.disk_s = "olmoe-tiny", min(options.disk_s, 0.1)
        options.repeats, options.new_tokens = 1, min(options.new_tokens, 16)
        options.caps = options.caps or "none,1GiB"
    if options.max_decode_s is None:
        options.max_decode_s = 3.0 if options.quick else 60.0
    systems = tuple(options.systems.split(","))
    known = ", ".join((*SYSTEM_NAMES, *VARIANTS))
    for system in systems:
        if system not in (*SYSTEM_NAMES, *VARIANTS):
            raise ValueError(f"expected systems among {known}, got {system!r}")
    for name in ("repeats", "prompt_tokens", "new_tokens", "threads"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    caps = tuple(map(parse_cap, (options.caps or "none,10GiB,7GiB,5GiB").split(",")))
    settings = Settings(
        shape=SHAPES[options.shape],
        systems=systems,
        caps=caps,
        repeats=options.repeats,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        warmup_tokens=WARMUP_TOKENS,
        max_decode_s=options.max_decode_s,
        timeout_s=options.timeout_s,
        num_threads=options.threads,
        greedy=options.greedy,
        host_memory=options.host_memory,
        tokenizer=options.tokenizer,
        seed=options.seed,
        disk_s=options.disk_s,
        trace=not options.no_trace,
        # Emptying the page cache slows the whole machine: not for a check that it all works.
        cold=not options.quick,
        data=options.data,
    )
    return settings, options


def run(settings: Settings, options: argparse.Namespace, console: Console) -> int:
    """Prepares, measures, reports; an interrupted session still reports what it has."""

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    machine = describe_machine()
    facts = {
        "benchmark": "generate",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(sys.argv[1:]),
        "commit": commit(HERE.parent),
        "machine": machine,
        "versions": versions(),
    }
    say(f"machine: {machine}")
    say(f"commit {facts['commit']}, {facts['versions']}")
    prompt = _prompt(settings)
    facts["prompt"] = prompt.source
    which = "" if options.shape == DEFAULT_SHAPE else f"-{options.shape}"
    name = f"generate{which}-{machine_name(machine)}.json"
    results = options.results or HERE / "results" / name
    if options.quick and options.results is None:
        results = settings.data / "generate-quick.json"
    if options.keep:
        plan = {"shape": settings.shape.describe(), "settings": settings.describe()}
        check_circumstances({**facts, **plan}, results)
    prepare_files(settings, say)
    if options.only == "prepare":
        return 0
    findings = Findings()
    measure_disk(settings, findings, say)
    if options.only == "disk":
        return 0
    caps = _usable_caps(settings, findings)
    try:
        run_all(settings, caps, prompt, findings, say)
        if settings.trace and "ours" in settings.systems:
            trace_routes(settings, caps[0], prompt, findings, say, keeps=options.keep)
    finally:
        print_report(console, settings, caps, findings)
        write_results(results, settings, caps, findings, facts, keeps=options.keep)
        say(f"results: {results}")
    failures = [record for record in findings.records if not record.outcome.succeeded]
    for record in failures:
        where = f"{record.run.system}, cap {cap_label(record.run.cap_bytes)}"
        say(f"{where}: {record.outcome.failure}\n{record.outcome.log}")
    return 1 if any(record.run.system == "ours" for record in failures) else 0


def _command(arguments: list[str]) -> str:
    """What to type to measure this again; where files lie is everybody's own affair."""
    places = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--data", "--results"):
        places.add_argument(option)
    _, rest = places.parse_known_args(arguments)
    return shlex.join(["python", "benchmarks/generate.py", *rest])


def _prompt(settings: Settings) -> Prompt:
    folder = None if settings.tokenizer == "words" else Path(settings.tokenizer)
    if settings.tokenizer == "auto":
        folder = POCKET_MODEL if (POCKET_MODEL / "tokenizer.json").is_file() else None
    num_decoded = settings.warmup_tokens + settings.new_tokens
    return make_prompt(settings.prompt_tokens, num_decoded, settings.shape.vocab_size, folder)


def _usable_caps(settings: Settings, findings: Findings) -> tuple[int | None, ...]:
    """The caps that can be set here; what is left out is noted.

    Raises:
        CapUnavailableError: none can, and no uncapped run was asked for.
    """
    uncapped = tuple(cap for cap in settings.caps if cap is None)
    if len(uncapped) == len(settings.caps):
        return uncapped
    reason = why_unavailable()
    if reason is None:
        return settings.caps
    if not uncapped:
        raise CapUnavailableError(f"memory cannot be capped here: {reason}")
    findings.notes.append(f"runs under a memory cap were skipped: {reason}")
    return uncapped


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/generate.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="the tiny shape, one repeat, under a minute")
    add("--only", choices=("prepare", "disk"), help="stop after making files / measuring the disk")
    add("--shape", choices=tuple(SHAPES), default=DEFAULT_SHAPE, help="(default: %(default)s)")
    add("--systems", default=",".join(SYSTEM_NAMES), help="comma-separated (default: %(default)s)")
    add("--caps", help="comma-separated memory caps (default: none,10GiB,7GiB,5GiB)")
    add("--repeats", type=int, default=3, help="runs of each (default: %(default)s)")
    add("--prompt-tokens", type=int, default=256, help="(default: %(default)s)")
    add("--new-tokens", type=int, default=64, help="tokens to decode (default: %(default)s)")
    add("--threads", type=int, default=num_usable_cores(), help="(default: all, %(default)s here)")
    add(
        "--greedy",
        action="store_true",
        help="feed back the likeliest token, instead of the text that follows the prompt",
    )
    add("--host-memory", default="auto", help="ours' budget (default: what the cap leaves)")
    add(
        "--tokenizer",
        default="auto",
        help="'words', or a folder with tokenizer.json (default: the pocket model's, else words)",
    )
    add("--max-decode-s", type=float, help="cut a slow decode off after this time (60; quick: 3)")
    add("--timeout-s", type=float, default=900.0, help="kill a run after this time")
    add("--disk-s", type=float, default=2.0, help="seconds for each measurement of the disk")
    add("--no-trace", action="store_true", help="skip the replay of LRU and Belady's optimum")
    add("--seed", type=int, default=0, help="seed of the weights")
    add("--data", type=Path, default=HERE / "data", help="folder for checkpoints")
    add("--results", type=Path, help="(default: results/generate-[SHAPE-]MACHINE.json)")
    add(
        "--keep",
        action="store_true",
        help="keep what the results file has of other caps, from the same commit and machine",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
