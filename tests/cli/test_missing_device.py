"""A GPU that is not there: one line, the same of every command, before anything is opened."""

from typing import Any

import pytest
import torch
from command_lines import COMMANDS

from moe_runtime.benchmarks.commands.texts import choose_device
from moe_runtime.cli.main import main

TAKING = sorted(
    name
    for name, command in COMMANDS.items()
    if any("--device" in param.opts for param in command.params)
)


@pytest.mark.parametrize(("count", "here"), [(0, "no GPU"), (2, "GPUs up to cuda:1")])
@pytest.mark.parametrize("name", TAKING)
def test_every_command_says_the_same_and_opens_nothing(name, count, here, monkeypatch, capsys):
    """Neither the model nor the other words are looked at: none of them is there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    needed = [
        *(["in.txt", "-o", "out"] if name == "finetune" else []),
        *(["--prompts", "in.txt", "-o", "out"] if name == "generate" else []),
        *(["--text", "in.txt"] if name == "bench quality" else []),
    ]
    assert main([*name.split(), "not-there", *needed, "--device", "cuda:3"]) == 2
    said = f"moe-runtime: error: --device cuda:3: torch sees {here} here; use cpu or auto\n"
    assert capsys.readouterr().err == said


def test_each_of_several_gpus_must_be_there(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "a GPU")
    for device, said in (
        ("cuda:0,cuda:3", "--device cuda:3: torch sees GPUs up to cuda:1 here; use cpu or auto"),
        ("cuda:1,cuda:1", "--device cuda:1,cuda:1: name different GPUs, such as cuda:0,cuda:1"),
    ):
        assert main(["run", "not-there", "--prompt", "a", "--device", device]) == 2
        assert capsys.readouterr().err == f"moe-runtime: error: {said}\n"


def test_a_benchmark_names_one_gpu():
    context: Any = None
    with pytest.raises(ValueError, match="--device cuda:0,cuda:1: systems are compared on one GPU"):
        choose_device(context, "cuda:0,cuda:1", "auto")


@pytest.mark.parametrize(
    "device",
    ["cuda:0,cpu", "cuda,cuda:1", "cuda:0,", "cpu:1", "cuda:", "cuda:01", "cuda:128", "CUDA", ""],
)
def test_a_device_is_written_as_the_help_says(device, capsys):
    assert main(["run", "not-there", "--prompt", "a", "--device", device]) == 2
    said = f"--device must be auto, cpu, cuda or cuda:N, got {device!r}\n"
    assert capsys.readouterr().err == f"moe-runtime: error: {said}"
