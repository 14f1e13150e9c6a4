"""`run --image`, `chat` with `/image` and `generate`: one picture, one text."""

import io
import json
import re
import shutil
import sys
import weakref
from pathlib import Path
from typing import Any

import picture_checkpoints as pc
import pytest
from PIL import Image
from terminal_screen import TypedLines

import moe_runtime
from moe_runtime.cli import terminal
from moe_runtime.cli.main import main
from moe_runtime.inference.pictures import Picture, PictureReader
from moe_runtime.models.pocket import pocket_path

OPTIONS = ["--host-memory", "1GiB", "--dtype", "float32", "-n", "8"]
QUESTION = "What is it?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    name = "Qwen3VLMoeForConditionalGeneration"
    return str(pc.save_seeing_checkpoint(name, tmp_path_factory.mktemp("seeing")))


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    file = tmp_path / "a picture.png"
    file.write_bytes(pc.png(pc.picture(0)))
    return file


def text_of_run(model: str, capsys: Any, *words: str) -> str:
    assert main(["run", model, "-p", QUESTION, "--json", *OPTIONS, *words]) == 0
    return json.loads(capsys.readouterr().out)["text"]


def test_all_commands_give_a_picture_the_same_text(model, picture, tmp_path, capsys, monkeypatch):
    seen = text_of_run(model, capsys, "--image", str(picture))
    assert seen != text_of_run(model, capsys, "--chat")
    lines = f"/image {picture}\n{QUESTION}\n/undo\n/image {picture}\n{QUESTION}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{lines}/save {tmp_path / 'talk.jsonl'}\n"))
    assert main(["chat", model, *OPTIONS, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == f"{seen}\n{seen}\n"
    (talk,) = (tmp_path / "talk.jsonl").read_text().splitlines()
    user, _ = json.loads(talk)["messages"]
    parts = [{"type": "image", "image": picture.name}, {"type": "text", "text": QUESTION}]
    urls = pc.content_of([pc.picture(0), QUESTION])
    other = pc.content_of([pc.picture(1), QUESTION])
    asked = [[user], *([{"role": "user", "content": each}] for each in (parts, urls, other))]
    prompts = tmp_path / "in.jsonl"
    prompts.write_text("".join(json.dumps({"messages": each}) + "\n" for each in asked))
    output = tmp_path / "out.jsonl"
    assert main(["generate", model, "--prompts", str(prompts), "-o", str(output), *OPTIONS]) == 0
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    found = {json.dumps(each["messages"][0]["content"]): each["text"] for each in answers}
    assert len(answers) == len({each["id"] for each in answers}) == len(asked)
    assert [text == seen for text in found.values()].count(True) == len(asked) - 1


def test_another_model_sees_the_pictures_of_a_conversation(
    model, picture, tmp_path, capsys, monkeypatch
):
    told = []
    other = shutil.copytree(model, tmp_path / "other")
    for change in ("", f"/model {other}\n"):
        lines = f"/image {picture}\n{QUESTION}\n/image {picture}\n{change}And now?\n"
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert main(["chat", model, *OPTIONS, "--temperature", "0"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]


def write_prompts(tmp_path: Path, num_pictures: int) -> list[str]:
    """The words of `generate` for a file of lines with a picture each."""
    lines = []
    for seed in range(num_pictures):
        (tmp_path / f"{seed}.png").write_bytes(pc.png(pc.picture(seed)))
        parts = [{"type": "image", "image": f"{seed}.png"}, {"type": "text", "text": QUESTION}]
        lines.append(json.dumps({"messages": [{"role": "user", "content": parts}]}) + "\n")
    (tmp_path / "in.jsonl").write_text("".join(lines))
    files = ["--prompts", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    return [*files, "--max-tokens", "64", *OPTIONS]


def test_pictures_of_a_file_are_in_memory_while_they_are_read_or_answered(
    model, tmp_path, monkeypatch
):
    read, made, most = PictureReader.read, [], 0

    def counted(*args: Any) -> Picture:
        nonlocal most
        found = read(*args)
        made.append(weakref.ref(found.tensors["pixel_values"]))
        most = max(most, sum(one() is not None for one in made))
        return found

    monkeypatch.setattr(PictureReader, "read", counted)
    assert main(["generate", model, *write_prompts(tmp_path, 7)]) == 0
    assert most <= 4  # those that have room, and the ones that come and go


def test_a_picture_that_changes_before_its_turn_is_refused(model, tmp_path, capsys, monkeypatch):
    load = moe_runtime.load

    def change_and_load(*args: Any, **options: Any) -> Any:
        (tmp_path / "0.png").write_bytes(pc.png(pc.picture(9)))
        return load(*args, **options)

    monkeypatch.setattr(moe_runtime, "load", change_and_load)
    assert main(["generate", model, *write_prompts(tmp_path, 1)]) == 2
    assert "line 1: a picture has changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"no picture", "is not a whole picture in PNG"),
        (pc.png(pc.picture(0))[:-40], "is not a whole picture in PNG"),
        (pc.png(Image.new("1", (9000, 5000))), "9000 x 5000 pixels"),
    ],
    ids=["text", "cut", "too many pixels"],
)
def test_a_file_that_is_no_picture_is_refused_in_a_line(model, picture, capsys, content, complaint):
    picture.write_bytes(content)
    assert main(["run", model, "-p", QUESTION, "--image", str(picture), *OPTIONS]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line
    assert picture.name in line
    assert " object at " not in line


def test_a_picture_that_is_not_there_is_named(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", TypedLines())
    monkeypatch.setattr(terminal, "typed_messages", lambda *_: iter(["/image gone.png"]))
    assert main(["chat", model, *OPTIONS]) == 0
    assert "moe-runtime: gone.png: No such file or directory\n" in capsys.readouterr().err
    words = write_prompts(tmp_path, 2)
    (tmp_path / "1.png").unlink()
    assert main(["generate", model, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"line 2: .*1\.png: No such file or directory", line)


def test_what_takes_no_pictures_says_so(picture, capsys):
    assert main(["run", str(pocket_path()), "-p", "x", "--image", str(picture)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "takes no pictures" in line
