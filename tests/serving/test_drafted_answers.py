"""An engine verifies drafts of several sequences in one step, and answers as without drafts."""

from typing import Any

import moe_families
import pytest
import torch
from engine_events import Answer, ask_all, drained, request_of
from scripted_drafts import EveryDraft, Scripted, Told, models_of_few_tokens
from tiny_checkpoints import save, tiny_model

import moe_runtime
from moe_runtime.errors import MoERuntimeError, MoERuntimeWarning
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.requests import EngineOptions, SamplingOptions

NEW = 12
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
        (
            {
                **{"temperature": 0.9, "seed": 3, "presence_penalty": 0.7, "min_p": 0.01},
                **{"repetition_penalty": 1.1, "top_k": 40, "logit_bias": {9: 1.5}},
            },
            False,
        ),
    ],
    ids=["greedy", "sampled", "everything"],
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


class WithoutThree:
    """A grammar in which token 3 cannot come second."""

    is_exhausted = False

    def allowed(self, generated_ids: Any) -> torch.Tensor | None:
        return torch.arange(5) != 3 if len(generated_ids) == 1 else None


def chances(logits_V: torch.Tensor, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Probabilities of the next token with all that a request may ask for, by their definitions."""
    scores = logits_V.double().clone()
    scores[2] += 0.7
    for token in {*prompt, *answer}:
        scores[token] *= 1 / 1.2 if scores[token] > 0 else 1.2
    for token in {*answer}:
        scores[token] -= 0.2 + 0.3 * answer.count(token)
    if len(answer) == 1:
        scores[3] = -torch.inf
    found = (scores / 1.4).softmax(-1)
    order = found.argsort(descending=True).tolist()
    kept = found[order[:4]] / found[order[:4]].sum()
    most = 1 + int((kept.cumsum(-1) < 0.97).sum())
    likely = [token for token in order[:4][:most] if found[token] >= 0.05 * found[order[0]]]
    chosen = torch.zeros_like(found)
    chosen[likely] = found[likely] / found[likely].sum()
    return chosen


@torch.no_grad()
def test_samples_of_several_requests_have_the_probabilities_of_each(tmp_path):
    """Chi-square of answers whose drafts are verified in common steps."""
    whole, prompt, num_texts = models_of_few_tokens(tmp_path, 5), [1, 4, 2], 200
    exact, texts = torch.zeros(3, 5, dtype=torch.float64), [([], 1.0)]
    for place in range(3):
        after = []
        for answer, chance in texts:
            logits = whole(torch.tensor([[*prompt, *answer]])).logits[0, -1]
            of_next = chance * chances(logits, prompt, answer)
            exact[place] += of_next
            after += [([*answer, token], float(of_next[token])) for token in range(5)]
        texts = [(answer, chance) for answer, chance in after if chance]
    options = {"temperature": 1.4, "top_k": 4, "top_p": 0.97, "min_p": 0.05}
    options |= {"repetition_penalty": 1.2, "presence_penalty": 0.2, "frequency_penalty": 0.3}
    asked = [
        request_of(
            tuple(prompt),
            3,
            sampling=SamplingOptions(**options, logit_bias={2: 0.7}, seed=seed),
            constraint=WithoutThree(),
        )
        for seed in range(num_texts)
    ]
    counts = torch.zeros(3, 5, dtype=torch.float64)
    drafted: Any = moe_runtime.load(tmp_path / "model", draft=tmp_path / "draft", **SETTINGS)
    with drafted.moe:
        control = drafted._drafts.control = EveryDraft(drafted._drafts.control.most_rows)
        at_once = min(5, control.most_rows // 2)  # a step has room for drafts
        with Engine(drafted) as engine:
            for first in range(0, num_texts, at_once):
                for answer in ask_all(engine, asked[first : first + at_once]):
                    for place, token in enumerate(answer.ids):
                        counts[place, token] += 1
        found = control.counts()
    assert num_texts // 8 < found["accepted_drafts"] < found["drafted_tokens"] - num_texts // 8
    may_come = exact > 0
    assert not counts[~may_come].any()
    expected = num_texts * exact
    assert float(expected[may_come].min()) > 1
    terms = torch.where(may_come, (counts - expected) ** 2 / expected, 0.0)
    # one in a thousand, by degrees of freedom
    most = torch.tensor([10.8, 13.8, 16.3, 18.5])[may_come.sum(1) - 2]
    assert bool((terms.sum(1) < most).all())


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


@pytest.mark.parametrize(
    "name",
    [
        *("GptOssForCausalLM", "Qwen3NextForCausalLM"),
        pytest.param("DeepseekV3ForCausalLM", marks=pytest.mark.long),
        pytest.param("NemotronHForCausalLM", marks=pytest.mark.long),
    ],
)
def test_windows_latents_and_states_go_back_where_drafts_were_wrong(name, tmp_path):
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
