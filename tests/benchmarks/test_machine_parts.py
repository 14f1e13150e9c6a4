"""Prompts, sizes, the disk's measurement, control groups, processes."""

import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from harness.disk import ReadMode, measure, sweep
from harness.machine import describe_machine, machine_name
from harness.processes import RunSpec, run_worker
from harness.prompt import cut, language_reference, make_prompt

SPEC = RunSpec(
    system="transformers",
    checkpoint="absent",
    gguf="absent",
    prompt_ids=(1, 2, 3),
    decode_ids=(4, 5),
    greedy=False,
    warmup_tokens=0,
    max_decode_s=1.0,
    num_threads=1,
)


def test_prompt_is_real_text_with_its_repetitions() -> None:
    prompt = make_prompt(256, 64, 50304, None)
    assert prompt == make_prompt(256, 64, 50304, None)
    assert (len(prompt.ids), len(prompt.continuation)) == (256, 64)
    assert all(0 <= token < 50304 for token in prompt.ids + prompt.continuation)
    assert make_prompt(300, 20, 50304, None).ids[:256] == prompt.ids
    # Random ids would hardly ever come twice; in English about half the words of a page do.
    assert len(set(prompt.ids)) < 0.8 * len(prompt.ids)
    assert len(set(prompt.ids)) > 0.2 * len(prompt.ids)


def test_cutting_loses_nothing() -> None:
    text = language_reference()[:20_000]
    assert "".join(cut(text)) == text


def test_a_tokenizers_ids_are_spread_one_to_one(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = language_reference()[:20_000]
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompt = make_prompt(200, 10, 4096, tmp_path)
    plain = tokenizer.encode(text).ids[:210]
    assert len(set(zip(plain, prompt.ids + prompt.continuation, strict=True))) == len(set(plain))


def test_a_prompt_longer_than_the_text_is_refused() -> None:
    with pytest.raises(ValueError, match="ask for fewer"):
        make_prompt(10**6, 1, 4096, None)


@pytest.mark.parametrize("direct", [False, True])
def test_disk_reads_blocks_wherever_they_lie(tmp_path: Path, direct: bool) -> None:
    file = tmp_path / "blocks"
    file.write_bytes(os.urandom(50_000))
    ranges = [(file, 1, 10_000), (file, 4096, 10_000), (file, 40_000, 10_000)]
    try:
        result = measure(ranges, ReadMode(direct, 2), seconds=0.02)
    except OSError:
        if not direct:
            raise
        pytest.skip("this file system has no direct I/O")
    assert result.bytes_per_s > 0
    assert result.block_bytes == 10_000


def test_disk_reports_a_file_that_is_too_short(tmp_path: Path) -> None:
    file = tmp_path / "short"
    file.write_bytes(bytes(5_000))
    with pytest.raises(OSError, match="before the block's end"):
        sweep([(file, 0, 9_000)], seconds=0.01)


def test_machine_name_is_a_file_name() -> None:
    assert describe_machine()["num_cores"] == len(os.sched_getaffinity(0))
    facts = {"cpu": "Intel(R) Xeon(R) CPU @ 2.20GHz", "num_cores": 2, "memory_bytes": 25 << 30}
    assert machine_name(facts) == "intel-xeon-2-20ghz-2c-25g"
    older = facts | {"cpu": "AMD EPYC", "cpu_features": ["avx2", "fma"]}
    assert machine_name(older) == "amd-epyc-avx2-2c-25g"
    assert machine_name(older | {"cpu_features": ["avx2", "avx512f"]}) == "amd-epyc-2c-25g"


def test_a_worker_that_fails_says_why() -> None:
    outcome = run_worker(replace(SPEC, system="llama.cpp:eager"), timeout_s=600, cold=False)
    assert outcome.failure == "ended with exit code 1"
    assert "unknown system" in outcome.log


def test_a_worker_that_takes_too_long_is_killed() -> None:
    outcome = run_worker(SPEC, timeout_s=0.05, cold=False)
    assert outcome.failure == "not finished after 0 s"
    commands = [child.cmdline() for child in psutil.Process().children()]
    assert not any(part.endswith("worker.py") for command in commands for part in command)
