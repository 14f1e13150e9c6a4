"""`moe-runtime run` under `torchrun`: the text of one process, printed once; deaths named once."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_runtime.cli.processes import named_end
from moe_runtime.errors import RankFailureError

PROMPT = "The store reads"
# Each process writes its number into a folder, and takes its time.
PROGRAM = """
import os, sys, time, moe_runtime
from pathlib import Path
from moe_runtime.cli.main import main
load = moe_runtime.load
def load_slow(*args, **options):
    model = load(*args, **options)
    model.register_forward_hook(lambda *_: time.sleep(0.05))
    return model
moe_runtime.load = load_slow
folder, sys.argv = Path(sys.argv[1]), ["moe-runtime", *sys.argv[2:]]
Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
sys.exit(main())
"""


def test_one_text_and_one_line_that_names_the_dead(checkpoint: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    num_tokens = 240
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = ["run", str(checkpoint), "-p", PROMPT, "-n", str(num_tokens)]
    with subprocess.Popen(
        [*torchrun, str(program), str(tmp_path), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        begin = process.stdout.read(20)
        os.kill(int((tmp_path / "1").read_text()), signal.SIGKILL)
        text = (begin + process.stdout.read()).decode(errors="replace").rstrip("\n")
        errors = process.stderr.read().decode()
    assert process.returncode != 0
    lines = [line for line in errors.splitlines() if line.startswith("moe-runtime: error:")]
    assert len(lines) == 1, errors
    assert "rank 1 of 2 has ended" in lines[0]
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    expected = model.generate(ids, max_new_tokens=60, do_sample=False)[0, ids.shape[1] :]
    expected_text = tokenizer.decode(expected, skip_special_tokens=True)
    shared = min(len(text.strip()), 40)
    assert shared >= 10
    assert text[:shared] == expected_text[:shared]


class OneDead:
    """Stands for a `GroupWatch` of two ranks of which the second is gone."""

    size = 2

    def ended_ranks(self) -> tuple[int, ...]:
        return (1,)


@pytest.fixture
def term_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("term_as_before")
def test_a_termination_does_not_cut_off_the_line_about_the_dead() -> None:
    """A launcher may send it just after an exchange has failed, before the line is printed."""
    watch: Any = OneDead()
    with pytest.raises(RankFailureError, match="rank 1 of 2 has ended"), named_end(watch):
        raise RuntimeError("connection closed by peer")
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("term_as_before")
def test_a_termination_names_the_dead() -> None:
    watch: Any = OneDead()
    with pytest.raises(RankFailureError, match="rank 1 of 2 has ended"), named_end(watch):
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("term_as_before")
def test_a_block_that_ends_well_leaves_terminations_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM)
    watch: Any = OneDead()
    with named_end(watch):
        pass
    assert signal.getsignal(signal.SIGTERM) == before
