"""Several models behind one address: names, one budget, one computing at a time."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_events import ask, request_of
from http_server import Served, started
from safetensors.torch import load_file, save_file
from text_checkpoint import save_text_checkpoint

import moe_runtime
from moe_runtime.cli.main import main
from moe_runtime.errors import CapacityError
from moe_runtime.inference import loading
from moe_runtime.inference.budget import AUTO_SHARE
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.serving.engine import Engine, Turns
from moe_runtime.serving.http import dividing
from moe_runtime.serving.http.dividing import Need, divide, server_bytes

LOADING = {"device": "cpu", "host_memory": "64MiB", "max_tokens": 64}
OTHERS = {"dtype": "auto", "cache_code": "none", "kv_cache": "exact", "misses": "device"}
OTHERS |= {"draft": "none"}
PROMPT = [5, 7, 11]
ASKED = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp("models") / name for name in ("one", "two")]
    for folder in folders:
        save_text_checkpoint(folder)
    file = folders[1] / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["lm_head.weight"].flip(0).contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    return folders


@pytest.fixture(scope="module")
def alone(checkpoints: list[Path]) -> list[list[int]]:
    """The texts of the models, each loaded by itself."""
    found = []
    for folder in checkpoints:
        model: Any = moe_runtime.load(folder, **LOADING)
        with model.moe, Engine(model) as engine:
            found.append(ask(engine, request_of(tuple(PROMPT), 6))[0].wait().ids)
    assert found[0] != found[1]
    return found


def test_requests_pick_their_model_by_name(checkpoints, alone):
    folders = [str(folder) for folder in checkpoints]
    with started(folders, {**LOADING, **OTHERS}) as (site, ready):
        _, listed = site.ask("/v1/models")
        assert [model["id"] for model in listed["data"]] == ["one", "two"]
        bodies = [{**ASKED, "model": name} for name in ("one", "two", "two", "one")]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda body: site.ask("/v1/completions", body), bodies))
        found = [answer["choices"][0]["token_ids"] for _, answer in answers]
        assert found == [alone[0], alone[1], alone[1], alone[0]]
        assert [answer["model"] for _, answer in answers] == ["one", "two", "two", "one"]
        status, refused = site.ask("/v1/completions", {**ASKED, "model": "three"})
        assert status == 404
        assert refused["error"]["message"].endswith("there is one, two")
        assert refused["error"]["code"] == "model_not_found"
        assert site.ask("/health") == (200, {"alive": True, "ready": True})
        metrics = site.ask("/metrics")[1]
        for name in ("one", "two"):
            label = f'{{engine="0",model_name="{name}"}}'
            assert f"vllm:generation_tokens_total{label} 12.0" in metrics
        budgets = [model.moe.stats().budget_bytes for model in ready.loaded]
        assert budgets[0] == budgets[1] > 0
        assert sum(budgets) <= 64 << 20


def token_ids(site: Served, name: str) -> list[int]:
    answer = site.answer("/v1/completions", {**ASKED, "model": name})
    return answer["choices"][0]["token_ids"]


def statuses(site: Served) -> dict[str, str]:
    return {model["id"]: model["status"]["value"] for model in site.ask("/models")[1]["data"]}


def settled(site: Served, name: str, status: str) -> None:
    while statuses(site)[name] != status:
        time.sleep(0.01)


@pytest.fixture
def frozen() -> Iterator[None]:
    """What is there is frozen, as `serve` does before the first request."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("fit", [1, 2])
@pytest.mark.usefixtures("frozen")
def test_models_on_demand_answer_as_alone_and_leave_nothing_behind(
    checkpoints, alone, monkeypatch, fit
):
    """Where both fit they share the budget; else the one goes for the other."""
    found = inspect_checkpoint(checkpoints[0], max_tokens=64)
    more_bytes = -1 if fit == 1 else 5 * found.slot_bytes
    budget = 2 * found.smallest_budget_bytes + more_bytes + server_bytes(64, 2)
    models: list[weakref.ref[Any]] = []
    load = moe_runtime.load

    def watched(*args: Any, **options: Any) -> Any:
        loaded = load(*args, **options)
        models.append(weakref.ref(loaded))
        budgets = [one.moe.stats().budget_bytes for ref in models if (one := ref()) is not None]
        assert sum(budgets) <= budget - server_bytes(64, 2)
        return loaded

    monkeypatch.setattr(moe_runtime, "load", watched)
    loading = {**LOADING, **OTHERS, "host_memory": budget}
    folders = [str(folder) for folder in checkpoints]
    with started(folders, loading, on_demand=True) as (site, ready):
        assert not ready.loaded
        assert statuses(site) == {"one": "unloaded", "two": "unloaded"}
        assert token_ids(site, "two") == alone[1]
        assert statuses(site) == {"one": "unloaded", "two": "loaded"}
        assert token_ids(site, "one") == alone[0]
        assert statuses(site) == {"one": "loaded", "two": "unloaded" if fit == 1 else "loaded"}
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(partial(token_ids, site), ("one", "two") * fit))
        assert answers == alone * fit
        for name in ("one", "two"):
            assert site.ask("/models/unload", {"model": name}) == (200, {"success": True})
            settled(site, name, "unloaded")
            assert gc.get_freeze_count()  # or each look for cycles passes over the whole server
        assert [ref() for ref in models] == [None] * len(models)
        assert 'model_name="one"' not in site.ask("/metrics")[1].partition("vllm:time_to")[0]
        if fit == 1:
            return
        assert site.ask("/models/load", {"model": "two"}) == (200, {"success": True})
        settled(site, "two", "loaded")
        assert token_ids(site, "two") == alone[1]
        assert site.refused("/models/load", {"model": "three"}, 404)["code"] == "model_not_found"


def test_an_idle_model_is_unloaded_after_the_request_that_loads_it(checkpoints, alone):
    loading = {**LOADING, **OTHERS}
    with started([str(checkpoints[0])], loading, idle_s=0.01, on_demand=True) as (site, _):
        assert token_ids(site, "one") == alone[0]
        settled(site, "one", "unloaded")
        assert site.ask("/v1/models/one")[1]["max_model_len"] is None
        assert site.ask("/health") == (200, {"alive": True, "ready": True})


def test_a_model_whose_files_are_gone_is_refused_and_others_answer(checkpoints, alone, tmp_path):
    gone = tmp_path / "gone"
    save_text_checkpoint(gone)
    folders = [str(gone), str(checkpoints[0])]
    with started(folders, {**LOADING, **OTHERS}, on_demand=True) as (site, _):
        (gone / "model.safetensors").unlink()
        refusal = site.refused("/v1/completions", {**ASKED, "model": "gone"}, 503)
        assert refusal["code"] == "model_not_loaded"
        assert str(tmp_path) not in refusal["message"]
        status = site.ask("/models")[1]["data"][0]["status"]
        assert status == {"value": "unloaded", "failed": True}
        assert token_ids(site, "one") == alone[0]


@pytest.mark.parametrize(("budget", "count"), [("auto", 2), ("1.0", 1)])
def test_memory_that_is_taken_meanwhile_makes_budgets_smaller(
    checkpoints, monkeypatch, budget, count
):
    """When models are loaded, little more is free than one needs."""
    least = inspect_checkpoint(checkpoints[0], max_tokens=64).smallest_budget_bytes
    share = AUTO_SHARE if budget == "auto" else 1.0
    left = int((least + 4096) / share)
    monkeypatch.setattr(dividing, "available_host_bytes", lambda: 4 * left)
    monkeypatch.setattr(loading, "available_host_bytes", lambda: left)
    folders = [str(folder) for folder in checkpoints[:count]]
    with started(folders, {**LOADING, **OTHERS, "host_memory": budget}) as (_, ready):
        found = [model.moe.stats().budget_bytes for model in ready.loaded]
    assert found == [int(share * left)] * count


def test_engines_compute_one_at_a_time_in_the_order_in_which_they_ask(checkpoints):
    turns = Turns()
    model: Any = moe_runtime.load(checkpoints[0], **LOADING)
    with model.moe, Engine(model, turns=turns) as engine:
        with turns.turn():
            answer, _ = ask(engine, request_of(tuple(PROMPT), 2))
            while not turns.is_wanted and not answer.events:
                pass
            assert engine.statistics().steps == 0
        answer.wait()
        assert engine.statistics().steps == 2

    order: list[str] = []

    def take(name: str) -> None:
        with turns.turn():
            order.append(name)

    threads = []
    with turns.turn():
        for number, name in enumerate("abc", 2):
            threads.append(threading.Thread(target=take, args=name))
            threads[-1].start()
            while turns._num_asked - turns._num_ended < number:
                pass
    take("holder")
    for thread in threads:
        thread.join()
    assert order == ["a", "b", "c", "holder"]


def test_a_budget_is_divided_by_what_models_need_and_what_their_experts_take():
    needs = {"small": Need(100, 300), "large": Need(200, 900)}
    assert divide(300, needs) == [100, 200]
    assert divide(700, needs) == [200, 500]
    assert divide(5000, needs) == [400, 1100]  # nobody has use for more
    assert divide(7, {"whole": Need(3, 0), "other": Need(4, 0)}) == [3, 4]
    assert divide(300 + 50, needs, 50) == [100, 200]
    with pytest.raises(CapacityError, match=r"300 B \(300 bytes\): 100 B for small, 200 B for lar"):
        divide(299, needs)


def test_models_that_cannot_be_served_together_are_refused_in_one_line(checkpoints, capsys):
    def refused(*words: str) -> str:
        assert main(["serve", *words, "--device", "cpu", "--port", "0", "--max-tokens", "64"]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1, said
        return said

    both = [str(folder) for folder in checkpoints]
    assert "two models are called 'one'" in refused(both[0], both[0])
    assert "expected one for each of 2 models" in refused(*both, "--name", "first")
    least = inspect_checkpoint(both[0], max_tokens=64).smallest_budget_bytes
    smallest = 2 * least + server_bytes(64, 2)
    said = refused(*both, "--host-memory", str(smallest - 1))
    assert "too small for all models and their adapters: the smallest that works is" in said
    assert f"({smallest} bytes)" in said
    smallest = least + server_bytes(64)
    for too_small in ("1B", server_bytes(64), smallest - 1):
        said = refused(both[0], "--host-memory", str(too_small))
        assert f"({smallest} bytes)" in said
        assert "6.004 MiB for the server" in said
