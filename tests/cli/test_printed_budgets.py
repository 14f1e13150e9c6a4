"""The smallest budget that a refusal prints is accepted when it is typed as it is printed."""

import re
from pathlib import Path

import pytest
from training_runs import write_run

from moe_runtime.cli.main import main
from moe_runtime.config import format_bytes, parse_bytes
from moe_runtime.inference.inspection import inspect_checkpoint

CPU = ["--device", "cpu", "--json"]


def words_of(command: str, checkpoint: Path, folder: Path, size: int) -> tuple[list[str], str]:
    """A command whose need grows with a size, and the option of its budget."""
    if command == "train":
        run = write_run(folder)
        words = ["--set", f"data.tokens_per_step={128 * size}", "--set", "data.micro_batches=1"]
        return ["train", str(run), "--dry-run", *words, "--set"], "run.host_memory="
    if command == "finetune":
        text = folder / "text.txt"
        text.write_text("The store reads an expert and forgets another. " * 40)
        words = ["--lora", "2", "--context", str(16 + size), "--sequences", "1", "--dry-run"]
        return ["finetune", str(checkpoint), str(text), *words, "-o", str(folder / "out")], ""
    words = {
        "run": ["run", str(checkpoint), "--prompt", "The", "--max-new-tokens", "1", *CPU],
        "inspect": ["inspect", str(checkpoint)],
        "serve": ["serve", str(checkpoint), "--dry-run", *CPU],
    }[command]
    return [*words, "--max-tokens", str(100 + size)], ""


def is_told_from_the_nearest(num_bytes: int) -> bool:
    """Whether four digits that are rounded to the nearest would be refused."""
    return parse_bytes(format_bytes(num_bytes)) < num_bytes


@pytest.mark.parametrize("command", ["run", "serve", "finetune", "train"])
def test_a_refusal_prints_a_budget_that_is_accepted(command, checkpoint, tmp_path, capsys):
    for size in range(1, 9):
        words, option = words_of(command, checkpoint, tmp_path, size)
        words += [] if option else ["--host-memory"]
        assert main([*words, f"{option}1KiB"]) == 2
        refusal = " ".join(capsys.readouterr().err.split())
        found = re.search(r"the smallest that works is ([\d.]+ \w+) \((\d+) bytes\)", refusal)
        assert found is not None, refusal
        if is_told_from_the_nearest(int(found[2])):
            break
    else:
        pytest.fail("other sizes find a number that is told from the nearest")
    assert main([*words, f"{option}{found[1]}"]) == 0


def test_inspect_prints_a_budget_that_is_accepted(checkpoint, tmp_path, capsys):
    size = next(
        size
        for size in range(1, 9)
        if is_told_from_the_nearest(
            inspect_checkpoint(checkpoint, max_tokens=100 + size).smallest_budget_bytes
        )
    )
    words, _ = words_of("inspect", checkpoint, tmp_path, size)
    assert main(words) == 0
    shown = capsys.readouterr().out
    found = re.search(r"smallest budget\W+([\d.]+ \w+), of which", shown)
    assert found is not None, shown
    run, _ = words_of("run", checkpoint, tmp_path, size)
    assert main([*run, "--host-memory", found[1]]) == 0
