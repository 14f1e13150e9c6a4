"""Records to fine-tune on: files, masks on published chat templates, packing, runs."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from chat_formats import CONVERSATION, FORMATS, HERMES, HERMES_WRITTEN, TOOLS, WITH_TOOLS, Format
from finetuning_runs import (
    MIXTRAL,
    PARTS,
    SEQUENCES,
    checkpoint_of,
    config_of,
    resident,
    run_losses,
    train,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_families import FAMILIES, Family
from text_checkpoint import tiny_tokenizer
from tiny_checkpoints import tiny_model
from torch.nn.functional import cross_entropy

from moe_runtime.cli.main import main
from moe_runtime.errors import CheckpointError, MoERuntimeWarning
from moe_runtime.inference.routing_replay import encode_routing, replay_routing
from moe_runtime.lab.traces import read_trace
from moe_runtime.training.data import looks_like_chat
from moe_runtime.training.examples import (
    PADDING,
    TRAINED,
    Examples,
    ExampleStream,
    held_out_rows,
    trimmed,
)
from moe_runtime.training.finetune.checkpoint_model import CheckpointModel, shares_rows
from moe_runtime.training.finetune.finetune_run import prepare, start
from moe_runtime.training.finetune.records import read_records
from moe_runtime.training.finetune.rendering import Renderer, encode_records, parts_of
from moe_runtime.training.ranks import OneRank
from moe_runtime.training.run_config import DataConfig, SourceConfig

CHAT = FORMATS["qwen2_moe"]


def tokenizer_of(form: Format) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": form.specials})
    tokenizer.eos_token, tokenizer.chat_template = form.end, form.template
    return tokenizer


def written(form: Format, record: dict[str, Any]) -> str:
    """A record as it is trained on, targets in double brackets."""
    tokenizer = tokenizer_of(form)
    renderer = Renderer(tokenizer, tokenizer.convert_tokens_to_ids([*form.stops]), 999)
    document = renderer.document("here", record)
    parts = parts_of(tokenizer, Examples.of([document], shares_rows=True), 0)
    return "".join(f"[[{text}]]" if is_trained else text for text, is_trained in parts)


@pytest.mark.parametrize("name", FORMATS)
def test_answers_alone_are_targets_on_published_templates(name):
    form = FORMATS[name]
    assert written(form, {"messages": CONVERSATION}) == form.written


def test_tools_and_earlier_answers():
    form = Format(HERMES, HERMES_WRITTEN, "<|im_end|>")
    assert written(form, {"messages": WITH_TOOLS, "tools": json.dumps(TOOLS)}) == HERMES_WRITTEN
    asked = {"prompt": CONVERSATION[:3], "completion": CONVERSATION[3:]}
    expected = CHAT.written.replace("[[", "", 1).replace("]]", "", 1)
    assert written(CHAT, asked) == expected
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    listed, joined = (
        [{"role": "user", "content": own}, CONVERSATION[1]] for own in (parts, "H\ni")
    )
    found = written(CHAT, {"messages": json.dumps(listed)})
    assert found == written(CHAT, {"messages": joined})


def test_answers_of_weight_zero_are_read_alone():
    for form in (CHAT, FORMATS["marked"]):
        assert form.written.count("[[") > 1
        weights = iter((0, 1))
        messages = [
            {**own, "weight": next(weights, 1)} if own["role"] == "assistant" else own
            for own in CONVERSATION
        ]
        expected = form.written.replace("[[", "", 1).replace("]]", "", 1)
        assert written(form, {"messages": messages}) == expected


def test_other_kinds_of_records():
    assert written(CHAT, {"prompt": "2+2=", "completion": "4"}) == "2+2=[[4<|im_end|>]]"
    assert written(CHAT, {"text": "a b"}) == "a[[ b<|im_end|>]]"
    ids = tokenizer_of(CHAT)("a b").input_ids
    assert written(CHAT, {"input_ids": ids, "labels": [-100, *ids[1:]]}) == "a[[ b]]"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": CONVERSATION[:1]}, "here: has no message of the assistant"),
        ({"messages": []}, "expected a list of messages, got an empty list"),
        ({"messages": "hi"}, r"messages is text that is not JSON \(Expecting value: column 1\)"),
        ({"messages": CONVERSATION, "text": "a"}, "here: has messages and text, .* keep only one"),
        ({"prompt": "a", "completion": "b", "input_ids": [1]}, "prompt/completion and input_ids"),
        ({"completion": "a"}, "prompt is missing; expected"),
        ({"messages": [{"content": "x"}]}, "message 1 has no role"),
        *(
            ({"messages": [{"role": "user", "content": own}]}, f"message 1 has .*not text: {came}")
            for own, came in [(["a", {"type": "image"}], "{'type': 'image'}"), (3, "3")]
        ),
        ({"messages": CONVERSATION[1:]}, "here: begins with an answer"),
        ({"messages": [{**CONVERSATION[0], "weight": 2}]}, "message 1 has a weight of 2"),
        ({"messages": CONVERSATION, "tools": 5}, "expected a list as tools, got 5"),
        *(
            (
                {"messages": CONVERSATION, "chat_template_kwargs": own},
                f"chat_template_kwargs {came}",
            )
            for own, came in [([1], "must be an object"), ({"tokenize": 1}, "cannot set tokenize")]
        ),
        (
            {"prompt": "x"},
            "completion is missing; expected messages, prompt and .* got the keys prompt",
        ),
        ({"text": 3}, "expected text as text, got int"),
        ({"input_ids": [1, 2], "labels": [1]}, "as many labels as input_ids, got 1 of 2"),
        ({"input_ids": 7}, "a list of numbers as input_ids, got 7"),
        *(
            ({"input_ids": [1, own]}, f"here: input_ids has {own}, expected .* below 999,")
            for own in (-1, 2.5, True, None, 999, 10**19)
        ),
        ({"input_ids": [1, 2], "labels": [1, 3]}, "got 3 at 2"),
        ({"messages": CONVERSATION, "tools": "{"}, "tools is text that is not JSON"),
        (
            {"messages": [*CONVERSATION, {"role": "assistant", "tool_calls": 5}]},
            "tool_calls, got 5",
        ),
    ],
)
def test_bad_records_are_named(record, expected):
    with pytest.raises(ValueError, match=expected):
        written(CHAT, record)


def test_answers_that_later_messages_change_are_refused():
    template = (
        "{% for m in messages %}{{ m.role + ': ' }}{{ m.content if loop.last else 'gone' }}"
        "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    form = Format(template, "", "<|im_end|>")
    with pytest.raises(ValueError, match="here: the chat template writes message 2 otherwise when"):
        written(form, {"messages": CONVERSATION})
    broken = Format("{{ raise_exception('no') }}", "", "<|im_end|>")
    with pytest.raises(CheckpointError, match=r"here: the chat template cannot be used.*no"):
        written(broken, {"messages": CONVERSATION})


def test_files_of_records(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra finetune has it")
    from pyarrow import parquet

    records = [{"text": "a"}, {"messages": [{"role": "user", "content": "b"}]}]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n\n".join(map(json.dumps, records)))
    (tmp_path / "b.json").write_text(json.dumps(records))
    (tmp_path / "c.json").write_text("\n".join(map(json.dumps, records)))
    rows = [{"text": None, "messages": None} | record for record in records]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    for file in tmp_path.iterdir():
        found = list(read_records([file]))
        assert [record for _, record in found] == records, file
        assert all(place.startswith(f"{file}: ") for place, _ in found)
    nulls = {"messages": [{"arguments": {"unit": None}}]}  # a tool's arguments may have some
    (tmp_path / "n.jsonl").write_text(json.dumps(nulls | {"text": None}))
    assert [record for _, record in read_records([tmp_path / "n.jsonl"])] == [nulls]
    for name, text, expected in [
        ("e.jsonl", '{"text": "a"}\n[1]', r"e\.jsonl: line 2 is not a JSON object"),
        ("f.json", '[{"text": "a"}, 1]', r"f\.json: record 2 is not a JSON object"),
        ("g.json", "[", r"g\.json: is not JSON"),
        ("k.json", b"[\xe4]", r"k\.json: is not UTF-8 \(byte 2\)"),
        ("i.jsonl", b"\x1f\x8b", r"i\.jsonl: line 1 is not UTF-8"),
        ("j.jsonl", '{"text": "a"\n', r"line 1 is not a JSON object \([^;]*: column 13\);"),
        ("h.parquet", "PAR1", r"h\.parquet: cannot be read as Parquet"),
    ]:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises((ValueError, CheckpointError), match=expected):
            list(read_records([tmp_path / name]))


@given(
    lengths=st.lists(st.integers(2, 11), min_size=1, max_size=40),
    seed=st.integers(0, 3),
    shares=st.booleans(),
)
@settings(max_examples=40)
def test_an_epoch_has_every_document_once_and_whole(lengths, seed, shares):
    documents = [
        (list(range(100 * n, 100 * n + length)), [True] * length)
        for n, length in enumerate(lengths)
    ]
    examples = Examples.of(documents, shares_rows=shares)
    stream = ExampleStream(examples, context=10, seed=(seed,))
    orders = []
    for epoch in range(2):
        numbers = range(epoch * stream.windows_per_epoch, (epoch + 1) * stream.windows_per_epoch)
        rows = np.stack([stream.window(number) for number in numbers])
        tokens = rows[rows[..., 2] != PADDING]
        assert sorted(tokens[:, 0].tolist()) == sorted(i for ids, _ in documents for i in ids)
        assert (tokens[:, 0] % 100 == tokens[:, 1]).all()
        assert ((tokens[:, 2] == TRAINED) == (tokens[:, 1] > 0)).all()
        orders.append(rows[:, 0, 0].tolist())
    # any fit leaves at most one row half empty
    most = 2 * sum(lengths) // 11 + 1 if shares else len(lengths)
    assert stream.windows_per_epoch <= most


def test_held_out_rows_are_of_all_lengths():
    documents = [([70_000] * length, [True] * length) for length in [90] * 20 + [9] * 200]
    examples = Examples.of(documents, shares_rows=True)
    rows = held_out_rows(examples, context=99, most_tokens=10 * 99)
    with_long = int((rows[..., 1] == 89).any(1).sum())
    assert len(rows) == 10
    assert 0 < with_long < 10, "20 of 37 rows have one, and packing places them first"
    assert (rows[..., 0][rows[..., 2] != PADDING] == 70_000).all()
    assert (examples.ids.dtype, examples.trained.dtype) == (np.uint32, np.bool_)
    assert Examples.of([([65_535], [True])], shares_rows=True).ids.dtype == np.uint16
    assert len(held_out_rows(Examples.of([], shares_rows=True), context=9, most_tokens=9)) == 0


def rows_of(lengths: list[int], shares: bool) -> torch.Tensor:
    torch.manual_seed(1)
    documents = [(torch.randint(1, 90, (n,)).tolist(), [True] * n) for n in lengths]
    examples = Examples.of(documents, shares_rows=True)
    numbers = range(len(lengths))
    context = sum(lengths) + 3 if shares else max(lengths) + 3
    rows = [[*numbers]] if shares else [[number] for number in numbers]
    return trimmed(torch.from_numpy(np.stack([examples.row(row, context) for row in rows])))


def check_family(family: Family) -> None:
    """One pass over all documents against a pass over each alone."""
    model = tiny_model(family).train()
    lengths = [37, 23, 4]
    rows = rows_of(lengths, shares_rows(model))
    found = CheckpointModel(model).losses(rows[:, :-1], rows[:, 1:]).cross_entropy
    total = torch.zeros((), dtype=torch.float64)
    for ids, length in zip(rows_of(lengths, False)[..., 0], lengths, strict=True):
        alone = ids[None, :length]
        with torch.no_grad():
            logits = model(input_ids=alone[:, :-1], use_cache=False).logits.double()
        total += cross_entropy(logits[0], alone[0, 1:], reduction="sum")
    expected = total / (sum(lengths) - len(lengths))
    # sums of fp32 products in another order
    assert float(found.detach()) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("folder", ["mixtral", "gpt_oss", "jamba", "qwen3_next"])
def test_packed_documents_do_not_see_each_other(folder):
    check_family(next(family for family in FAMILIES if family.folder == folder))


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_packed_documents_do_not_see_each_other_in_any_family(family):
    model = tiny_model(family)
    text = model.config.get_text_config()
    if getattr(text, "index_topk", None) or not hasattr(model, "lm_head"):
        pytest.skip("chooses keys, which rounding decides, or predicts no text")
    check_family(family)


def chat_checkpoint(family: Family, folder: Path) -> Path:
    """With the tokens that there are: the end of a text ends a message."""
    checkpoint_of(family, folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] + ':' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


def write_chats(path: Path, number: int = 9) -> Path:
    """Conversations of different lengths, and numbers of answers."""
    with path.open("w") as file:
        for n in range(number):
            messages = [
                {"role": role, "content": text * (1 + n % 3)}
                for _ in range(1 + n % 2)
                for role, text in (("user", f"store {n} "), ("assistant", "it reads "))
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def chat_config(family: Family, tmp_path: Path, **changes: Any) -> Any:
    data = {
        "sources": {"text": {"files": [str(write_chats(tmp_path / "chats.jsonl"))]}},
        **{"context": 96, "tokens_per_step": 96 * 4, "micro_batches": 2, "held_out_share": 0.0},
    }
    return config_of(chat_checkpoint(family, tmp_path / "first"), tmp_path, data=data, **changes)


def test_every_target_of_a_step_counts_the_same(tmp_path):
    """Against the mean over the targets of documents that are computed alone, in fp64."""
    config = chat_config(MIXTRAL, tmp_path)
    preparation = prepare(config)
    trainer = start(preparation, resume=False)
    found = train(trainer, stop_after=1)
    trainer.close()
    model = resident(tmp_path / "first", torch.float64)
    total, count = 0.0, 0
    for row in prepare(config).batches.draw(4):
        begins = [*np.flatnonzero((row[:, 1] == 0) & (row[:, 2] != PADDING)), None]
        for begin, end in itertools.pairwise(begins):
            own = torch.from_numpy(row[begin:end][row[begin:end, 2] != PADDING])
            targets = own[1:, 0].where(own[1:, 2] == TRAINED, -100)
            with torch.no_grad():
                logits = model(input_ids=own[None, :-1, 0]).logits[0]
            total += float(cross_entropy(logits, targets, reduction="sum"))
            count += int((targets >= 0).sum())
    assert found == [pytest.approx(total / count, rel=1e-5)]


def test_a_trace_has_documents_and_no_padding(tmp_path):
    file = tmp_path / "routing.npz"
    run = {"trace": str(file), "steps": 2, "trace_steps": 2}
    config = chat_config(MIXTRAL, tmp_path, run=run)
    trainer = start(prepare(config), resume=False)
    train(trainer, stop_after=2)
    trainer.close()
    trace, windows = read_trace(file), torch.from_numpy(prepare(config).batches.draw(2 * SEQUENCES))
    parts = [trimmed(part)[:, :-1].numpy() for part in windows.chunk(2 * PARTS)]
    tokens = np.concatenate([part[part[..., 2] != PADDING] for part in parts])
    assert len(tokens) < sum(part[..., 0].size for part in parts)
    assert trace.token_id.tolist() == tokens[:, 0].tolist()
    assert trace.token_position.tolist() == tokens[:, 1].tolist()
    assert trace.token_request.tolist() == (np.cumsum(tokens[:, 1] == 0) - 1).tolist()
    assert (trace.expert_ids != trace.absent).all()


def test_records_go_on_to_the_bit(tmp_path):
    config = chat_config(MIXTRAL, tmp_path, run={"output": str(tmp_path / "whole"), "steps": 5})
    whole = run_losses(config, stop_after=5)
    config = chat_config(MIXTRAL, tmp_path, run={"steps": 5})
    losses = run_losses(config, stop_after=2)
    with mock.patch.object(Renderer, "document", side_effect=AssertionError):  # rendered before
        trainer = start(prepare(config), resume=True)
    losses += train(trainer, stop_after=5)
    trainer.close()
    assert losses == whole
    assert prepare(config).batches.windows_per_epoch < 5 * 4, "more than one epoch"
    write_chats(tmp_path / "chats.jsonl", 8)
    with pytest.raises(CheckpointError, match="text of source 'text'"):
        start(prepare(config), resume=True)


def test_records_replay_the_experts_that_a_server_chose(tmp_path):
    """The first loss is that of passes of each document alone under `replay_routing`."""
    random = np.random.default_rng(3)
    ids = [random.integers(2, 90, length).tolist() for length in (9, 14, 11, 17)]
    routed = [random.permuted(np.tile(np.arange(4), (len(own) - 1, 2, 1)), axis=-1) for own in ids]
    routed = [own[..., :2].astype(np.uint8) for own in routed]
    lines = [
        {"input_ids": own, **({} if n == 1 else {"routed_experts": encode_routing(routed[n])})}
        for n, own in enumerate(ids)
    ]
    chat_checkpoint(MIXTRAL, tmp_path / "first")
    file = tmp_path / "routed.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {
        "sources": {"text": {"files": [str(file)]}},
        **{"context": 32, "tokens_per_step": 64, "micro_batches": 2, "held_out_share": 0.0},
    }
    config = config_of(tmp_path / "first", tmp_path, data=data)
    found = run_losses(config, stop_after=1)
    model = resident(tmp_path / "first", torch.float64)
    total = 0.0
    for n, own in enumerate(ids):
        known = routed[n] if n != 1 else np.zeros((0, 2, 2), int)
        with torch.no_grad(), replay_routing(model, [known]):
            logits = model(input_ids=torch.tensor([own])).logits[0, :-1]
        total += float(cross_entropy(logits, torch.tensor(own[1:]), reduction="sum"))
    assert found == [pytest.approx(total / (sum(map(len, ids)) - len(ids)), rel=1e-5)]
    lines[0]["routed_experts"] = encode_routing(np.zeros((2, 3, 2), int))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"line 1: expected routed_experts of 9 tokens at most, 2"):
        prepare(config)
    lines[0]["routed_experts"] = encode_routing(np.zeros((2, 2, 2), np.uint8))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"line 1: routed_experts of token 0, layer 0 names an"):
        prepare(config)
    file.write_text(json.dumps({"text": "a", "routed_experts": lines[0]["routed_experts"]}))
    with pytest.raises(ValueError, match="are of input_ids, which the record has not"):
        prepare(config)


def test_a_run_that_gets_no_better_ends(tmp_path, monkeypatch):
    held_out = str(write_chats(tmp_path / "held.jsonl", 3))
    config = chat_config(MIXTRAL, tmp_path, run={"steps": 9, "evaluate_every": 1, "patience": 2})
    with pytest.raises(ValueError, match="patience needs held-out text"):
        prepare(config)
    short = dataclasses.replace(config.data, short_context=48)
    with pytest.raises(ValueError, match="short_context divides text"):
        prepare(dataclasses.replace(config, data=short))
    measured = iter([3.0, 2.0, 2.5, 2.0, *[1.0] * 5])
    monkeypatch.setattr(
        "moe_runtime.training.loop.Trainer._held_out_loss", lambda *_: next(measured)
    )
    data = chat_config(MIXTRAL, tmp_path).data
    source = dataclasses.replace(data.sources["text"], held_out_files=(held_out,))
    config = dataclasses.replace(config, data=dataclasses.replace(data, sources={"text": source}))
    for stop in (3, 9):  # what was measured before counts after an interruption
        trainer = start(prepare(config), resume=stop == 9)
        train(trainer, stop_after=stop)
        trainer.close()
    assert trainer.step == 4
    monkeypatch.setattr(OneRank, "rank", 1)  # what rank 0 alone decides, others do not
    trainer = start(prepare(config), resume=True)
    train(trainer, stop_after=9)
    trainer.close()
    assert trainer.step == 9


def test_command(tmp_path, capsys, monkeypatch):
    folder = chat_checkpoint(MIXTRAL, tmp_path / "first")
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    write_chats(Path("data/chats.jsonl"), 40)
    Path("data/notes.txt").write_text("which are left out")
    words = ["finetune", str(folder), "data", "--context", "30", "--sequences", "2"]
    words += ["--host-memory", "1GiB", "-o", "out"]
    assert main([*words, "--dry-run", "--epochs", "2", "--json"]) == 0
    shown = capsys.readouterr()
    assert "of 40 records are longer than the context of 30 tokens and were cut" in shown.err
    plan = json.loads(shown.out)
    about = plan["examples"]
    assert (about["packed"], about["number"] + about["held_out"]) == (True, 40)
    assert about["first"][0][0][1] is False
    assert plan["steps"] == about["rows"]
    assert main([*words, "--dry-run"]) == 0
    assert "[[" in capsys.readouterr().out
    assert main([*words, "--steps", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["held_out_mean"] > 0
    for more, expected in [
        (["data/notes.txt"], "error: data/notes.txt is a text file and others hold records"),
        (["data/no.jsonl"], "no file matches 'data/no.jsonl'; name a file or folder that is there"),
        (["--steps", "2", "--epochs", "2"], "--epochs says how long a run is"),
        (["--epochs", "0"], "--epochs must be positive"),
        (["--held-out", "data", "--held-out-share", "0.5"], "--held-out-share is for runs without"),
        (["--patience", "2"], "--patience counts measurements"),
    ]:
        place = 3 if more[0].startswith("data") else len(words)
        assert main([*words[:place], *more, *words[place:], "--dry-run"]) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
        assert expected in line


@pytest.mark.parametrize(
    ("records", "sequences", "length", "steps", "unseen"),
    [
        (10, 4, [], 3, 0),
        (8, 4, [], 2, 0),
        (3, 4, [], 1, 0),
        (10, 1, ["--epochs", "1.1"], 11, 0),
        (10, 4, ["--steps", "2"], 2, 2),
    ],
)
def test_no_row_of_an_epoch_is_left_out(
    records, sequences, length, steps, unseen, tmp_path, capsys
):
    """Records that each fill a row, told apart by their first ids."""
    folder, file = checkpoint_of(MIXTRAL, tmp_path / "first"), tmp_path / "ids.jsonl"
    ids = [[number, *range(20, 36)] for number in range(records)]
    file.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids))
    words = ["finetune", str(folder), str(file), "--context", "16", "--held-out-share", "0"]
    words += ["--host-memory", "1GiB", "-o", str(tmp_path / "out")]
    words += ["--sequences", str(sequences), *length]
    assert main([*words, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    examples = Examples.of([(row, [True] * 17) for row in ids], shares_rows=True)
    stream = ExampleStream(examples, context=16, seed=(0, 0))
    drawn = {int(stream.window(number)[0, 0]) for number in range(sequences * plan["steps"])}
    assert plan["steps"] == steps
    assert plan["drawn_rows"] == sequences * steps
    assert plan["unseen_rows"] == records - len(drawn) == unseen
    assert main([*words, "--dry-run"]) == 0
    assert f"{unseen} never trained on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "is_chat"),
    [
        ("User: a\nAssistant: b\n", True),
        ("**User**: a\n**Assistant**: b\n", True),
        ("### Instruction:\na\n\n### Response:\nb\n", True),
        ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb", True),
        ("<|user|>\na\n<|assistant|>\nb", True),
        ("User interfaces have grown.\nResponse times fell: by half.\n", False),
        ("Users: three\nResponses: none\n", False),
        ("User: a\nUser: b\n", False),
    ],
)
def test_chat_is_told_from_prose(text, is_chat):
    assert looks_like_chat(text) == is_chat


@pytest.mark.parametrize(
    ("texts", "share", "expected"),
    [
        (["ab"], 0.9, (1, 0, None)),
        (["ab", "abc", "abcd"], 0.999999, (1, 2, None)),
        (["ab"] * 3, 0.999999, (3, 0, None)),  # a share goes by what a record says
        (["ab", ""], 0.0, (1, 0, "1 of 2 records have nothing to train on and were left out")),
        (["a" * 9], 0.0, (1, 0, None)),
        (["a" * 10], 0.0, (1, 0, "1 of 1 records are longer than the context of 8 tokens and")),
        ([], 0.0, r"small\.jsonl: no record there"),
        (["", ""], 0.0, r"small\.jsonl: none of 2 records has a target in the first 9 tokens"),
    ],
)
def test_small_data_sets(tmp_path, recwarn, texts, share, expected):
    path = tmp_path / "small.jsonl"
    ids = [{"input_ids": [ord(own) for own in text] or [1]} for text in texts]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in ids))
    source = SourceConfig(files=(str(path),))
    data = DataConfig(sources={"a": source}, context=8, tokens_per_step=8, held_out_share=share)
    renderer = Renderer(tokenizer_of(CHAT), (), 128)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            encode_records(data, "a", renderer, shares_rows=True)
        return
    found = encode_records(data, "a", renderer, shares_rows=True, cache=tmp_path)
    with mock.patch.object(Renderer, "document", side_effect=AssertionError):
        again = encode_records(data, "a", renderer, shares_rows=True, cache=tmp_path)
    assert again.fingerprint == found.fingerprint
    told = [str(warning.message) for warning in recwarn]
    assert (len(found.training.ends), len(found.held_out.ends)) == expected[:2]
    assert len(told) == (2 if expected[2] else 0), "what was rendered before is told again"
    assert all(line.startswith(str(expected[2])) for line in told)


def test_text_that_looks_like_chat_is_told(tmp_path):
    text = "User: What is it?\nAssistant: A store.\n" * 40
    (tmp_path / "told.jsonl").write_text(json.dumps({"text": text}))
    (tmp_path / "told.txt").write_text(text)
    for name in ("told.jsonl", "told.txt"):
        config = chat_config(MIXTRAL, tmp_path)
        source = dataclasses.replace(config.data.sources["text"], files=(str(tmp_path / name),))
        data = dataclasses.replace(config.data, sources={"text": source}, context=32)
        with pytest.warns(MoERuntimeWarning, match=rf"{name}.* looks like a conversation"):
            prepare(dataclasses.replace(config, data=dataclasses.replace(data, tokens_per_step=64)))
