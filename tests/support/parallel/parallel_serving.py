"""Requests to an engine whose steps several processes take together, or one alone."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engine_events import Answer, ask, ask_all, drained, hold, request_of

import moe_runtime
from moe_runtime.errors import RankFailureError
from moe_runtime.inference.pictures import Picture, PlacedPicture
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.following import follow
from moe_runtime.serving.prefixes import Prefixes
from moe_runtime.serving.requests import EngineOptions, Event, NewToken, SamplingOptions

NEW = 8
MAX_TOKENS = 256


def loaded(path: str, **options: Any) -> Any:
    """The model in all processes, or in this one alone."""
    group = dist.group.WORLD if dist.is_initialized() else None
    common = {"device": "cpu", "max_tokens": MAX_TOKENS, "policy": "lru", "group": group}
    return moe_runtime.load(path, **(common | options))


def prompts_of(size: int) -> list[tuple[int, ...]]:
    """The third begins as the first does, and finds what that has left."""
    generator = torch.Generator().manual_seed(1)
    first, second, rest = (
        tuple(torch.randint(3, size, (length,), generator=generator).tolist())
        for length in (37, 9, 5)
    )
    return [first, second, first[:33] + rest]


def answered(path: str, engine: EngineOptions, loading: dict[str, Any]) -> dict[str, Any]:
    """All that the first process tells of some requests; of the others what they computed."""
    group = dist.group.WORLD if dist.is_initialized() else None
    model = loaded(path, **{"prefetch": "off", **loading})
    with model.moe:
        if group is not None and group.rank():
            follow(model, options=engine)
            model.moe.check()
            return {"own": model.moe.stats()}
        with Engine(model, engine) as running:
            told = _all_told(running, model.config.get_text_config().vocab_size)
            stats = running.statistics()
            assert running.failure is None
        model.moe.check()
        return {**told, "stats": stats, "own": model.moe.stats()}


def _all_told(engine: Engine, size: int) -> dict[str, Any]:
    first, second, third = prompts_of(size)
    drawn = SamplingOptions(temperature=0.9, top_p=0.9, seed=7)
    unseeded = SamplingOptions(temperature=1.0, top_k=1)
    held, _ = hold(engine, request_of(first, NEW, num_logprobs=2, num_prompt_logprobs=1))
    # all of these come before the next step, so that steps are the same whatever the clock says
    others = [
        ask(engine, request_of(second, NEW, sampling=drawn, num_logprobs=0))[0],
        ask(engine, request_of(third, NEW, client="another", returns_routing=True))[0],
        ask(engine, request_of(second, 3, stop_ids=frozenset(range(size)), priority=1))[0],
    ]
    held.release()
    found = [answer.wait() for answer in (held, *others)]
    for request in (
        request_of(third, NEW),
        request_of(second, 0),
        request_of(second, NEW, sampling=unseeded),
    ):
        found += ask_all(engine, [request])
    cancelled, handle = hold(engine, request_of(first, 64))
    handle.cancel()
    cancelled.release()
    assert cancelled.wait().finished.reason == "cancelled"
    drained(engine)
    return {"answers": [_told_of(answer) for answer in found], "stop": len(others[2].ids)}


def _told_of(answer: Answer) -> tuple[Any, ...]:
    tokens = [(one.token_id, one.logprob, one.top_logprobs) for one in answer.tokens]
    routing = [answer.read.routing, *(one.routing for one in answer.tokens)]
    experts = [one.tolist() for one in routing if one is not None]
    read = answer.read
    return tokens, read.logprobs, read.cached_tokens, experts, answer.finished


def served_until_a_kill(path: str, victim: int, seed: int) -> tuple[str, tuple[int, ...]]:
    """One process kills itself at some step; what the others hear of it."""
    rank = dist.get_rank()
    model = loaded(path)
    left = random.Random(seed).randrange(1, 60)

    def count(*_: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    experts = [part for name, part in model.named_modules() if name.endswith("mlp.experts")]
    for part in experts if rank == victim else ():
        part.register_forward_pre_hook(count)
    try:
        if rank:
            follow(model)
            return "", ()
        with Engine(model) as engine:
            prompts = prompts_of(model.config.vocab_size)
            answers = [ask(engine, request_of(prompt, 60))[0] for prompt in prompts]
            for answer in answers:
                assert answer.wait().finished.reason == "error"
            assert not engine.is_open
            failure = engine.failure
        assert isinstance(failure, RankFailureError)
        assert all(str(failure) in (one.finished.message or "") for one in answers)
        raise failure
    except RankFailureError as error:
        return str(error), error.ranks


def ended_within_a_step(path: str) -> tuple[list[str], Exception | None]:
    """The engine is closed by another thread while a step ends an answer; what all hear of it."""
    model = loaded(path)
    with model.moe:
        if dist.get_rank():
            follow(model)
            return [], None
        engine = Engine(model)
        closing = threading.Thread(target=engine.close)
        answer = Answer()

        def close_and_hear(event: Event) -> None:
            answer(event)
            if isinstance(event, NewToken):
                closing.start()
                while engine.is_open:
                    time.sleep(0.01)

        engine.submit(request_of(prompts_of(300)[0], 1), close_and_hear)
        reasons = [answer.wait().finished.reason]
        closing.join()
        return reasons, engine.failure


def answered_without_numbers(path: str) -> list[Any]:
    """Prompts of which some logits are not numbers, in the first process, and one after them."""
    rank = dist.get_rank()
    model = loaded(path)

    def spoil(module: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
        rows = logits.flatten(0, -2)
        if len(rows) > 1:  # only a prompt's log-probabilities need more than the last
            rows[0] = math.nan
        return logits

    options = EngineOptions(prompt_tokens=16, idle_prompt_tokens=16)
    with model.moe:
        if rank:
            follow(model, options=options)
            return []
        with Engine(model, options) as engine:
            prompt = prompts_of(300)[0]
            (before,) = ask_all(engine, [request_of(prompt, NEW)])
            hook = model.lm_head.register_forward_hook(spoil)
            spoilt = [
                ask_all(engine, [request_of(prompt, num_new, num_prompt_logprobs=1)])[0].finished
                for num_new in (0, NEW)
            ]
            hook.remove()
            (after,) = ask_all(engine, [request_of(prompt, NEW)])
            drained(engine)
            same = before.ids == after.ids
            return [*((one.reason, one.message) for one in spoilt), same, engine.failure]


def failed_cuts(path: str) -> str:
    """What ends an engine whose process cannot set aside what later requests begin with."""
    model = loaded(path)

    def fail(*_: Any) -> Any:
        raise MemoryError("no room for the state")

    with model.moe, mock.patch.object(Prefixes, "cut", fail):
        if dist.get_rank():
            try:
                follow(model)
            except MemoryError as error:
                return str(error)
            return ""
        with mock.patch("threading.excepthook"), Engine(model) as engine:
            (answer,) = ask_all(engine, [request_of(prompts_of(300)[0], NEW)])
            assert answer.finished.reason == "error"
        return str(engine.failure)


def refusals(path: str) -> list[str]:
    """What processes are told that want what only one alone has."""
    model = loaded(path)
    said = []

    def refused(*args: Any, **options: Any) -> None:
        try:
            Engine(model, *args, **options)
        except (ValueError, RankFailureError) as error:
            said.append(str(error))

    rank = dist.get_rank()
    with model.moe:
        if rank:
            refused()
        else:
            said.append("")
        try:
            if rank:
                follow(model, options=EngineOptions(most_running=5))
            else:
                refused(EngineOptions(most_running=4))
        except RankFailureError as error:
            said.append(str(error))
        if rank:
            follow(model)
            return said
        with Engine(model) as engine:
            picture = PlacedPicture(0, Picture({}, "", (1,), (1,), b"", {}))
            for needs in ({"adapter": "one"}, {"pictures": (picture,)}):
                try:
                    engine.submit(request_of((1, 2), 3, **needs), lambda _: None)
                except ValueError as error:
                    said.append(str(error))
    return said
