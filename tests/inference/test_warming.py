"""Models that are warmed up: experts are there, and nothing else is as if nothing had been."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_models import emulated, experts_modules_of, load_on_emulated_device
from moe_families import FAMILIES, Family
from tiny_checkpoints import PROMPT, prompt_and_step_logits, save, tiny_model
from triton_interpreter import repair_interpreter

import moe_runtime
from moe_runtime.inference import warming
from moe_runtime.lab.traces import read_trace

FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", {"num_hidden_layers": 2})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model(FAMILY), tmp_path_factory.mktemp("family"), sharded=True)


def test_warm_up_fills_the_slots_and_resets_counters(checkpoint):
    told: list[tuple[str, int, int]] = []
    model: Any = moe_runtime.load(
        checkpoint, device="cpu", max_tokens=32, warm_up=True, progress=lambda *a: told.append(a)
    )
    with model.moe:
        stats = model.moe.stats()
        assert (stats.misses, stats.hits, stats.bytes_read) == (0, 0, 0)
        model.generate(PROMPT, max_new_tokens=4, do_sample=False)
        stats = model.moe.stats()
        assert stats.misses == stats.late_hits == 0 < stats.hits
        model.moe.check()
    warmed = [each[1:] for each in told if each[0] == "warming up"]
    assert warmed[-1][0] == warmed[-1][1] > 0


def test_layers_have_their_shares_where_not_all_fit(checkpoint):
    with pytest.raises(moe_runtime.errors.CapacityError) as refused:
        moe_runtime.load(checkpoint, device="cpu", max_tokens=32, host_memory=1)
    smallest: Any = refused.value.smallest_bytes
    found = []
    for is_warm in (True, False):
        model: Any = moe_runtime.load(
            checkpoint, device="cpu", max_tokens=32, warm_up=is_warm,
            host_memory=smallest + 60_000,
        )  # fmt: skip
        with model.moe:
            store: Any = experts_of(model)[0].store
            held = [sum(key.layer == layer for key in store._entries) for layer in range(2)]
            assert held == ([store.slots_of(layer) for layer in range(2)] if is_warm else [0, 0])
            assert sum(held) < 12
            found.append(model.generate(PROMPT, max_new_tokens=6, do_sample=False))
            model.moe.check()
    assert torch.equal(*found)


def experts_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "store")]


def test_records_do_not_contain_the_warm_up(checkpoint, tmp_path):
    for is_warm in (True, False):
        records = {"trace": tmp_path / f"{is_warm}.npz", "timeline": tmp_path / f"{is_warm}.json"}
        model: Any = moe_runtime.load(
            checkpoint, device="cpu", max_tokens=32, warm_up=is_warm, **records
        )
        with model.moe:
            model.generate(PROMPT, max_new_tokens=4, do_sample=False)
    ours, theirs = (read_trace(tmp_path / f"{is_warm}.npz") for is_warm in (True, False))
    assert ours.num_steps == theirs.num_steps
    events = json.loads((tmp_path / "True.json").read_text())
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert "experts" in names
    assert not [name for name in names if name.startswith("demand")]  # all were there


def test_a_class_of_several_models_has_no_pass_to_compute(tmp_path):
    family = next((each for each in FAMILIES if each.part == "thinker"), None)
    if family is None:
        pytest.skip("this transformers has no class of several models")
    checkpoint = save(tiny_model(family), tmp_path, sharded=False)
    model: Any = moe_runtime.load(checkpoint, device="cpu", max_tokens=32, warm_up=True)
    with model.moe:
        prompt_and_step_logits(model, family)
        assert model.moe.stats().misses == 0


def test_ctrl_c_frees_the_outputs(checkpoint, tmp_path):
    def interrupt(what: str, done: int, total: int) -> None:
        if what == "warming up":
            raise KeyboardInterrupt

    given: dict[str, Any] = {"device": "cpu", "max_tokens": 32, "trace": tmp_path / "t.npz"}
    with pytest.raises(KeyboardInterrupt):
        moe_runtime.load(checkpoint, warm_up=True, progress=interrupt, **given)
    model: Any = moe_runtime.load(checkpoint, **given)
    with model.moe:
        model.generate(PROMPT, max_new_tokens=2, do_sample=False)
    assert (tmp_path / "t.npz").exists()


@emulated
@pytest.mark.parametrize("slots", [6, 4])
def test_a_device_computes_steps_as_one_graph_from_the_first_request_on(checkpoint, slots):
    pytest.importorskip("triton")
    repair_interpreter()
    model = load_on_emulated_device(checkpoint, slots_a_layer=slots, host_slots=12)
    with model.moe:
        warming.warm(model, experts_modules_of(model), 64, None)
        model.generate(PROMPT, max_new_tokens=4, do_sample=False)
        assert model.forward.is_one_graph
        assert (model.moe.stats().misses == 0) == (slots == 6)


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (64, 8), (32, 4), (60, 7)])
def test_each_tile_has_a_prompt_that_compiles_it(num_experts, top_k):
    pytest.importorskip("triton")
    from moe_runtime.kernels.grouped_gemm.tile import TILES_16_BIT, tile_by_rule

    def tile_of(num_tokens: int) -> Any:
        rows = num_tokens * top_k
        return tile_by_rule(
            "gated", num_rows=rows, num_experts=num_experts, dim_n=1536, dtype=torch.bfloat16
        )

    lengths = warming.prompt_lengths(num_experts, top_k, 10_000)
    tiles = [tile_of(length) for length in (warming.PROMPT_TOKENS, *lengths)]
    assert tiles == [tile for _, tile in TILES_16_BIT["gated"]]
    assert [tile_of(length - 1) for length in lengths] == tiles[:-1]  # none is shorter
    assert warming.prompt_lengths(num_experts, top_k, lengths[1] - 1) == lengths[:1]


@emulated
def test_prompts_of_other_lengths_are_computed_on_a_device(checkpoint, monkeypatch):
    pytest.importorskip("triton")
    repair_interpreter()
    monkeypatch.setattr(warming, "prompt_lengths", lambda *given: [17, 19][: given[-1] == 40])
    model = load_on_emulated_device(checkpoint, slots_a_layer=6)
    seen: list[tuple[int, int]] = []
    forward = model.forward

    def passed(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        seen.append((args[0].shape[1], output.logits.shape[1]))
        return output

    model.forward = passed
    with model.moe:
        warming.warm(model, experts_modules_of(model), 40, None)
        model.moe.check()
    prompt, steps = warming.PROMPT_TOKENS, warming.NEW_TOKENS
    assert seen == [(prompt, prompt), *[(1, 1)] * steps, (17, 1)]


@pytest.mark.gpu
def test_a_gpu_computes_steps_as_one_graph_from_the_first_request_on(checkpoint):
    model: Any = moe_runtime.load(checkpoint, device="cuda", max_tokens=64, warm_up=True)
    with model.moe:
        model.generate(PROMPT.to("cuda"), max_new_tokens=4, do_sample=False)
        assert model.forward.is_one_graph
        assert model.moe.stats().misses == 0
