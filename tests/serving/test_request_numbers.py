"""Those who learn from requests and record them know whose tokens an engine computes."""

from pathlib import Path
from typing import Any

from engine_events import ask, ask_all, request_of

import moe_runtime
from moe_runtime.inference.steps import Listener, Step
from moe_runtime.lab.traces.format import read_trace
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.requests import EngineOptions


class Ends(Listener):
    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []

    def begin(self, step: Step) -> None:
        self.begun.extend(step.begun)
        self.ended.extend(step.ended)


def test_trace_of_an_engine_has_the_tokens_of_each_request_together(tmp_path: Path) -> None:
    path, heard = tmp_path / "served.npz", Ends()
    model: Any = moe_runtime.load(pocket_path(), device="cpu", max_tokens=256, trace=path)
    prompts = [(5, 70, 11, 13), (9,), tuple(range(20, 31))]
    with model.moe:
        options = EngineOptions(reuses_prefixes=False, idle_prompt_tokens=8, prompt_tokens=3)
        with Engine(model, options) as engine, model._steps.listeners.also(heard):
            answers = ask_all(engine, [request_of(prompt, 5) for prompt in prompts])
            last, _ = ask(engine, request_of((3, 4), 2))
            answers.append(last.wait())
    trace = read_trace(path)
    found: dict[int, list[int]] = {}
    for token, request in zip(trace.token_id.tolist(), trace.token_request.tolist(), strict=True):
        found.setdefault(request, []).append(token)
    for prompt, answer in zip([*prompts, (3, 4)], answers, strict=True):
        # the last token of an answer is never computed
        assert [*prompt, *answer.ids[:-1]] in list(found.values())
    # what tells the engine whether sequences can go together is no request, and is not recorded
    assert len(found) == 4
    assert heard.begun == [0, 1, 2, 3]
    assert sorted(heard.ended) == [0, 1, 2], "the last one ended with no pass behind it"
