"""Pictures in the engine: many sequences at once, cut prompts, lost caches, kept prefixes."""

from collections.abc import Iterator, Sequence
from typing import Any

import picture_checkpoints as pc
import pytest
from engine_events import Answer

import moe_runtime
from moe_runtime.checkpoints.opening import load_tokenizer, read_config
from moe_runtime.inference.generation import encode_messages
from moe_runtime.inference.pictures import PictureReader, Pictures, place
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.kv_account import PIECE
from moe_runtime.serving.requests import EngineOptions, GenerationRequest

SIZES = [(24, 16), (24, 16), (17, 31), (40, 9)]
FAMILIES = [name for name in pc.TABLE if "Aria" not in name]
KINDS = ("Gemma4ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
"""Further kinds of caches; all families are in `inference/test_picture_prompts.py`."""


def some(*names: str) -> Any:
    marked = [
        pytest.param(each, marks=[pytest.mark.long] * (each not in names)) for each in FAMILIES
    ]
    return pytest.mark.parametrize("seeing", marked, indirect=True)


@pytest.fixture(scope="module")
def seeing(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = pc.save_seeing_checkpoint(request.param, tmp_path_factory.mktemp("engine"))
    loaded: Any = moe_runtime.load(
        folder, device="cpu", dtype="float32", host_memory="1GiB", max_tokens=1024
    )
    tokenizer = load_tokenizer(folder)
    reader = PictureReader.of(folder, read_config(folder), tokenizer)
    assert reader is not None
    num_new = 32 if request.param == FAMILIES[0] else 12  # in 32 one outgrows its room

    def asked(seeds: Sequence[int], text: str) -> GenerationRequest:
        images = [pc.png(pc.picture(seed, *SIZES[seed])) for seed in seeds]
        pictures = Pictures(reader, [reader.read(image) for image in images])
        content = [*({"type": "image"} for _ in seeds), {"type": "text", "text": text}]
        messages: Any = [{"role": "user", "content": content}]
        ids = encode_messages(tokenizer, messages, pictures if seeds else None)["input_ids"]
        prompt = tuple(ids[0].tolist())
        placed = place(prompt, pictures.pictures)
        return GenerationRequest(prompt_ids=prompt, max_new_tokens=num_new, pictures=placed)

    each = [([0], "What?"), ([1], "What?"), ([], "What is here?"), ([2, 3], "Both"), ([0, 1], "?")]
    requests = [asked(*one) for one in each]
    with loaded.moe:
        with Engine(loaded, EngineOptions(reuses_prefixes=False)) as engine:
            alone = [answers(engine, [request])[0] for request in requests]
        assert len({tuple(ids) for ids in alone}) == len(alone)
        yield loaded, requests, alone


def answers(engine: Engine, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    found = [Answer() for _ in requests]
    for request, answer in zip(requests, found, strict=True):
        engine.submit(request, answer)
    return [answer.wait().ids for answer in found]


def check(seeing: Any, options: EngineOptions, *, is_tight: bool = False) -> None:
    loaded, requests, alone = seeing
    longest = max(len(each.prompt_ids) + each.max_new_tokens for each in requests)
    room = -(-longest // PIECE) * PIECE if is_tight else None  # one preempts another
    with Engine(loaded, options, max_tokens=room) as engine:
        assert answers(engine, requests) == alone
        assert answers(engine, requests[::-1]) == alone[::-1]
        engine.check()
        assert bool(engine.statistics().preemptions) == is_tight


@some(*KINDS)
def test_a_text_is_that_of_the_sequence_alone(seeing):
    check(seeing, EngineOptions(prompt_tokens=16, idle_prompt_tokens=16))


@pytest.mark.parametrize("is_tight", [True, False], ids=["little room", "exact"])
@some(FAMILIES[0])
def test_little_room_and_exact_steps_change_no_text(seeing, is_tight):
    options = EngineOptions(prompt_tokens=16, reuses_prefixes=not is_tight, exact=not is_tight)
    check(seeing, options, is_tight=is_tight)
