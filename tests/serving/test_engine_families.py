"""Models whose sequences go together, and those whose sequences must go one after another."""

import dataclasses

import moe_families
import pytest
import torch
from engine_events import Answer, ask, ask_all, drained, greedy, hold, request_of
from tiny_checkpoints import save, tiny_model

import moe_runtime
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.requests import EngineOptions

NEW = 6
TOGETHER = (
    *("Cohere2MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    *("Glm4MoeLiteForCausalLM", "GptOssForCausalLM", "OlmoeForCausalLM"),
)
"""With windows, with keys that are expanded (three), with windows and sinks, with neither."""
DECODE_TOGETHER = (
    *("GraniteMoeHybridForCausalLM", "JambaForCausalLM", "NemotronHForCausalLM"),
    *("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "ZayaForCausalLM"),
    "KimiLinearForCausalLM",
)
"""With states that are not keys and values; the last two have both."""
ALONE = ("DeepseekV32ForCausalLM",)
"""With indices of which keys to attend to."""
SAME_KIND = {
    *("DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM", "JambaForCausalLM"),
    *("GraniteMoeHybridForCausalLM", "Qwen3_5MoeForCausalLM"),
}
"""Families whose caches are as those of another here."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=[pytest.mark.long] * (str(f) in SAME_KIND))
        for f in moe_families.FAMILIES
        if str(f) in (*TOGETHER, *DECODE_TOGETHER, *ALONE)
    ],
    ids=str,
)
def test_texts_are_those_of_generate_whatever_a_model_keeps_of_a_sequence(family, tmp_path):
    folder = save(tiny_model(family), tmp_path, sharded=False)
    model = moe_runtime.load(
        folder, device="cpu", dtype="float32", host_memory="64MiB", max_tokens=256
    )
    generator = torch.Generator().manual_seed(0)
    size = model.config.vocab_size
    prompts = [
        tuple(torch.randint(3, size, (length,), generator=generator).tolist())
        for length in (5, 13, 3)
    ]
    with model.moe:
        texts = [greedy(model, prompt, NEW) for prompt in prompts]
        for options in (EngineOptions(), EngineOptions(prompt_tokens=4, idle_prompt_tokens=4)):
            with Engine(model, options) as engine:
                answers = _ask_behind_the_first(engine, prompts)
                assert [answer.ids for answer in answers] == texts
                if options == EngineOptions():
                    assert engine.statistics().steps == _steps(str(family))
                else:
                    again = ask_all(engine, [request_of(prompt, NEW) for prompt in prompts])
                    assert [answer.ids for answer in again] == texts
                drained(engine)
        model.moe.check()


def _ask_behind_the_first(engine: Engine, prompts: list[tuple[int, ...]]) -> list[Answer]:
    first, _ = hold(engine, request_of(prompts[0], NEW))
    others = [ask(engine, request_of(prompt, NEW))[0] for prompt in prompts[1:]]
    first.release()
    return [answer.wait() for answer in (first, *others)]


def _steps(family: str) -> int:
    if family in ALONE:
        return 3 * NEW
    if family in DECODE_TOGETHER:  # prompts in passes of their own, the third beside two answers
        return 3 + NEW + 1
    return 1 + NEW  # both prompts in the pass of the first answer's second token


@pytest.mark.parametrize("exact", [False, True])
def test_latents_are_found_again_and_computed_again(tmp_path, exact):
    """Of widths that are whole vectors: torch rounds SiLU and sigmoid of a rest in another way."""
    (family,) = [f for f in moe_families.FAMILIES if str(f) == "DeepseekV3ForCausalLM"]
    sizes = {**family.config, "moe_intermediate_size": 32, "n_routed_experts": 32}
    tiny = tiny_model(dataclasses.replace(family, config=sizes))
    folder = save(tiny, tmp_path, sharded=False)
    model = moe_runtime.load(
        folder, device="cpu", dtype="float32", host_memory="64MiB", max_tokens=256
    )
    generator = torch.Generator().manual_seed(2)
    prompts = [tuple(torch.randint(3, 96, (n,), generator=generator).tolist()) for n in (37, 20, 9)]
    options = EngineOptions(exact=exact, prompt_tokens=16, idle_prompt_tokens=16)
    with model.moe:
        texts = [greedy(model, prompt, 3 * NEW) for prompt in prompts]
        asked = [request_of(prompt, 3 * NEW, num_logprobs=0) for prompt in prompts]
        with Engine(model, options, max_tokens=96) as engine:
            answers = ask_all(engine, asked)
            assert [answer.ids for answer in answers] == texts
            drained(engine)
            assert engine.statistics().preemptions > 0
        with Engine(model, options) as engine:
            roomy = ask_all(engine, asked)
            assert engine.statistics().preemptions == 0
            turn = (*prompts[0], *texts[0], 7)
            assert 0 not in turn  # a pad token, which `generate` would leave out
            (second,) = ask_all(engine, [request_of(turn, NEW)])
            assert second.ids == greedy(model, turn, NEW)
            assert second.read.cached_tokens == (32 if exact else 48)
        if exact:
            assert [answer.tokens for answer in answers] == [answer.tokens for answer in roomy]
        model.moe.check()
