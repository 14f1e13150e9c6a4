"""`bench latency` and `bench throughput` with `--routing`: tokens go where a trace's went."""

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic_routes import make_routes
from text_checkpoint import NUM_EXPERTS, NUM_LAYERS, TOP_K
from traces import trace_of
from warm_python import warm_python

import moe_runtime
from moe_runtime.benchmarks.cases.routed import ROUTED_METRICS, RecordedRouting, TracedModel, teach
from moe_runtime.benchmarks.cases.routed_model import RoutedModel
from moe_runtime.benchmarks.suite import PeerFailedError, read_results
from moe_runtime.cli.main import main
from moe_runtime.inference.steps import LayerRouting, Listener, Step
from moe_runtime.lab.traces import write_trace
from moe_runtime.policies.prediction import Routes, Shape
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.requests import EngineOptions, GenerationRequest

SHAPE = Shape(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, top_k=TOP_K)
PROMPT, NEW = 5, 6
OLMOE = {"model_type": "olmoe", "vocab_size": 400}


@pytest.fixture(scope="module")
def routes() -> Routes:
    return make_routes(SHAPE, num_sequences=8, length=PROMPT + NEW + 1)


@pytest.fixture(scope="module")
def trace(routes: Routes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a file from elsewhere, which does not name its model."""
    path = tmp_path_factory.mktemp("traces") / "t.npz"
    np.savez(
        path,
        ids=routes.expert_ids.astype(np.uint8),
        probs=routes.gate_weights.astype(np.float16),
        token_ids=routes.token_ids.astype(np.int32),
        offsets=routes.offsets,
    )
    return path


class Noted(Listener):
    """Where the layers of a model sent their tokens, pass by pass."""

    wants_routing = True

    def __init__(self, model: Any) -> None:
        self.tokens: list[int] = []
        self.ids: list[np.ndarray] = []
        self.weights: list[np.ndarray] = []
        model._steps.listeners.add(self)

    def begin(self, step: Step) -> None:
        self.tokens += step.token_ids.tolist()

    def routed(self, routing: LayerRouting) -> None:
        self.ids.append(routing.ids_TK.numpy().copy())
        self.weights.append(routing.weights_TK.float().numpy().copy())

    def taken(self) -> tuple[np.ndarray, np.ndarray]:
        """``[L, T, K]`` of the last pass, which is forgotten."""
        found = np.stack(self.ids), np.stack(self.weights)
        self.ids, self.weights = [], []
        return found


def routing_of(model: Path, trace: Path, batches: list[list[int]]) -> RecordedRouting:
    return RecordedRouting(trace, model, None, batches, PROMPT, NEW)


@torch.inference_mode()
def test_tokens_go_where_those_of_the_trace_went(model, trace, routes, tmp_path):
    """Prompts and steps of two sequences side by side, by their positions; weights too. Those that
    are held stay at the routing of their first new token."""
    routing = routing_of(model, trace, [[0, 1], [2, 3]])
    loaded: Any = moe_runtime.load(model, host_memory="1GiB", device="cpu")
    routed = RoutedModel(loaded, str(routing.saved(tmp_path)))
    noted = Noted(loaded)
    starts = routes.offsets[[2, 3]]
    ids = torch.zeros((2, PROMPT), dtype=torch.long)
    for held in (False, True):
        routed.take(routing.requests(1, held=held))
        output = loaded(ids, use_cache=True)
        for place in range(PROMPT, PROMPT + 2):
            found, weights = noted.taken()
            before = np.arange(PROMPT) if place == PROMPT else np.array([place - 1])
            rows = (starts[:, None] + (np.full_like(before, PROMPT) if held else before)).ravel()
            assert found.transpose(1, 0, 2).tolist() == routes.expert_ids[rows].tolist()
            expected = routes.gate_weights[rows].astype(np.float16).astype(np.float32)
            assert weights.transpose(1, 0, 2).tolist() == expected.tolist()
            output = loaded(ids[:, :1], use_cache=True, past_key_values=output.past_key_values)
        noted.taken()
    loaded.moe.close()


@torch.inference_mode()
def test_a_model_routed_as_it_routes_itself_computes_the_same_bits(model, tmp_path):
    ids = torch.arange(3, 3 + PROMPT)[None]
    loaded: Any = moe_runtime.load(model, host_memory="1GiB", device="cpu")
    noted = Noted(loaded)
    expected = loaded(ids).logits
    own_ids, own_weights = (one.transpose(1, 0, 2) for one in noted.taken())
    np.savez(
        tmp_path / "own.npz",
        tokens=np.zeros(PROMPT),
        ids=own_ids,
        weights=own_weights,
        length=PROMPT,
    )
    routed = RoutedModel(loaded, str(tmp_path / "own.npz"))
    assert torch.equal(loaded(ids).logits, expected)
    np.savez(
        tmp_path / "other.npz",
        tokens=np.zeros(PROMPT),
        ids=own_ids[::-1],
        weights=own_weights,
        length=PROMPT,
    )
    loaded._steps.listeners.remove(routed)
    RoutedModel(loaded, str(tmp_path / "other.npz"))
    assert not torch.equal(loaded(ids).logits, expected)
    loaded.moe.close()


def test_reads_of_a_step_are_those_of_a_cache_that_is_counted_by_hand(model, trace, routes):
    """The first text fills the cache; of the others only decode steps count."""
    routing = routing_of(model, trace, [[0], [1], [2]])
    slots, misses, steps = 6, 0, 0
    recent: list[list[int]] = [[] for _ in range(NUM_LAYERS)]
    for number, request in enumerate([0, 0, 1, 2]):
        begin = int(routes.offsets[request])
        for place in range(PROMPT - 1, PROMPT + NEW - 1):
            rows = slice(begin, begin + PROMPT) if place < PROMPT else [begin + place]
            counts = number > 0 and place >= PROMPT
            steps += counts
            for layer, kept in enumerate(recent):
                used = routes.expert_ids[rows, layer].ravel().tolist()
                # those wanted most last: by the number of uses, then by the latest one
                order = sorted(set(used), key=lambda e: (used.count(e), -used[::-1].index(e)))
                order = order if place < PROMPT else used
                misses += counts * sum(expert not in kept for expert in order)
                for expert in order:
                    if expert in kept:
                        kept.remove(expert)
                kept += order
                del kept[:-slots]
    share = slots * NUM_LAYERS
    expert_bytes = 3 * 64 * 48 * 4
    assert routing.step_bytes("lru", share) == pytest.approx(misses * expert_bytes / steps)
    assert routing.step_bytes("belady-bypass", share) <= routing.step_bytes("lru", share)
    assert routing.step_bytes("lru", NUM_EXPERTS * NUM_LAYERS) <= routing.step_bytes("lru", share)


@pytest.mark.long
def test_a_network_is_taught_for_those_runs_alone_that_ask_for_it(model, tmp_path, monkeypatch):
    """By requests that a file of ours holds; too few of them end the run in a line."""
    monkeypatch.setattr(sys, "executable", warm_python())
    routes = make_routes(SHAPE, num_sequences=60, length=60, seed=1)
    trace = trace_of(routes)
    write_trace(tmp_path / "l.npz", replace(trace, signature=replace(trace.signature, **OLMOE)))
    asked = TracedModel("olmoe", replace(trace.signature, **OLMOE), NUM_LAYERS)
    teach(tmp_path / "l.npz", asked, model, tmp_path / "taught")
    assert [*(tmp_path / "taught").rglob("*-reuse.npz")]
    few = trace.steps(0, 40)
    write_trace(tmp_path / "few.npz", replace(few, signature=asked.signature))
    with pytest.raises(PeerFailedError, match=r"--train .*few\.npz: .* are too few"):
        teach(tmp_path / "few.npz", asked, model, tmp_path / "empty")


def test_bounds_are_the_longer_of_reads_and_computation(model, trace, monkeypatch):
    routing = routing_of(model, trace, [[0], [1]])
    disk = {"bytes_per_s": 1e6, "from_storage": 1.0}
    monkeypatch.setattr(routing, "measured_disk", lambda: disk)
    counts = [
        {"bytes_read": 3e6, "stall_s": 1.0, "predict_s": 0.2},
        {"bytes_read": 1e6, "stall_s": 0.0, "predict_s": 0.0},
    ]
    found: Any = routing.numbers([1.0, 2.0, 2.0, 3.0], [0.5, 9.0, 0.5], counts, 6)
    assert found.keys() == ROUTED_METRICS.keys()
    assert (found["step_s"], found["read_s"], found["computing_s"]) == (2.0, 1.0, 0.5)
    assert (found["bound_s"], found["of_bound"], found["stall_s"]) == (1.0, 0.5, 0.25)
    found = routing.numbers([4.0, 4.0], [2.5], counts, NUM_EXPERTS * NUM_LAYERS)
    assert (found["read_s"], found["bound_s"], found["of_bound"]) == (2.0, 2.5, 0.625)
    assert found["optimum_bound_s"] == 2.5


@pytest.mark.parametrize("case", ["latency", "throughput"])
def test_the_command_routes_by_a_trace_and_teaches(
    case, model, trace, tmp_path, monkeypatch, capsys
):
    """Policies in one run, of which one begins with a network that other requests taught."""
    monkeypatch.setattr(
        "moe_runtime.benchmarks.suite.peers.this_python", lambda: Path(warm_python())
    )
    taught = list[Any]()
    monkeypatch.setattr(
        "moe_runtime.benchmarks.cases.routed.teach",
        lambda *given: taught.append(given[-1].mkdir()),
    )
    path = tmp_path / "r.json"
    words = ["--routing", str(trace), "--prompt-tokens", str(PROMPT), "-n", str(NEW), "--quick"]
    words += ["--time", "1", "--threads", "1", "--policy", "lru", "--prefetch", "off"]
    words += ["--device", "cpu", "-o", str(path), "--json"]
    if case == "throughput":
        words += ["--batch", "3", "--peer", "moe_runtime:reuse+off+next-gate"]
    else:
        words += ["--peer", "moe_runtime:reuse+taught+enforce", "--train", str(trace)]
    assert main(["bench", case, str(model), *words]) == 0
    results = read_results(path)
    assert json.loads(capsys.readouterr().out) == results
    assert results["settings"]["routing"] == "t.npz"
    assert results["settings"]["predictor"] == "auto"
    assert "caution" not in results["settings"]
    assert len(taught) == (case == "latency")
    for one in results["measurements"]:
        assert one["failure"] is None
        assert one["quality"]["equal"] == one["quality"]["compared"] > 0
        found = one["repetitions"][0]
        assert found.keys() >= ROUTED_METRICS.keys()
        assert found["of_bound"] * found["step_s"] == pytest.approx(found["bound_s"])


def test_requests_of_an_engine_go_where_those_of_the_trace_went(model, trace, routes, tmp_path):
    """One after another; predictors see the ids of the trace, whatever is generated."""
    path = RecordedRouting(trace, model, None, [range(4)], PROMPT, NEW).saved(tmp_path)
    loaded: Any = moe_runtime.load(model, host_memory="1GiB", device="cpu", max_tokens=64)
    with loaded.moe, Engine(loaded, EngineOptions(most_running=1)) as engine:
        RoutedModel(loaded, str(path))
        noted = Noted(loaded)
        for _ in range(2):
            request = GenerationRequest(prompt_ids=(7,) * PROMPT, max_new_tokens=NEW)
            engine.submit(request, lambda _: None)
        assert engine.drain(60.0)
    steps = zip(*[iter(noted.ids)] * NUM_LAYERS, strict=True)  # layers of one pass after another
    found = np.concatenate([np.stack(layers, axis=1) for layers in steps])
    places = np.arange(PROMPT + NEW - 1)
    rows = (routes.offsets[:2, None] + places).ravel()
    assert found.tolist() == routes.expert_ids[rows].tolist()
    assert noted.tokens == routes.token_ids[rows].tolist()


def test_the_server_of_a_load_is_routed(model, trace, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", warm_python())
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    start = f"moe-runtime serve {model} --port {port} --max-tokens 512 --host-memory 64MiB"
    words = ["bench", "serve", "--routing", str(trace), "--url", f"http://127.0.0.1:{port}"]
    words += ["--requests", "2", "--prompt-tokens", "4", "--output-tokens", "3"]
    path = tmp_path / "r.json"
    assert main([*words, "--start", start, "-o", str(path)]) == 0, capsys.readouterr().err
    results = read_results(path)
    assert results["settings"]["routing"] == "t.npz"
    whole = results["measurements"][0]["repetitions"][-1]
    assert whole["answered"] == 2
    assert whole["reads_alone_s"] >= 0
    others = ("llama-server", f"/other/bin/{start}", f"moe-runtime serve {model} {model}")
    for wrong in (*others, f"moe-runtime serve --port 1 {model}"):
        assert main([*words, "--start", wrong]) == 2
        assert "the server whose experts are routed" in capsys.readouterr().err
