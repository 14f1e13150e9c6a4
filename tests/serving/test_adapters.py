"""LoRA adapters that requests name: the texts that PEFT gives, beside the model's own."""

import copy
import dataclasses
import json
import math
import os
import random
import re
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moe_families
import peft
import pytest
import torch
from engine_events import Answer, ask, ask_all, greedy, request_of
from http_server import started
from safetensors.torch import load_file, save_file
from text_checkpoint import save_text_checkpoint
from tiny_checkpoints import save, tiny_model
from transformers import AutoModelForCausalLM

import moe_runtime
from moe_runtime.checkpoints.adapter_files import APPLIED, IGNORED, NEUTRAL, AdapterFolder
from moe_runtime.cli.main import main
from moe_runtime.config import format_bytes
from moe_runtime.errors import CheckpointError, MoERuntimeError, UnsupportedModelError
from moe_runtime.inference.adapters import Adapters
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.engine import Engine, Turns
from moe_runtime.serving.http.model_loader import AdapterChoice, adapters_of
from moe_runtime.serving.requests import EngineOptions

LOADING = {"device": "cpu", "host_memory": "64MiB", "max_tokens": 256}
PROMPTS = ((5, 7, 11), tuple(range(20, 60)), (300, 2))
NAMES = (None, "wide", "narrow")
SERVED = {**LOADING, "dtype": "auto", "cache_code": "none", "misses": "device"}
SERVED |= {"kv_cache": "exact", "draft": "none"}
NEAR = 1e-4
"""Between log-probabilities of fp32 products that sum in different orders: 64 terms and logits of a
few units round by 1e-6, and a layer's outputs are summed a few times."""


def write_adapter(base: Path, folder: Path, seed: int, **options: Any) -> Path:
    """As PEFT writes it, large enough to change texts."""
    torch.manual_seed(seed)
    settings = peft.LoraConfig(**{"init_lora_weights": False, **options})
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_text_checkpoint(folder := tmp_path_factory.mktemp("base") / "base")
    return folder


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("adapters")
    wide = write_adapter(
        base, place / "wide", 1, r=4, lora_alpha=3, use_rslora=True,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        alpha_pattern={r"layers\.1\.self_attn\.q_proj": 6},
    )  # fmt: skip
    narrow = write_adapter(base, place / "narrow", 2, r=2, target_modules=["v_proj"])
    # the settings that `finetune` writes are fewer, and name the layers in full
    names = load_file(narrow / "adapter_model.safetensors")
    layers = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in names}
    few = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "r": 2}
    few |= {"lora_alpha": 2.0, "target_modules": sorted(layers), "target_parameters": []}
    (narrow / "adapter_config.json").write_text(json.dumps(few))
    return {"wide": wide, "narrow": narrow}


@pytest.fixture(scope="module")
def model(base: Path) -> Iterator[Any]:
    found: Any = moe_runtime.load(base, **LOADING)
    with found.moe:
        yield found


@pytest.fixture(scope="module")
def adapters(model: Any, folders: dict[str, Path]) -> Adapters:
    return Adapters(model, {name: AdapterFolder(folder) for name, folder in folders.items()})


@pytest.fixture(scope="module")
def expected(base: Path, folders: dict[str, Path]) -> dict[Any, list[int]]:
    found = {}
    for name in NAMES:
        stock: Any = AutoModelForCausalLM.from_pretrained(base).eval()
        if name is not None:
            stock = peft.PeftModel.from_pretrained(stock, folders[name])
        for prompt in PROMPTS:
            found[name, prompt] = greedy_with_logprobs(stock, prompt)
    return found


def greedy_with_logprobs(model: Any, prompt: tuple[int, ...]) -> Any:
    ids = list(prompt)
    logprobs = []
    for _ in range(6):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        ids.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1)[ids[-1]]))
    return ids[len(prompt) :], logprobs


def require_same(answer: Answer, expected: Any) -> None:
    assert answer.ids == expected[0]
    assert [token.logprob for token in answer.tokens] == pytest.approx(expected[1], abs=NEAR)


@pytest.mark.parametrize("exact", [False, True])
def test_each_request_has_the_text_of_its_adapter(model, adapters, expected, exact):
    keys = [(name, prompt) for prompt in PROMPTS for name in NAMES]
    assert len({tuple(expected[key][0]) for key in keys}) == len(keys)
    turns = Turns()
    with Engine(model, EngineOptions(exact=exact), adapters=adapters, turns=turns) as engine:
        requests = [request_of(prompt, 6, adapter=name, num_logprobs=0) for name, prompt in keys]
        with turns.turn():
            answers = [ask(engine, request)[0] for request in requests]
        for answer, key in zip(answers, keys, strict=True):
            require_same(answer.wait(), expected[key])
        engine.check()
        # tokens have room for two waves of 6 passes; each adapter by itself takes thrice as many
        assert exact or engine.statistics().steps < 18


def test_adapters_take_turns_in_memory_for_one(model, folders, expected):
    found = {name: AdapterFolder(folder) for name, folder in folders.items()}
    largest = max(folder.num_bytes for folder in found.values())
    adapters = Adapters(model, found, max_bytes=largest)
    names = ("wide", "narrow", None, "wide", "narrow", "narrow")
    with Engine(model, adapters=adapters) as engine:
        requests = [request_of(PROMPTS[0], 6, adapter=name, num_logprobs=0) for name in names]
        for answer, name in zip(ask_all(engine, requests), names, strict=True):
            require_same(answer, expected[name, PROMPTS[0]])
        engine.check()
        assert engine.statistics().adapter_reads == 4  # nobody is overtaken
        ask(engine, requests[-1])[0].wait()
        assert engine.statistics().adapter_reads == 4
    with pytest.raises(ValueError, match=r"'wide' needs .* but adapters have .* of memory"):
        Adapters(model, found, max_bytes=largest - 1)


def test_an_adapter_that_cannot_be_read_fails_its_requests_alone(
    model, folders, expected, tmp_path
):
    found = {
        name: AdapterFolder(changed(folder, tmp_path / name)) for name, folder in folders.items()
    }
    file = tmp_path / "wide" / "adapter_model.safetensors"
    away = file.rename(tmp_path / "away")
    with Engine(model, adapters=Adapters(model, found)) as engine:
        requests = [request_of(PROMPTS[0], 6, adapter=name, num_logprobs=0) for name in NAMES]
        answers = ask_all(engine, requests)
        assert [answer.finished.reason for answer in answers] == ["length", "error", "length"]
        message = answers[1].finished.message or ""
        assert message.startswith("the adapter 'wide' cannot be read")
        assert str(tmp_path) not in message
        assert str(file) in (answers[1].finished.cause or "")  # the operator's log has it
        for answer, name in ((answers[0], None), (answers[2], "narrow")):
            require_same(answer, expected[name, PROMPTS[0]])
        away.rename(file)
        require_same(ask(engine, requests[1])[0].wait(), expected["wide", PROMPTS[0]])
        with file.open("r+b") as own:  # what is in memory stays as it is
            size = file.stat().st_size // 2
            own.seek(size)
            own.write(bytes(size))
        require_same(ask(engine, requests[1])[0].wait(), expected["wide", PROMPTS[0]])
        engine.check()


def test_an_adapter_whose_file_is_another_now_is_not_served(folders, tmp_path):
    """It may have another rank, and so more bytes and another scale; prefixes are the first's."""
    folder = AdapterFolder(changed(folders["narrow"], tmp_path / "one"))
    file = tmp_path / "one" / "adapter_model.safetensors"
    stored = load_file(file)
    wide = {name: torch.cat((own, own), int("lora_B" in name)) for name, own in stored.items()}
    save_file(wide, file)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="has changed"):
            folder.tensors()
        file.unlink()
        os.mkfifo(file)  # nobody waits for what is written to it


def test_an_adapter_of_what_expands_latents_goes_alone(tmp_path):
    (family,) = [f for f in moe_families.FAMILIES if str(f) == "DeepseekV3ForCausalLM"]
    tiny = tiny_model(family)
    found, expected = {}, {}
    for name in ("one", "other"):
        folder = save(tiny, tmp_path / f"base of {name}", sharded=False)
        options = {"r": 2, "target_modules": ["kv_b_proj"]}
        folder = write_adapter(folder, tmp_path / name, len(name), **options)
        stock: Any = peft.PeftModel.from_pretrained(copy.deepcopy(tiny), folder)
        found[name], expected[name] = AdapterFolder(folder), greedy_with_logprobs(stock, (5,))
    model: Any = moe_runtime.load(tmp_path / "base of one", **LOADING)
    turns = Turns()
    with model.moe, Engine(model, adapters=Adapters(model, found), turns=turns) as engine:
        requests = [request_of((5,), 6, adapter=name, num_logprobs=0) for name in found]
        with turns.turn():
            answers = [ask(engine, request)[0] for request in requests]
        for answer, name in zip(answers, found, strict=True):
            require_same(answer.wait(), expected[name])
        assert engine.statistics().steps == 2 * 6
        engine.check()


def test_ten_thousand_random_reservations_keep_to_the_memory():
    """Against a list of who has what: those in use stay, and a refusal is due to them alone."""
    draw = random.Random(0)
    sizes = {name: draw.randrange(1, 50) for name in "abcdefgh"}
    folders: Any = {
        name: types.SimpleNamespace(num_bytes=size, widths={}, stacked={}, tensors=dict)
        for name, size in sizes.items()
    }
    adapters = Adapters(torch.nn.Module(), folders, max_bytes=90)
    users: dict[int, str] = {}
    refused = 0
    for number in range(10_000):
        if users and draw.random() < 0.5:
            sequence = draw.choice(list(users))
            del users[sequence]
            adapters.release(sequence)
        else:
            name = draw.choice("abcdefgh")
            fits = sum(sizes[one] for one in {*users.values(), name}) <= 90
            assert adapters.reserve(number, name) == fits
            refused += not fits
            if fits:
                users[number] = name
                adapters.read(name)
        adapters.check()
    assert refused > 500
    assert 500 < adapters.num_reads < 4000


def test_a_model_with_adapters_keeps_its_own_bits(model, adapters):
    request = request_of(PROMPTS[1], 6, num_logprobs=3)
    with Engine(model) as engine:
        alone = ask(engine, request)[0].wait()
    with Engine(model, adapters=adapters) as engine:
        ask(engine, request_of(PROMPTS[1], 6, adapter="wide"))[0].wait()
        beside = ask(engine, request)[0].wait()
    assert beside.events == alone.events  # a prefix of the adapter's was not found either
    with adapters.applied([("wide", 1)]):  # nor does it change what others ask the model meanwhile
        aside: list[list[int]] = []
        other = threading.Thread(target=lambda: aside.append(greedy(model, PROMPTS[1], 6)))
        other.start()
        other.join()
        here = greedy(model, PROMPTS[1], 6)
    assert aside == [alone.ids]
    assert here != alone.ids


def test_prefixes_are_those_of_an_adapter(model, adapters):
    cached = []
    with Engine(model, adapters=adapters) as engine:
        for name in ("wide", "narrow", None, "wide", None):
            request = request_of(PROMPTS[1], 1, adapter=name)
            cached.append(ask(engine, request)[0].wait().read.cached_tokens)
        engine.check()
        with pytest.raises(ValueError, match="no adapter 'other'"):
            engine.submit(request_of(PROMPTS[0], 1, adapter="other"), Answer())
    assert cached == [0, 0, 0, 32, 32]


def test_adapters_are_models_of_the_server(base, folders, expected):
    words = [f"{name}={folder}" for name, folder in folders.items()]
    with started([str(base)], SERVED, words) as (site, ready):
        assert ready.loaded[0].moe.stats().budget_bytes < 64 << 20  # the rest is the adapters'
        _, listed = site.ask("/v1/models")
        parents = {found["id"]: found["parent"] for found in listed["data"]}
        assert parents == {"base": None, "wide": "base", "narrow": "base"}
        for name, asked in ((None, "base"), ("wide", "wide"), ("narrow", "narrow")):
            body = {"model": asked, "prompt": list(PROMPTS[0]), "max_tokens": 6, "temperature": 0}
            _, answer = site.ask("/v1/completions", {**body, "return_token_ids": True})
            assert answer["model"] == asked
            assert answer["choices"][0]["token_ids"] == expected[name, PROMPTS[0]][0]
        chat = {"model": "wide", "messages": [{"role": "user", "content": "a"}]}
        _, answer = site.ask("/v1/chat/completions", chat)
        assert "base has no chat template" in answer["error"]["message"]
        metrics = site.ask("/metrics")[1]
        assert 'vllm:generation_tokens_total{engine="0",model_name="base"} 18.0' in metrics
        assert "wide" not in metrics
        # the model goes, and comes back with its adapters for a request that asks for one
        assert site.ask("/models/unload", {"model": "base"})[0] == 200
        body = {"model": "wide", "prompt": list(PROMPTS[0]), "max_tokens": 6, "temperature": 0}
        _, answer = site.ask("/v1/completions", {**body, "return_token_ids": True})
        assert answer["choices"][0]["token_ids"] == expected["wide", PROMPTS[0]][0]


def test_adapters_are_loaded_and_unloaded_on_request(base, folders, expected):
    """As vLLM's endpoints; requests under way keep the adapter that they began with."""
    memory = 2 * sum(AdapterFolder(folder).num_bytes for folder in folders.values()) + (1 << 20)
    options = {"loads_adapters": True, "adapter_bytes": memory}

    def tokens(name: str) -> list[int]:
        body = {"model": name, "prompt": list(PROMPTS[0]), "max_tokens": 6, "temperature": 0}
        status, answer = site.ask("/v1/completions", {**body, "return_token_ids": True})
        return answer["choices"][0]["token_ids"] if status == 200 else [status]

    with started([str(base)], SERVED, [], **options) as (site, _):
        load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
        assert tokens("mine") == [404]
        for path, body, status in (
            (load, {"lora_name": "mine", "lora_path": str(base / "none")}, 404),
            (load, {"lora_name": "mine", "lora_path": str(base)}, 400),
            (load, {"lora_name": "mine"}, 400),
            (load, {"lora_name": "a\nb", "lora_path": str(folders["wide"])}, 400),
            (load, {"lora_name": "base", "lora_path": str(folders["wide"])}, 400),
            (load, {"lora_name": "x", "lora_path": "x", "base_model_name": "other"}, 404),
            (unload, {"lora_name": "mine"}, 404),
            (unload, {"lora_name": "base"}, 404),
        ):
            assert site.ask(path, body)[0] == status, (path, body)
        assert tokens("base") == expected[None, PROMPTS[0]][0]
        for name in ("wide", "narrow"):
            body = {"lora_name": "mine", "lora_path": str(folders[name])}
            assert site.ask(load, body)[0] == (200 if name == "wide" else 400)
            assert site.ask(load, {**body, "load_inplace": True})[0] == 200
            assert tokens("mine") == expected[name, PROMPTS[0]][0]
        _, listed = site.ask("/v1/models")
        parents = {found["id"]: found["parent"] for found in listed["data"]}
        assert parents == {"base": None, "mine": "base"}
        assert site.ask(unload, {"lora_name": "mine"})[0] == 200
        assert tokens("mine") == [404]
    with started([str(base)], SERVED, []) as (site, _):
        assert site.ask(load, {"lora_name": "a", "lora_path": str(folders["wide"])})[0] == 404


def test_the_first_screen_has_the_memory_of_adapters(base, folders, capsys):
    words = [f"--adapter={name}={folder}" for name, folder in folders.items()]
    words += ["--host-memory=64MiB", "--max-tokens=64", "--port=0", "--dry-run"]
    assert main(["serve", str(base), *words]) == 0
    whole = sum(AdapterFolder(folder).num_bytes for folder in folders.values())
    assert re.search(rf"adapters +{format_bytes(whole)} of memory", capsys.readouterr().err)
    assert main(["serve", str(base), *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"][0]["adapter_bytes"] == whole


def changed(folder: Path, place: Path, **settings: Any) -> Path:
    place.mkdir()
    save_file(load_file(folder / "adapter_model.safetensors"), place / "adapter_model.safetensors")
    given = json.loads((folder / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps({**given, **settings}))
    return place


def test_what_cannot_be_served_is_refused_by_the_name_of_its_tensor(base, folders, model, tmp_path):
    def refusal(folder: Path, kind: type[MoERuntimeError] = UnsupportedModelError) -> str:
        with pytest.raises(kind) as error:
            Adapters(model, {"one": AdapterFolder(folder)})
        assert "\n" not in str(error.value)
        return str(error.value)

    experts = write_adapter(
        base, tmp_path / "experts", 3, r=2, target_modules=[],
        target_parameters=["mlp.experts.down_proj"],
    )  # fmt: skip
    for settings, kind, said in (
        ({"target_parameters": None}, CheckpointError, "experts, which PEFT would ignore"),
        ({"target_parameters": ["experts.down_proj", "experts.gate_up_proj"]}, CheckpointError,
         "name model.layers.0.mlp.experts.gate_up_proj of the model, for which it has no"),
        ({"target_parameters": ["experts.gate_up_proj"]}, UnsupportedModelError,
         "the adapter of model.layers.0.mlp.experts.gate_up_proj has"),
        ({"rank_pattern": {"down_proj": 3}}, CheckpointError, "says rank 3 for"),
    ):  # fmt: skip
        place = tmp_path / f"experts {said[:30]}"
        assert said in refusal(changed(experts, place, **settings), kind)
    router = changed(folders["narrow"], tmp_path / "router", target_parameters=["mlp.gate.weight"])
    pair = {"A": torch.ones(2, 64), "B": torch.ones(8, 2)}
    save_file(
        load_file(folders["narrow"] / "adapter_model.safetensors")
        | {f"base_model.model.model.layers.0.mlp.gate.lora_{p}.weight": t for p, t in pair.items()},
        router / "adapter_model.safetensors",
    )
    assert "layers.0.mlp.gate.lora_A is on no linear layer and no experts" in refusal(router)
    narrow = folders["narrow"]
    named = changed(narrow, tmp_path / "named")
    save_file(
        load_file(folders["wide"] / "adapter_model.safetensors")
        | {"base_model.model.model.layers.0.mlp.lora_magnitude_vector": torch.ones(1)},
        named / "adapter_model.safetensors",
    )
    assert "lora_magnitude_vector is not an adapter of a linear" in refusal(named)
    output = changed(narrow, tmp_path / "output", target_modules=["lm_head"])
    pair = {"A": torch.ones(2, 64), "B": torch.ones(400, 2)}
    save_file(
        {f"base_model.model.lm_head.lora_{part}.weight": own for part, own in pair.items()},
        output / "adapter_model.safetensors",
    )
    assert "lm_head.lora_A is beside SmallBatchLinear of the model, expected" in refusal(output)
    half = changed(narrow, tmp_path / "half")
    halves = load_file(half / "adapter_model.safetensors")
    first = next(name for name in halves if "lora_B" in name)
    save_file({n: t for n, t in halves.items() if n != first}, half / "adapter_model.safetensors")
    assert "self_attn.v_proj.lora_A needs another" in refusal(half, CheckpointError)
    whole = {n: t for n, t in halves.items() if ".layers.0." not in n}
    save_file(whole, half / "adapter_model.safetensors")
    message = refusal(half, CheckpointError)
    assert "name model.layers.0.self_attn.v_proj of the model, for which it has no" in message
    file = changed(narrow, tmp_path / "wider") / "adapter_model.safetensors"
    save_file(
        {
            name: torch.ones(2, 65) if "lora_A" in name else tensor
            for name, tensor in load_file(file).items()
        },
        file,
    )
    assert "are for 65 inputs and 64 outputs" in refusal(file.parent)
    assert "there is no adapter_config.json" in refusal(tmp_path / "none", CheckpointError)


EXACTLY = {"r": 2, "target_modules": ["v_proj", "o_proj"]}
LIKE_PEFT: dict[str, dict[str, Any]] = {
    "a layer": {**EXACTLY, "layers_to_transform": 1},
    "layers": {**EXACTLY, "layers_to_transform": [0, 7], "layers_pattern": ["h", "layers"]},
    "no layers": {**EXACTLY, "layers_to_transform": [], "layers_pattern": "layers"},
    "full names": {
        "target_modules": ["model.layers.0.self_attn.q_proj", "k_proj"],
        "layers_to_transform": [1],
    },
    "excluded names": {**EXACTLY, "exclude_modules": ["layers.0.self_attn.v_proj"]},
    "an excluded pattern": {**EXACTLY, "exclude_modules": r".*\.1\..*v_proj"},
    "ranks": {
        **EXACTLY, "lora_alpha": 5, "use_rslora": True, "rank_pattern": {r"\d.*v_proj": 5},
        "alpha_pattern": {"self_attn.o_proj": 0.5, "o_proj": 70},
    },
    "no scale": {**EXACTLY, "lora_alpha": 0},
    "a negative scale": {**EXACTLY, "lora_alpha": -3},
    "first values": {**EXACTLY, "init_lora_weights": "orthogonal"},
    "minor components": {**EXACTLY, "init_lora_weights": "mica"},
    "magnitudes": {**EXACTLY, "lora_alpha": 3, "use_dora": True},
}  # fmt: skip
"""Settings with which PEFT writes an adapter."""

PATTERNS = {r".*\.0\.self_attn\.v_proj": ".layers.0.", "All-Linear": "", r".*v_proj": ""}
"""PEFT writes names in place of a pattern for this family, and reads patterns."""

IDLE: dict[str, Any] = {
    "task_type": "CAUSAL_LM", "auto_mapping": {"unsloth_fixed": True}, "peft_version": "0.99",
    "base_model_name_or_path": "other", "revision": "main", "inference_mode": False,
    "lora_dropout": 0.5, "loftq_config": {"loftq_bits": 4}, "eva_config": {"rho": 3.0},
    "corda_config": {}, "lora_ga_config": {}, "fan_in_fan_out": True, "megatron_core": "none",
    "qalora_group_size": 4, "runtime_config": {"ephemeral_gpu_offload": True},
}  # fmt: skip
"""A value other than PEFT's own of each setting that is without effect."""


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([PROMPTS[1]])).logits.log_softmax(-1)


def require_like_peft(base: Path, model: Any, folder: Path) -> None:
    adapters = Adapters(model, {"one": AdapterFolder(folder)})
    adapters.reserve(0, "one")
    adapters.read("one")
    with adapters.applied([("one", len(PROMPTS[1]))]):
        found = logits_of(model)
    stock: Any = AutoModelForCausalLM.from_pretrained(base).eval()
    stock = peft.PeftModel.from_pretrained(stock, folder)
    expected = logits_of(stock)
    torch.testing.assert_close(found, expected, rtol=0, atol=NEAR)
    alone = (expected - logits_of(model)).abs().max() < NEAR
    assert alone == (folder.name == "no scale")


@pytest.mark.parametrize("name", LIKE_PEFT)
def test_settings_are_obeyed_as_peft_obeys_them(base, model, tmp_path, name):
    require_like_peft(base, model, write_adapter(base, tmp_path / name, 4, **LIKE_PEFT[name]))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_layers_are_obeyed(base, model, tmp_path, pattern):
    part = PATTERNS[pattern]
    names = [f"model.layers.{layer}.self_attn.v_proj" for layer in range(3)]
    names = [name for name in names if part in name]
    if pattern == "All-Linear":
        names = [name.replace("v_proj", f"{one}_proj") for one in "qkvo" for name in names]
    folder = write_adapter(base, tmp_path / "written", 4, target_modules=names)
    settings = {"target_modules": pattern, "init_lora_weights": True}
    folder = changed(folder, tmp_path / "read", **settings)
    require_like_peft(base, model, folder)


def test_settings_without_effect_have_none(base, model, folders, tmp_path):
    assert IDLE.keys() == IGNORED
    require_like_peft(base, model, changed(folders["narrow"], tmp_path / "idle", **IDLE))
    for first in ("eva", "gaussian", True, False):
        folder = changed(folders["wide"], tmp_path / str(first), init_lora_weights=first)
        require_like_peft(base, model, folder)


def test_every_setting_of_peft_is_obeyed_idle_or_refused():
    groups = [APPLIED, IGNORED, NEUTRAL]
    names = [field.name for field in dataclasses.fields(peft.LoraConfig)]
    assert sorted(name for group in groups for name in group) == sorted(names)
    defaults = peft.LoraConfig().to_dict()
    for name, plain in NEUTRAL.items():
        assert defaults[name] is None or defaults[name] in plain, name


WRONG: dict[str, tuple[Any, ...]] = {
    "r": (-4, 0, None, 1e9, 10**9, True, "2", 3, 2.0),
    "lora_alpha": (math.nan, math.inf, -math.inf, "16", None, True, 10**400, 1e300, [1]),
    "use_rslora": ("false", 1),
    "use_dora": (True, "false", 1),  # without its vectors
    "rank_pattern": ({"v_proj": 3}, {"v_proj": 0}, {"v_proj": None}, ["v_proj"], {"(": 1}),
    "alpha_pattern": ({"v_proj": "1"}, {"v_proj": math.nan}, [], {"(": 1}),
    "target_modules": (None, ["q_proj"], "q_proj", "(", [], [1], 1, {}),
    "exclude_modules": (["v_proj"], ".*v_proj", "(", 1, [None]),
    "layers_to_transform": (0, [1], [7], True, ["0"], "0", 0.5),
    "layers_pattern": ("layers", ["layers"], 1),
    "peft_type": ("ADALORA", "XLORA", None),
    "bias": ("all", "lora_only"),
    "init_lora_weights": ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "new"),
    "modules_to_save": (["lm_head"],),
    "target_parameters": ("mlp.experts.down_proj", [1], {}),
    "layer_replication": ([[0, 1], [0, 2]],),
    "trainable_token_indices": ([1], []),
    "alora_invocation_tokens": ([1], []),
    "a_setting_of_tomorrow": (True, False, 0),
    **dict.fromkeys(("lora_bias", "use_qalora", "ensure_weight_tying"), (True,)),
    **dict.fromkeys(("velora_config", "monteclora_config", "kasa_config"), ({}, {"a": 1})),
    **dict.fromkeys(("arrow_config", "use_bdlora", "megatron_config"), ({}, {"a": 1})),
}


def test_wrong_settings_are_refused_by_their_names(folders, tmp_path):
    assert WRONG.keys() >= APPLIED.keys() | NEUTRAL.keys()
    folder = changed(folders["narrow"], tmp_path / "one", target_modules=["v_proj"])
    file = folder / "adapter_config.json"
    sound = json.loads(file.read_text())
    for name, values in WRONG.items():
        for value in values:
            file.write_text(json.dumps({**sound, name: value}))
            with pytest.raises(MoERuntimeError) as refusal:
                AdapterFolder(folder)
            message = str(refusal.value)
            assert "\n" not in message
            assert str(file.parent) in message
            is_no_json = "cannot be read as an object of JSON" in message
            is_no_pattern = "a pattern cannot be used" in message
            assert name in message or is_no_json or is_no_pattern, (name, value)
    del sound["peft_type"]
    file.write_text(json.dumps(sound))
    with pytest.raises(CheckpointError, match="peft_type must be"):
        AdapterFolder(folder)
    file.write_text(json.dumps({**sound, "peft_type": "LORA", "a_setting_of_tomorrow": None}))
    AdapterFolder(folder)


def test_names_of_adapters_are_read_with_their_models(base, capsys):
    assert adapters_of(["a=x", "m:b=y=z"], ["m"]) == [
        AdapterChoice("a", "m", Path("x")),
        AdapterChoice("b", "m", Path("y=z")),
    ]
    assert adapters_of(["n:a=x"], ["m", "n"]) == [AdapterChoice("a", "n", Path("x"))]
    for word, models in (
        ("a=x", ["m", "n"]),
        ("a", ["m"]),
        ("=x", ["m"]),
        ("m:=x", ["m"]),
        ("n:a=x", ["m"]),
    ):
        with pytest.raises(ValueError, match=r"expected .*NAME=FOLDER"):
            adapters_of([word], models)
    with pytest.raises(ValueError, match="'m' is the name of a model"):
        adapters_of(["m=x"], ["m"])
    words = ["serve", str(base), "--adapter", "one=none", "--port", "0", "--device", "cpu"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "none: expected the folder of an adapter as PEFT writes it" in said


def test_run_reads_the_adapter_it_is_given(capsys):
    assert main(["run", str(pocket_path()), "-p", "a", "--adapter", "nowhere"]) == 2
    assert "nowhere" in (error := capsys.readouterr().err)
    assert error.count("\n") == 1
