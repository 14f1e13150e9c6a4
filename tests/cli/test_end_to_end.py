"""The real program on a real checkpoint: processes, exit codes, signals, files."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from warm_python import warm_python

import moe_runtime
from moe_runtime.cli.main import main
from moe_runtime.errors import CapacityError
from moe_runtime.lab.traces import read_trace

WORDS = ["-P", "-m", "moe_runtime.cli.main", "run"]
PROMPT = "The store reads an expert"
# The same, coming to a stop after some text, so that a signal surely arrives while it generates.
SLOW_PROGRAM = """
import itertools, sys, time, moe_runtime
from moe_runtime.cli.main import main
load = moe_runtime.load
def load_slow(*args, **options):
    model, passes = load(*args, **options), itertools.count()
    model.register_forward_hook(lambda *_: time.sleep(0.01 if next(passes) < 40 else 200))
    return model
moe_runtime.load = load_slow
sys.exit(main())
"""
# One compute thread: the tests share their machine, and the model is tiny.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def smallest_budget(checkpoint: Path) -> int:
    """What the runtime says when it is given a single byte."""
    with pytest.raises(CapacityError) as refused:
        moe_runtime.load(checkpoint, device="cpu", host_memory=1, max_tokens=256)
    assert refused.value.smallest_bytes is not None
    return refused.value.smallest_bytes


def test_positions_are_named_before_memory(checkpoint, refused):
    known = json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"]
    words = ["-p", PROMPT, "-n", str(10**8), "--host-memory", "1GiB"]
    asked = f"100000000 new ones are asked for, but the model knows {known} positions"
    assert asked in refused("run", str(checkpoint), *words)
    words = ["-p", PROMPT, "--max-tokens", str(known + 1), "--host-memory", "25MiB"]
    asked = f"--max-tokens {known + 1}: a text cannot be longer than the {known} positions"
    assert asked in refused("run", str(checkpoint), *words, "-n", "1")


def test_run_streams_experts_and_says_what_transformers_says(checkpoint, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    expected = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    trace_file = tmp_path / "trace.npz"
    budget = smallest_budget(checkpoint)

    words = f"--max-new-tokens 24 --json --max-tokens 256 --host-memory {budget}".split()
    done = subprocess.run(
        [warm_python(), *WORDS, str(checkpoint), "-p", PROMPT, *words, "--trace", trace_file],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    outcome = json.loads(done.stdout)
    assert outcome["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert outcome["prompt_tokens"] == ids.shape[1]
    assert outcome["new_tokens"] == 24
    assert outcome["budget_bytes"] == budget
    assert outcome["expert_slots"] < 3 * 8
    assert outcome["bytes_read"] >= outcome["misses"] * 3 * 64 * 48 * 4

    trace = read_trace(trace_file)
    assert trace.signature.num_layers == 3
    # The last new token is never fed back.
    assert trace.num_tokens == ids.shape[1] + 23
    assert trace.token_id.tolist() == [*ids[0].tolist(), *expected[:-1].tolist()]
    assert trace.token_position.tolist() == list(range(trace.num_tokens))
    assert trace.step_phase.tolist() == [0] + [1] * 23
    assert (trace.expert_ids != trace.absent).all()
    requests = sum(experts.size for _, _, experts in trace.accesses())
    assert outcome["hits"] + outcome["late_hits"] + outcome["misses"] == requests


def test_inspect_agrees_with_run_and_with_the_file(checkpoint, capsys):
    assert main(["inspect", str(checkpoint), "--json", "--max-tokens", "256"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    summary = json.loads(out)
    assert (summary["num_layers"], summary["num_experts"], summary["top_k"]) == (3, 8, 2)
    assert summary["bytes_per_expert"] == 3 * 64 * 48 * 4
    assert summary["expert_bytes"] == 3 * 8 * summary["bytes_per_expert"]
    assert summary["smallest_budget_bytes"] == smallest_budget(checkpoint)
    stored = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    # The file holds every tensor and a header of some kilobytes.
    assert 0 < stored - summary["expert_bytes"] - summary["dense_bytes"] < 2**15


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM]
)
def test_a_signal_ends_cleanly_with_the_text_so_far(checkpoint, tmp_path, number):
    trace_file, timeline = tmp_path / "trace.npz", tmp_path / "timeline.json"
    words = ["run", str(checkpoint), "--prompt", PROMPT, "-n", "200", "--trace", str(trace_file)]
    words += ["--timeline", str(timeline)]
    process = subprocess.Popen(
        [warm_python(), "-P", "-c", SLOW_PROGRAM, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        bufsize=0,
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(number)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 128 + number
    text = (first + out).decode()
    assert text.strip()
    assert b"Traceback" not in err
    assert b"what the runtime did" in err
    steps = read_trace(trace_file).num_steps
    assert 0 < steps < 200
    events = json.loads(timeline.read_text(encoding="utf-8"))
    # The step that the signal cut short is in the trace with what it had.
    assert sum(event["name"] in ("prefill", "decode") for event in events) in (steps - 1, steps)
    assert sorted(os.listdir(tmp_path)) == ["timeline.json", "trace.npz"]


def test_text_is_utf8_in_every_locale():
    """A prompt, the name of a file and what is printed; the encoding would be ASCII."""
    command = [sys.executable, "-P", "-m", "moe_runtime.cli.program", "doctor", "./weiß-日本"]
    environment = os.environ | {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 2
    assert "weiß-日本: no such file or folder" in done.stderr.decode("utf-8")
