"""Bad input for every command: whatever comes, one line and exit code 2, or success.

    python tests/bad_input.py --seed 1 --cases 1000
    python tests/bad_input.py --seed 1 --case 421       repeats one and shows what it printed

A case is made from the seed and its number alone. Asserted of each: exit code 2 or success (or that
of a signal which was sent), on failure one line, no traceback, no old file replaced, nothing left
behind, within 20 seconds. Prints the cases that fail; the exit code is 1 if there are any.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

SUPPORT = Path(__file__).resolve().parent / "support"
sys.path[:0] = [str(SUPPORT), *(str(SUPPORT / part) for part in ("checkpoints", "faults"))]
_ENVIRONMENT = {
    # Nothing listens there: no case reaches a network, and each finds out at once.
    "HF_ENDPOINT": "http://127.0.0.1:9",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TERM": "dumb",
}


def main() -> int:
    """Runs the cases of a seed; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="run this one alone, and show it")
    parser.add_argument("--debug", action="store_true", help="give --debug to the command")
    parser.add_argument("--kind", action="append", help="of these kinds only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bad-input-") as scratch:
        os.environ.update(_ENVIRONMENT)
        os.environ.pop("HF_HUB_OFFLINE", None)
        for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"):
            os.environ[name] = str(Path(scratch, "home"))
        return _run(Path(scratch), options)


def _run(scratch: Path, options: argparse.Namespace) -> int:
    from bad_input_cases import MAKERS
    from bad_input_runner import remove, run_case
    from bad_input_words import PROCESS_MAKERS, WORD_MAKERS

    program = _import_everything()
    good = _make_material(scratch / "good", program)
    kinds = MAKERS | WORD_MAKERS | PROCESS_MAKERS
    if options.kind:
        kinds = {name: kinds[name] for name in options.kind}
    weights = [weight for _, weight in kinds.values()]
    is_one = options.case is not None
    first = options.case if is_one else options.first
    counts, failed = Counter(), 0
    for number in range(first, first + (1 if is_one else options.cases)):
        rng = Random(f"{options.seed}/{number}")
        kind = rng.choices(list(kinds), weights)[0]
        place = scratch / f"case-{number}"
        place.mkdir()
        case = kinds[kind][0](rng, place, good)
        if options.debug:
            case.words = [*case.words, "--debug"]
        outcome = run_case(case, place, program)
        counts[f"exit code {outcome.code}"] += 1
        if outcome.faults or is_one:
            failed += bool(outcome.faults)
            only = "".join(f" --kind {name}" for name in options.kind or ())
            print(f"case {number} ({kind}, {outcome.seconds:.1f} s): {_shown(case.words)}")
            if case.shell or case.send or case.room_bytes:
                print(f"  shell {case.shell}, signal {case.send}, room {case.room_bytes}")
            print(f"  repeat: tests/bad_input.py --seed {options.seed}{only} --case {number}")
            for fault in outcome.faults:
                print(f"  fault: {fault}")
            print("  stderr: " + outcome.err[-20_000 if is_one else -600 :].replace("\n", "\n    "))
            if is_one:
                print("  stdout: " + outcome.out[-2000:].replace("\n", "\n    "))
            sys.stdout.flush()
        remove(place)
    tally = ", ".join(f"{count} with {name}" for name, count in sorted(counts.items()))
    print(f"seed {options.seed}: {failed} of {sum(counts.values())} cases failed; {tally}")
    return 1 if failed else 0


def _import_everything() -> "Main":
    """The program, with all that its commands import in memory already."""
    import jinja2.sandbox  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import torch
    import transformers.models.olmoe.modeling_olmoe  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import moe_runtime.inference.inspection
    import moe_runtime.lab.report.trace_page
    import moe_runtime.training.finetune.finetune_run
    import moe_runtime.training.train_run  # noqa: F401
    from moe_runtime.cli.main import main as program

    torch.set_num_threads(1)
    return program


def _make_material(good: Path, program: "Main") -> Path:
    """Sound files, made in a child: what it starts does not end up in those that are forked."""
    from bad_input_material import make_material, make_recorded

    good.mkdir()
    make_material(good)
    process = os.fork()
    if process == 0:
        code = 1
        try:
            with (good / "stats.json").open("w") as stats:
                os.dup2(stats.fileno(), 1)
            make_recorded(good, program)
            sys.stdout.flush()
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(process, 0)[1]:
        raise SystemExit("the sound material could not be made")
    lines = (good / "stats.json").read_text().splitlines()
    (good / "stats.json").write_text(lines[0])
    return good


def _shown(words: Sequence[str]) -> str:
    return " ".join(repr(word[:80]) for word in words)


if __name__ == "__main__":
    from collections.abc import Callable

    Main = Callable[[Sequence[str]], int]
    sys.exit(main())
