"""An engine verifies drafts of several sequences in one step, and answers as without drafts."""

from typing import Any

import moe_families
import pytest
import torch
from engine_events import Answer, ask_all, drained, request_of
from scripted_drafts import EveryDraft, Scripted, Told
from tiny_checkpoints import save, tiny_model

import moe_runtime
from moe_runtime.errors import MoERuntimeError, MoERuntimeWarning
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.requests import EngineOptions, SamplingOptions

NEW = 24
SETTINGS = {"device": "cpu", "host_memory": "64MiB", "max_tokens": 512}
PROMPTS = [(5, 7, 11, 13), (40, 3, 9, 3, 9, 3), (17,), (8, 8, 8, 60, 61)]


class Known:
    """Drafts for whichever text begins as the sequence does."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts, self.tokens = texts, list[int]()

    def extend(self, tokens: Any) -> None:
        self.tokens += tokens

    def offer(self, most: int) -> Any:
        (whole,) = [text for text in self.texts if text[:4] == self.tokens[:4]] or [self.tokens]
        self.told = Told(whole)
        self.told.extend(self.tokens)
        return self.told.offer(most)

    def draft(self, count: int) -> list[int]:
        return self.told.draft(count)


def drafts_for(model: Any, prompts: Any, answers: list[Answer]) -> EveryDraft:
    texts = [[*prompt, *answer.ids] for prompt, answer in zip(prompts, answers, strict=True)]
    model._drafts.source = Scripted(lambda: Known(texts))
    model._drafts.control = EveryDraft(model._drafts.control.most_rows)
    return model._drafts.control


def requests(**sampling: Any) -> Any:
    options = SamplingOptions(**sampling)
    return [request_of(prompt, NEW, sampling=options, num_logprobs=2) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def pair() -> Any:
    plain: Any = moe_runtime.load(pocket_path(), **SETTINGS)
    drafted: Any = moe_runtime.load(pocket_path(), draft="lookup", **SETTINGS)
    with plain.moe, drafted.moe:
        yield plain, drafted


@pytest.mark.parametrize(
    ("sampling", "exact"),
    [
        ({}, False),
        ({"temperature": 0.9, "top_p": 0.9, "seed": 3}, True),
        ({"temperature": 0.9, "seed": 3, "presence_penalty": 0.7}, False),
    ],
    ids=["greedy", "sampled", "penalty"],
)
def test_answers_are_those_without_drafts(pair, exact, sampling):
    plain, drafted = pair
    options = EngineOptions(exact=exact, reuses_prefixes=False)
    with Engine(plain, options) as engine:
        expected = [ask_all(engine, [one])[0] for one in requests(**sampling)]
    control = drafts_for(drafted, PROMPTS, expected)
    with Engine(drafted, options) as engine:
        alone = [ask_all(engine, [one])[0] for one in requests(**sampling)]
        steps = engine.statistics().steps
        assert [answer.tokens for answer in alone] == [answer.tokens for answer in expected]
        together = ask_all(engine, requests(**sampling))
        assert [answer.ids for answer in together] == [answer.ids for answer in expected]
        if exact:
            assert [answer.tokens for answer in together] == [a.tokens for a in expected]
        drained(engine)
    found = engine.statistics()
    assert steps < len(PROMPTS) * (1 + NEW * 0.6)
    assert found.accepted_drafts >= len(PROMPTS) * NEW // 2
    assert found.draft_steps + found.accepted_drafts == 2 * len(PROMPTS) * (NEW - 1)
    assert control.counts()["drafted_tokens"] == found.drafted_tokens
    drafted.moe.check()


def test_an_answer_ends_within_a_draft_where_it_ends_without(pair):
    plain, drafted = pair
    with Engine(plain) as engine:
        (whole,) = ask_all(engine, [request_of(PROMPTS[0], NEW)])
    drafts_for(drafted, PROMPTS[:1], [whole])
    stop = whole.ids[9]
    first = whole.ids.index(stop) + 1
    for request, length in (
        (request_of(PROMPTS[0], NEW, stop_ids=frozenset({stop})), first),
        (request_of(PROMPTS[0], 7), 7),
        (request_of(PROMPTS[0], 1), 1),
    ):
        with Engine(drafted) as engine:
            (answer,) = ask_all(engine, [request])
            assert answer.ids == whole.ids[:length]
            (again,) = ask_all(engine, [request_of((*PROMPTS[0], *whole.ids[:length]), 4)])
            assert again.ids == whole.ids[length : length + 4]
            drained(engine)


@pytest.mark.parametrize("name", ["GptOssForCausalLM", "DeepseekV3ForCausalLM"])
def test_windows_and_latents_go_back_where_drafts_were_wrong(name, tmp_path):
    (family,) = [each for each in moe_families.FAMILIES if str(each) == name]
    folder = save(tiny_model(family), tmp_path, sharded=False)
    settings = {**SETTINGS, "dtype": "float32"}
    plain: Any = moe_runtime.load(folder, **settings)
    drafted: Any = moe_runtime.load(folder, draft="lookup", **settings)
    with plain.moe, drafted.moe:
        with Engine(plain) as engine:
            expected = [ask_all(engine, [one])[0] for one in requests()]
        drafts_for(drafted, PROMPTS, expected)
        with Engine(drafted) as engine:
            found = ask_all(engine, requests())
            assert [answer.ids for answer in found] == [answer.ids for answer in expected]
            drained(engine)
        drafted.moe.check()


def test_answers_go_on_without_drafts_that_fail(pair, monkeypatch):
    """A model that drafts for itself until one of its passes ends with an error."""
    plain, _ = pair
    asked = [request_of(prompt, NEW) for prompt in PROMPTS]
    with Engine(plain) as engine:
        expected = [ask_all(engine, [one])[0].ids for one in asked]
    settings = {**SETTINGS, "host_memory": "128MiB"}
    drafted: Any = moe_runtime.load(pocket_path(), draft=pocket_path(), **settings)
    with drafted.moe:
        control = drafted._drafts.control = EveryDraft(drafted._drafts.control.most_rows)
        source, calls = drafted._drafts.source, 0
        compute = source._pass

        def fail(*given: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 4:
                raise MoERuntimeError("no memory")
            return compute(*given)

        monkeypatch.setattr(source, "_pass", fail)
        with Engine(drafted) as engine:
            with pytest.warns(MoERuntimeWarning, match="without drafts.*no memory"):
                assert [answer.ids for answer in ask_all(engine, asked)] == expected
            assert [answer.ids for answer in ask_all(engine, asked)] == expected
            drained(engine)
        text = drafted.generate(torch.tensor([PROMPTS[0]]), do_sample=False, max_new_tokens=NEW)
        assert text[0, len(PROMPTS[0]) :].tolist() == expected[0][: text.shape[1] - len(PROMPTS[0])]
        assert (calls, control.counts()["draft_failures"]) == (4, 1)


def test_sequences_that_lose_their_room_go_on(pair):
    plain, drafted = pair
    asked = [request_of(prompt, NEW) for prompt in PROMPTS]
    with Engine(plain) as engine:
        expected = [ask_all(engine, [one])[0] for one in asked]
    drafts_for(drafted, PROMPTS, expected)
    with Engine(drafted, max_tokens=64) as engine:
        found = ask_all(engine, asked)
        assert [answer.ids for answer in found] == [answer.ids for answer in expected]
        drained(engine)
