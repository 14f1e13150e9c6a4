"""`moe-runtime generate`: texts as `run` gives them, a file that any end leaves sound, errors."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.cli.main import main
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.batches import batch_run
from moe_runtime.serving.batches.offline import AnswerFile
from moe_runtime.serving.requests import EngineOptions
from moe_runtime.serving.sampling import Sampler
from moe_runtime.serving.scheduling import Scheduler

TEXTS = ["The for statement", "A class is", "def main(", "Lists are mutable"]
OPTIONS = ["--host-memory", "64MiB", "--dtype", "float32", "-n", "16", "--policy", "lru"]
OPTIONS += ["--prefetch", "off", "--json"]


def write_prompts(folder: Path, lines: list[Any]) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def generate(prompts: Path, output: Path, *words: str, model: Any = None) -> int:
    named = ["--prompts", str(prompts), "-o", str(output)]
    return main(["generate", str(model or pocket_path()), *named, *OPTIONS, *words])


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def pocket_with(folder: Path, **settings: Any) -> Path:
    """The bundled model with other settings of generation."""
    model = folder / "pocket"
    model.mkdir(exist_ok=True)
    for file in pocket_path().iterdir():
        if file.name != "generation_config.json" and not (model / file.name).exists():
            (model / file.name).symlink_to(file)
    (model / "generation_config.json").write_text(json.dumps(settings))
    return model


@pytest.fixture(autouse=True)
def _handlers() -> Any:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_texts_are_those_of_run_in_the_order_of_the_prompts_whatever_interrupts(
    tmp_path, monkeypatch, capsys
):
    """SIGTERM behind the first answer, then a torn line; the same command goes on.

    Lines in OpenAI's format answer in its form, and end before their stop string.
    """
    plain = write_prompts(tmp_path, TEXTS)
    run = ["run", str(pocket_path()), "--prompts", str(plain), *OPTIONS]
    assert main(run) == 0
    expected = [result["text"] for result in json.loads(capsys.readouterr().out)["results"]]

    body = {"prompt": TEXTS[1], "stop": [expected[1][9:14]], "max_tokens": 16}
    wrapped = {"custom_id": "own", "method": "POST", "url": "/v1/completions", "body": body}
    lines = [{"prompt": text, "max_tokens": 16 - 4 * n} for n, text in enumerate(TEXTS)]
    prompts, output = write_prompts(tmp_path, [*lines, wrapped]), tmp_path / "out.jsonl"
    real = AnswerFile.add

    def terminate(self: Any, record: Any) -> None:
        real(self, record)
        signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patches:
        patches.setattr(AnswerFile, "add", terminate)
        assert generate(prompts, output) == 143
    assert "the same command goes on from there" in capsys.readouterr().err
    num_before = len(records(output))
    # those that had ended by the time that the engine stopped too
    assert num_before >= 1

    with output.open("a") as file:
        file.write('{"id": "batch_req_7')
    assert generate(prompts, output) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["requests"], told["kept"], told["failed"]) == (5, num_before, 0)
    assert told["answered"] == 5 - num_before
    *found, answered = records(output)
    assert [one["prompt"] for one in found] == TEXTS
    # every token of this model's text is at least one character
    assert [one["text"] for one in found] == [
        text if one["new_tokens"] == 16 else text[: len(one["text"])]
        for text, one in zip(expected, found, strict=True)
    ]
    assert [one["new_tokens"] for one in found] == [16, 12, 8, 4]
    (choice,) = answered["response"]["body"]["choices"]
    assert (answered["custom_id"], answered["error"]) == ("own", None)
    assert (choice["text"], choice["finish_reason"]) == (expected[1][:9], "stop")

    whole = output.read_bytes()
    assert generate(prompts, output) == 0
    assert json.loads(capsys.readouterr().out)["answered"] == 0
    assert output.read_bytes() == whole


def test_as_many_run_at_a_time_as_memory_has_room_for(tmp_path, monkeypatch):
    running: list[int] = []
    real = Scheduler.make_room

    def make_room(scheduler: Scheduler, sequences: Any) -> Any:
        running.append(len(scheduler.running))
        return real(scheduler, sequences)

    monkeypatch.setattr(Scheduler, "make_room", make_room)
    lines = [{"prompt": [5 + n], "max_tokens": 7, "ignore_eos": True} for n in range(48)]
    prompts, output = write_prompts(tmp_path, lines), tmp_path / "out.jsonl"
    assert generate(prompts, output, "--max-tokens", "1280") == 0
    assert len(records(output)) == 48
    assert max(running) > EngineOptions().most_running


def test_stop_strings_of_the_checkpoint_end_answers_as_those_of_a_line_do(tmp_path, capsys):
    prompts = write_prompts(tmp_path, [TEXTS[0], {"prompt": TEXTS[0], "ignore_eos": True}])
    assert generate(prompts, tmp_path / "whole.jsonl") == 0
    whole = records(tmp_path / "whole.jsonl")[0]["text"]
    settings = json.loads((pocket_path() / "generation_config.json").read_text())
    stop = whole[9:14]
    model = pocket_with(tmp_path, **{**settings, "stop_strings": stop})
    assert generate(prompts, tmp_path / "cut.jsonl", model=model) == 0
    cut, ignored = records(tmp_path / "cut.jsonl")
    assert (cut["text"], cut["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    assert cut["new_tokens"] < 16
    assert (ignored["text"], ignored["finish_reason"]) == (whole, "length")

    pocket_with(tmp_path, **{**settings, "stop_strings": [3]})
    capsys.readouterr()
    assert generate(prompts, tmp_path / "none.jsonl", model=model) == 2
    assert "expected stop_strings to be texts" in capsys.readouterr().err


def test_the_text_of_an_end_token_is_no_part_of_an_answer(tmp_path, tokenizer, pocket):
    """A token that is not special, as a full stop may be; the server's answers are the same."""
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    tokens = pocket.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist()
    end = next(token for at, token in enumerate(tokens) if at > 3 and token not in tokens[:at])
    before = tokens[: tokens.index(end)]
    assert end not in tokenizer.all_special_ids
    model = pocket_with(tmp_path, eos_token_id=[0, end])
    prompts = write_prompts(tmp_path, [TEXTS[0], {"prompt": TEXTS[0], "ignore_eos": True}])
    assert generate(prompts, tmp_path / "out.jsonl", model=model) == 0
    cut, ignored = records(tmp_path / "out.jsonl")
    assert (cut["text"], cut["finish_reason"]) == (tokenizer.decode(before), "stop")
    assert cut["new_tokens"] == len(before) + 1
    assert (ignored["text"], ignored["finish_reason"]) == (tokenizer.decode(tokens), "length")


@pytest.fixture
def never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import moe_runtime

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setitem(vars(moe_runtime), "load", load)


def test_lines_are_judged_before_a_model_is_fetched(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(batch_run, "open_checkpoint", lambda *_, **__: 1 / 0)
    too_long = write_prompts(tmp_path, [{"prompt": [4096]}])
    assert generate(too_long, tmp_path / "out.jsonl") == 2
    assert "line 1: token 4096 is none of" in capsys.readouterr().err
    monkeypatch.setattr(batch_run, "find_checkpoint", lambda *_, **__: 1 / 0)
    assert generate(write_prompts(tmp_path, [{"best": 1}]), tmp_path / "out.jsonl") == 2
    assert "line 1: messages is missing" in capsys.readouterr().err


@pytest.mark.usefixtures("never_loaded")
@pytest.mark.parametrize(
    ("line", "words", "complaint"),
    [
        ({"prompt": "a", "best": 1}, (), "in.jsonl, line 2: best is not supported"),
        ({"prompt": ""}, (), "in.jsonl, line 2: the prompt is empty"),
        ({"prompt": [4096]}, (), "line 2: token 4096 is none of the model's vocabulary of 4096"),
        (
            {"prompt": "a", "model": "gpt"},
            (),
            "line 2: asks for model 'gpt', but this one is 'pock",
        ),
        ({"prompt": "a", "max_tokens": 10**6}, (), "line 2: the prompt has 1 token and 1000000"),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            (),
            "line 2: this model's tokenizer has",
        ),
        ("a", ("--chat",), "in.jsonl, line 1: this model's tokenizer has no chat template"),
        ("a b c", ("--max-tokens", "16"), "--max-tokens 16 is too small: "),
    ],
)
def test_what_cannot_be_answered_is_refused_before_the_model_is_loaded(
    tmp_path, capsys, line, words, complaint
):
    output = tmp_path / "out.jsonl"
    assert generate(write_prompts(tmp_path, ["a", line]), output, *words) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert not output.exists()


def test_answers_computed_in_another_way_are_not_gone_on_with(tmp_path, monkeypatch):
    prompts = write_prompts(tmp_path, ["a"])
    asked: list[frozenset[str]] = []

    def note(_: Any, path: Path, ids: Any) -> None:
        asked.append(frozenset(ids))
        raise ValueError("this is where it ends")

    monkeypatch.setattr(AnswerFile, "__init__", note)
    words = ["generate", str(pocket_path()), "--prompts", str(prompts), "-o", str(tmp_path / "o")]
    others = (
        *("--dtype float32", "--kv-cache int8", "--activations int8", "--skip-below 0.3"),
        *("--routing cache-aware:0.1", "--misses stand-in"),
    )
    # the checkpoint's own type is bf16, and where a miss is computed is no loss
    for same in ("--dtype auto", "--dtype bfloat16", "--misses auto", *others):
        assert main([*words, *same.split()]) == 2
    assert asked[0] == asked[1] == asked[2]
    assert len({*asked}) == 1 + len(others)


def test_the_table_has_the_reasons_if_asked_and_failures_their_code(tmp_path, monkeypatch, capsys):
    def choose(self: Any, logits: Any, answer_ids: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Sampler, "choose", choose)
    prompts, output = write_prompts(tmp_path, ["a"]), tmp_path / "out.jsonl"
    words = [str(pocket_path()), "--prompts", str(prompts), "-o", str(output)]
    assert main(["generate", *words, "--host-memory", "64MiB", "--policy", "auto", "-v"]) == 2
    error = capsys.readouterr().err
    assert "1 of 1 requests failed" in error
    assert "even shares: " in error  # the reason, which the table has with -v alone
    (record,) = records(output)
    assert record["error"]["code"] == "generation_failed"
    assert "Input/output error" in record["error"]["message"]


def test_an_end_before_the_first_answer_promises_no_file(tmp_path, monkeypatch, capsys):
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(batch_run, "answer_all", interrupted)
    assert generate(write_prompts(tmp_path, TEXTS), tmp_path / "out.jsonl") == 130
    said = "moe-runtime: nothing was answered yet; the same command goes on from there\n"
    assert capsys.readouterr().err.endswith(said)
    assert not (tmp_path / "out.jsonl").exists()
