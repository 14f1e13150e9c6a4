"""Experts that an engine's requests went to, and passes that go to the same ones."""

import base64
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from engine_events import Answer, ask_all, greedy, request_of
from moe_families import FAMILIES, Family
from offloaded_models import batches, offloaded, stack
from tiny_checkpoints import PROMPT, experts_modules, tiny_model

import moe_runtime
from moe_runtime.errors import UnsupportedUseError
from moe_runtime.inference.routing_replay import encode_routing
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.requests import EngineOptions, NewToken, PromptRead

NEW = 5


@contextmanager
def seen(modules: list[Any]) -> Iterator[list[list[Any]]]:
    """What each module of experts is called with, by hooks of its own."""
    found: list[list[Any]] = [[] for _ in modules]
    handles = [
        module.register_forward_pre_hook(lambda _, args, own=own: own.append(args[1].clone()))
        for module, own in zip(modules, found, strict=True)
    ]
    yield found
    for handle in handles:
        handle.remove()


def routing_of(answer: Answer) -> np.ndarray:
    parts = [event.routing for event in answer.events if isinstance(event, PromptRead | NewToken)]
    return np.concatenate([part for part in parts if part is not None])


def of_pass(model: Any, ids: Any) -> np.ndarray:
    """`[T, L, K]` of one plain pass."""
    with torch.no_grad(), seen([*experts_modules(model).values()]) as found:
        model(torch.tensor([ids]))
    return torch.stack([own[0] for own in found], 1).numpy()


@pytest.mark.parametrize(
    "options",
    [EngineOptions(), EngineOptions(prompt_tokens=7, idle_prompt_tokens=9, most_running=2)],
    ids=["together", "pieces"],
)
def test_an_engine_says_where_all_tokens_but_the_last_went(pocket, prompts, options):
    """Beside others, in pieces, and after the same prompt; those who did not ask get nothing."""
    asked = [request_of(prompt, NEW, returns_routing=n != 1) for n, prompt in enumerate(prompts)]
    with Engine(pocket, options) as engine:
        answers = [*ask_all(engine, asked), *ask_all(engine, [asked[4]])]
    for answer, request in zip(answers, [*asked, asked[4]], strict=True):
        if not request.returns_routing:
            assert all(token.routing is None for token in answer.tokens)
            continue
        whole = [*request.prompt_ids, *greedy(pocket, request.prompt_ids, NEW)]
        found = routing_of(answer)
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, of_pass(pocket, whole[:-1]))


def test_a_sequence_that_loses_its_room_tells_each_token_once(pocket, prompts):
    """Rows that are computed again are not told again."""
    options = EngineOptions(most_running=3, reuses_prefixes=False)
    asked = [request_of(prompts[n], 40, returns_routing=True) for n in (0, 3, 4)]
    with Engine(pocket, options, max_tokens=128) as engine:
        answers = ask_all(engine, asked)
        assert engine.statistics().preemptions > 0
    for answer, request in zip(answers, asked, strict=True):
        assert len(routing_of(answer)) == len(request.prompt_ids) + 40 - 1


def test_servers_return_it_as_vllm_and_sglang_do(site, pocket):
    body = {"prompt": [5, 6, 7], "max_tokens": NEW, "temperature": 0, "return_routed_experts": True}
    answer = site.ask("/v1/completions", body | {"return_token_ids": True})[1]
    (choice,) = answer["choices"]
    found = moe_runtime.decode_routing(choice["routed_experts"])
    tokens = [5, 6, 7, *choice["token_ids"]]
    np.testing.assert_array_equal(found, of_pass(pocket, tokens[:-1]))
    raw = np.frombuffer(base64.b64decode(answer["sglext"]["routed_experts"]), np.int32)
    np.testing.assert_array_equal(raw.reshape(found.shape), found)
    last = site.stream("/v1/completions", body)[-1]["choices"][0]
    assert last["routed_experts"] == choice["routed_experts"]
    chat = {**body, "messages": [{"role": "user", "content": "Hi"}], "n": 2}
    del chat["prompt"]
    answer = site.ask("/v1/chat/completions", chat)[1]
    assert "sglext" not in answer
    assert len({choice["routed_experts"] for choice in answer["choices"]}) == 1
    assert "routed_experts" not in site.ask("/v1/completions", {"prompt": "a"})[1]["choices"][0]


def family_of(folder: str) -> Family:
    return next(family for family in FAMILIES if family.folder == folder)


def check_family(family: Family) -> None:
    """A recorded routing gives the same bits; another one is taken, with gradients of its own."""
    model: Any = tiny_model(family)
    with torch.no_grad(), seen([*experts_modules(model).values()]) as found:
        expected = model(PROMPT).logits
    shape = (*PROMPT.shape, len(found), found[0][0].shape[-1])
    recorded = torch.stack([own[0] for own in found], 1).view(shape)
    with torch.no_grad(), moe_runtime.replay_routing(model, recorded):
        assert torch.equal(model(PROMPT).logits, expected)
    other = recorded.roll(1, dims=1)
    other[:, -1] = -1
    with seen([*experts_modules(model).values()]) as found:
        with moe_runtime.replay_routing(model, other):
            loss = model(PROMPT).logits.float().square().mean()
        loss.backward()
    taken = torch.stack([own[0] for own in found], 1).view(shape)
    assert torch.equal(taken[:, :-1], other[:, :-1])
    assert not torch.equal(taken, recorded)
    with torch.no_grad():
        assert torch.equal(model(PROMPT).logits, expected), "nothing stays behind"


@pytest.mark.parametrize("folder", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_passes_go_to_recorded_experts(folder):
    check_family(family_of(folder))


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_passes_go_to_recorded_experts_in_any_family(family):
    check_family(family)


def test_experts_outside_of_the_groups_of_a_gate_have_true_weights_or_are_refused():
    """DeepSeek-V3 weighs by scores before it chooses groups; DeepSeek-V2 has no others."""
    groups = {"n_group": 3, "topk_group": 1, "topk_method": "group_limited_greedy"}

    def replayed(folder: str) -> Any:
        family = family_of(folder)
        changed = dataclasses.replace(family, config=family.config | groups)
        model: Any = tiny_model(changed)
        gates = [m for name, m in model.named_modules() if name.endswith(".gate")]
        found: list[tuple[torch.Tensor, ...]] = []
        for gate in gates:
            gate.register_forward_hook(lambda _, args, out: found.append(out))
        ids = torch.tensor([0, 5]).expand(*PROMPT.shape, len(gates), 2)
        with torch.no_grad(), moe_runtime.replay_routing(model, ids):
            model(PROMPT)
        return found, model.config

    found, config = replayed("deepseek_v3")
    for logits, weights, ids in found:
        assert torch.equal(ids, torch.tensor([0, 5]).expand_as(ids))
        scores = logits.float().sigmoid()[:, [0, 5]]
        expected = scores / (scores.sum(-1, keepdim=True) if config.norm_topk_prob else 1)
        torch.testing.assert_close(weights, expected * config.routed_scaling_factor)
    with pytest.raises(UnsupportedUseError, match="no weights of recorded experts outside of the"):
        replayed("deepseek_v2")


def test_pieces_of_a_call_and_later_calls_replay_their_own_tokens(pocket, monkeypatch):
    """Two texts, of which the first tokens are recorded, in passes of eight tokens of each."""
    monkeypatch.setattr(pocket._pieces, "most_tokens", 16)
    modules, sizes = [*experts_modules(pocket).values()], pocket.moe.facts.signature
    rows = torch.arange(13)[:, None, None] + torch.arange(sizes.top_k)
    recorded = rows.remainder(sizes.num_experts).expand(2, 13, len(modules), -1)
    for calls in ([40], [10, 30]):
        cache = None
        with torch.no_grad(), seen(modules) as found, moe_runtime.replay_routing(pocket, recorded):
            for part in torch.arange(80).view(2, 40).split(calls, 1):
                cache = pocket(part, past_key_values=cache, use_cache=True).past_key_values
        for passes in found:
            assert len(passes) > 4
            taken = torch.cat([ids.view(2, -1, sizes.top_k) for ids in passes], 1)
            assert torch.equal(taken[:, :13], recorded[:, :, 0])
            assert not torch.equal(taken[:, 13:26], recorded[:, :, 0])


def test_micro_batches_replay_their_own_routing(tmp_path):
    """Side by side in a window with experts on the disk: as one after another in memory."""
    expected, model = stack(), stack()
    training = offloaded(
        model, moe_runtime.AdamW(lr=1e-2, weight_decay=0.0), tmp_path, experts_in_memory=0.4
    )
    generator = torch.Generator().manual_seed(5)
    inputs = batches(2)
    recorded = [
        torch.rand(1, len(x), 3, 6, generator=generator).argsort(-1)[..., :2] for x in inputs
    ]

    def loss_of(owner: Any, number: int) -> torch.Tensor:
        with moe_runtime.replay_routing(owner, recorded[number].numpy()):
            return owner.loss(inputs[number])

    found = training.backward([lambda n=n: loss_of(model, n) for n in range(2)])
    wanted = [loss_of(expected, n) for n in range(2)]
    assert [float(loss) for loss in found] == [float(loss.detach()) for loss in wanted]
    assert float(found[0]) != float(stack().loss(inputs[0]).detach())
    torch.stack(wanted).sum().backward()
    for name, parameter in expected.named_parameters():
        if ".experts." not in name:
            assert torch.equal(parameter.grad, model.get_parameter(name).grad), name  # type: ignore[arg-type]
    training.close()


def test_a_routing_that_does_not_fit_is_refused():
    model: Any = tiny_model(family_of("mixtral"))
    layers, top_k = len(experts_modules(model)), model.config.num_experts_per_tok

    def replay(*shape: int, value: int = 0) -> None:
        routed = np.broadcast_to(np.arange(shape[-1]) + value, shape)
        with torch.no_grad(), moe_runtime.replay_routing(model, routed):
            model(PROMPT)

    sequences, tokens = PROMPT.shape
    with pytest.raises(ValueError, match=rf"the pass has {PROMPT.numel()} tokens and {top_k}"):
        replay(sequences, tokens, layers, top_k + 1)
    left = np.full((sequences, tokens + 1, layers, top_k), -1)
    for given, why in (
        (left, f"has up to {tokens + 1} tokens of a sequence, the passes were of {tokens}"),
        ([], "must be of one sequence at least"),
        (left / 2, "must be arrays or tensors of integers, got float64"),
    ):
        with (
            pytest.raises(ValueError, match=why),
            torch.no_grad(),
            moe_runtime.replay_routing(model, given),
        ):
            model(PROMPT)
    with pytest.raises(ValueError, match=rf"{layers} layers, choices\] of each sequence"):
        replay(sequences, tokens, layers + 1, top_k)
    with pytest.raises(ValueError, match="names expert 100, the layers have"):
        replay(sequences, tokens, layers, top_k, value=99)
    for row, what in (([1, 1], "an expert twice"), ([-1, 1], "some of its experts; give all")):
        found = np.broadcast_to(np.arange(2), (sequences, tokens, layers, 2)).copy()
        found[0, 2, 0] = row
        with pytest.raises(ValueError, match=f"of token 2, layer 0 names {what}"):
            moe_runtime.replay_routing(model, found).__enter__()
    model.train().gradient_checkpointing_enable()
    with pytest.raises(UnsupportedUseError, match="chooses experts again"):
        replay(sequences, tokens, layers, top_k)
    own: Any = stack(gate="noisy_topk", num_layers=1)
    with (
        pytest.raises(UnsupportedUseError, match="does not choose by topk"),
        moe_runtime.replay_routing(own, np.arange(2).reshape(1, 1, 1, 2)),
    ):
        own(batches(1)[0])
    assert moe_runtime.decode_routing(encode_routing(np.ones((2, 1, 3), np.uint8))).shape == (
        2,
        1,
        3,
    )
    odd: list[Any] = [[[1]]]
    for turned in (np.asfortranarray, np.ascontiguousarray):
        ids = turned(np.arange(24, dtype=np.int16).reshape(2, 3, 4))
        np.testing.assert_array_equal(moe_runtime.decode_routing(encode_routing(ids)), ids)
    begins = b"\x93NUMPY\x01\x00\x76\x00{'descr': '|u1', "
    huge = begins + b"'fortran_order': False, 'shape': (99999, 999999, 99), }\n"
    files = [b"PK\x03\x04", begins + b"((((\n", huge, b"\x93NUMPY\x01\x00\x76\x00" + b"-" * 99]
    wrongs = [base64.b64encode(file).decode() for file in files]
    with pytest.raises(ValueError, match="sglext have no shape"):
        moe_runtime.decode_routing("bm8=")
    for wrong in ("no base64", odd, encode_routing(np.ones((2, 1))), *wrongs):
        with pytest.raises(ValueError, match="routed_experts"):
            moe_runtime.decode_routing(wrong)
