"""A file of answers keeps whole lines, whatever interrupts it, and nothing that is not its own."""

import errno
import json
import os
from pathlib import Path

import pytest

from moe_runtime.errors import CheckpointError
from moe_runtime.serving.batches.offline import AnswerFile

IDS = [f"batch_req_{letter}" for letter in "abcd"]
ASKED = {one: number for number, one in enumerate(IDS)}


def record(number: int, **fields: object) -> dict[str, object]:
    return {"id": IDS[number], "text": "žluťoučký\n", **fields}


def numbers_of(path: Path) -> list[int]:
    return [ASKED[json.loads(line)["id"]] for line in path.read_text().splitlines()]


def test_answers_come_in_any_order_and_end_in_that_of_the_requests(tmp_path):
    path = tmp_path / "out.jsonl"
    with AnswerFile(path, ASKED) as answers:
        for number in (2, 0, 3):
            answers.add(record(number))
        assert numbers_of(path) == [2, 0, 3]
    with AnswerFile(path, ASKED) as answers:
        assert answers.answered == {0, 2, 3}
        answers.add(record(1))
        answers.finish()
    assert numbers_of(path) == [0, 1, 2, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_torn_last_line_is_repaired(tmp_path):
    path = tmp_path / "out.jsonl"
    whole = json.dumps(record(0)) + "\n"
    torn = json.dumps(record(1))
    for length in (1, 10, 25, len(torn)):
        path.write_text(whole + torn[:length])
        with AnswerFile(path, ASKED) as answers:
            assert answers.answered == {0}
        assert path.read_text() == whole


def test_nothing_is_left_behind_the_last_whole_line_while_more_are_written(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    whole = json.dumps(record(0)) + "\n"
    path.write_text(whole + json.dumps(record(1, text="x" * 500))[:400])
    with AnswerFile(path, ASKED) as answers:
        assert path.read_text() == whole

        def fail(descriptor: int, data: bytes, offset: int) -> int:
            if len(data) > 200:
                return pwrite(descriptor, data[:100], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        pwrite = os.pwrite
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fail)
            with pytest.raises(OSError, match="No space") as caught:
                answers.add(record(2, text="y" * 200))
        assert caught.value.filename == str(path)
        assert path.read_text() == whole
        answers.add(record(3))
        assert numbers_of(path) == [0, 3]


def test_a_failed_request_is_asked_again_and_has_one_line_in_the_end(tmp_path):
    path = tmp_path / "out.jsonl"
    with AnswerFile(path, ASKED) as answers:
        answers.add(record(1, error={"message": "a read failed"}))
        answers.add(record(0, error=None))
        answers.finish()
    assert numbers_of(path) == [0, 1]
    with AnswerFile(path, ASKED) as answers:
        assert answers.answered == {0}
        answers.add(record(1))
        answers.finish()
    assert [json.loads(line).get("error") for line in path.read_text().splitlines()] == [None, None]


@pytest.mark.parametrize(
    "text",
    [
        "my notes\n",
        "my notes",
        json.dumps(record(0)) + "\n" + '{"id": "chat-1"}\n',
        json.dumps(record(0) | {"id": "batch_req_of_others"}) + "\n",
    ],
)
def test_what_is_no_answer_to_these_requests_stays_as_it_is(tmp_path, text):
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"line [12]: .* give another --output"):
        AnswerFile(path, ASKED)
    assert path.read_text() == text


def test_a_torn_line_that_others_follow_may_be_removed(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text(
        json.dumps(record(0)) + '\n{"id": "batch_req_a"\n' + json.dumps(record(1)) + "\n"
    )
    with pytest.raises(CheckpointError, match=r"out\.jsonl, line 2: .* remove this line"):
        AnswerFile(path, ASKED)


def test_two_processes_cannot_write_the_same_file(tmp_path):
    path = tmp_path / "out.jsonl"
    with AnswerFile(path, ASKED), pytest.raises(BlockingIOError, match="another process"):
        AnswerFile(path, ASKED)


def test_a_run_without_answers_leaves_no_file_and_takes_none_away(tmp_path):
    path = tmp_path / "out.jsonl"
    with AnswerFile(path, ASKED):
        pass
    assert not path.exists()
    path.touch()
    with AnswerFile(path, ASKED):
        pass
    assert path.exists()


def test_links_are_followed(tmp_path):
    real, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(real)
    with AnswerFile(link, ASKED) as answers:
        answers.add(record(1))
        answers.add(record(0))
        answers.finish()
    assert link.is_symlink()
    assert numbers_of(real) == [0, 1]
