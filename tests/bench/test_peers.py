"""Peers that are not installed here, each against a stand-in of its package that notes its calls.

The stand-ins (`tests/support/peers`) continue ids by a rule that a small peer here has, too; a peer
whose calls are in another order, or that loses a token, has another text and no numbers.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.benchmarks.cases.texts import LatencyPlan, ThroughputPlan, measure_texts
from moe_runtime.benchmarks.suite.peers import find_peer, find_peers, split_peer, why_unable
from moe_runtime.benchmarks.suite.runner import Rules
from moe_runtime.cli.main import main

STAND_INS = Path(__file__).resolve().parents[1] / "support" / "peers"
PROMPTS = [[3, 5], [60, 70]]
COUNTING = """
INSTALL = "pip install nothing"
PACKAGES = ()
class Peer:
    def __init__(self, settings):
        pass
    def load(self):
        pass
    def prefill_batch(self, prompts):
        self.sums = [sum(ids) for ids in prompts]
        return [one % 97 for one in self.sums]
    def step_batch(self, tokens):
        self.sums = [one + token for one, token in zip(self.sums, tokens)]
        return [one % 97 for one in self.sums]
    def close(self):
        pass
"""
STREAMING = ("ftllm:disk", "sglang")


class Bench:
    """A folder with a model and a log of what the stand-ins are called with."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log, self.model = folder / "calls.jsonl", folder / "model=a"
        self.model.mkdir()
        (self.model / "a.safetensors").write_bytes(bytes(1000))
        (self.model / "openvino_model.xml").write_text("<net/>")
        self.counting = folder / "counting.py"
        self.counting.write_text(COUNTING)
        paths = [STAND_INS, STAND_INS / "dispatched"]
        monkeypatch.setenv("PYTHONPATH", ":".join(map(str, paths)))
        monkeypatch.setenv("RECORDED_CALLS", str(self.log))

    def latency(self, peer: str, cap: int | None = None) -> dict[str, Any]:
        """What is measured of a peer, asked for as on the command line."""
        plan = LatencyPlan(prompts=PROMPTS, num_new=5, timeout_s=60)
        results = measure_texts(
            find_peer(str(self.counting), self.settings(cap)),
            [find_peer(f"{peer}@{sys.executable}={self.model}", self.settings(cap))],
            plan,
            Rules(judged=("first_token_s",), least=1, most=1),
            settings={},
        )
        return results["measurements"][1]

    def settings(self, cap: int | None) -> dict[str, Any]:
        return {"num_threads": 3, "max_tokens": 7, "model": "elsewhere", "cap_bytes": cap}

    def calls(self, name: str) -> list[tuple[list[Any], dict[str, Any]]]:
        lines = map(json.loads, self.log.read_text().splitlines())
        return [(args, options) for found, args, options in lines if found == name]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


@pytest.mark.parametrize("peer", ["accelerate", "openvino", "vllm", *STREAMING])
def test_every_token_arrives_once(peer: str, bench: Bench) -> None:
    """Two prompts of five tokens, the first one read twice: once untimed."""
    found = bench.latency(peer)
    assert found["failure"] is None
    assert found["system"] == peer
    assert found["quality"] == {"compared": 10, "equal": 10}
    (repetition,) = found["repetitions"]
    assert (len(repetition["first_token_s"]), len(repetition["between_tokens_s"])) == (2, 8)


def test_vllm_is_given_each_token_as_a_piece_of_a_resumable_request(bench: Bench) -> None:
    bench.latency("vllm")
    ((_, options),) = bench.calls("EngineArgs")
    assert options == {
        "model": str(bench.model),
        "skip_tokenizer_init": True,
        "max_model_len": 7,
        "max_num_seqs": 256,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "kv_cache_memory_bytes": (1024 + 7) << 18,
    }
    rules = {"temperature": 0.0, "max_tokens": 1, "detokenize": False}
    assert bench.calls("SamplingParams") == [([], rules)]
    pieces = [args for args, _ in bench.calls("process_inputs")]
    assert all(name == "0" and resumable for name, _, resumable in pieces)
    given = [prompt["prompt_token_ids"] for _, prompt, _ in pieces]
    said = [[8], [16], [32], [64], [33], [66], [35], [70]]
    assert given == [[3, 5], *said[:4], [3, 5], *said[:4], [60, 70], *said[4:]]
    # Nothing is there at first, and each prompt ends the request before it.
    assert bench.calls("abort_request") == [([names, True], {}) for names in ([], ["0"], ["0"])]


def test_vllm_is_not_asked_for_more_sequences_than_it_takes_at_a_time(bench: Bench) -> None:
    plan = ThroughputPlan(batches=[[[3, 5]] * 257], num_new=2, timeout_s=60)
    results = measure_texts(
        find_peer(str(bench.counting), bench.settings(None)),
        [find_peer(f"vllm={bench.model}", bench.settings(None))],
        plan,
        Rules(judged=("new_tokens_per_s",), least=1, most=1),
        settings={},
    )
    failure = results["measurements"][1]["failure"]
    expected = "ValueError: vLLM is asked for 256 sequences at most, not 257 (vllm.py, line "
    assert failure.startswith(expected)


def test_sglang_is_asked_for_greedy_tokens_and_shut_down(bench: Bench) -> None:
    bench.latency("sglang")
    ((_, options),) = bench.calls("Engine")
    assert options == {
        "model_path": str(bench.model),
        "skip_tokenizer_init": True,
        "context_length": 7 + 8,
        "disable_radix_cache": True,
        "max_total_tokens": 1024 + 7 + 8,
        "max_running_requests": 1,
    }
    rules = {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True}
    first, again, second = (args for args, _ in bench.calls("generate"))
    assert first == again == [[3, 5], rules, True]
    assert second == [[60, 70], rules, True]
    assert len(bench.calls("shutdown")) == 1


def test_ftllm_says_where_experts_lie_and_frees_the_weights(bench: Bench) -> None:
    bench.latency("ftllm:disk")
    assert bench.calls("set_cpu_threads") == [([3], {})]
    assert bench.calls("set_device_map") == [(["cpu", False], {}), (["disk", True], {})]
    assert bench.calls("model") == [([str(bench.model), "float16"], {})]
    launches = [args for args, _ in bench.calls("launch")]
    assert launches == [[7, ids, 5, 5, False] for ids in ([3, 5], [3, 5], [60, 70])]
    assert len(bench.calls("release_memory")) == 1
    assert not bench.calls("set_moe_cpu_cache")


@pytest.mark.parametrize(("variant", "caches"), [("disk", [([3 << 29], {})]), ("cpu", [])])
def test_ftllm_keeps_experts_in_half_of_a_cap(
    variant: str, caches: list[Any], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import nullcontext

    from moe_runtime.benchmarks.suite import peers as peer_process

    # What is told, not what is enforced: that takes rights.
    monkeypatch.setattr(peer_process, "memory_cap", lambda limit: nullcontext())
    assert bench.latency(f"ftllm:{variant}", 3 << 30)["failure"] is None
    assert bench.calls("set_moe_cpu_cache") == caches


@pytest.mark.parametrize(
    ("cap", "room"),
    [
        # half of the checkpoint's 1000 bytes, or what libraries and a layer leave of the cap
        (None, 500),
        (7 << 30, (7 << 30) - (5 << 29)),
        (1 << 30, 0),
    ],
)
def test_accelerate_has_the_memory_that_the_cap_leaves(
    cap: int | None, room: int, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import nullcontext

    from moe_runtime.benchmarks.suite import peers as peer_process

    # What is told, not what is enforced: that takes rights.
    monkeypatch.setattr(peer_process, "memory_cap", lambda limit: nullcontext())
    assert bench.latency("accelerate", cap)["failure"] is None
    ((args, options),) = bench.calls("from_pretrained")
    assert args == [str(bench.model)]
    assert options["max_memory"] == {"cpu": room}
    assert (options["device_map"], options["dtype"]) == ("auto", "auto")
    assert not Path(options["offload_folder"]).exists()


@pytest.mark.parametrize("peer", ["accelerate", "openvino", "vllm"])
def test_batches_go_side_by_side(peer: str, bench: Bench) -> None:
    plan = ThroughputPlan(batches=[PROMPTS], num_new=4, timeout_s=60)
    results = measure_texts(
        find_peer(str(bench.counting), bench.settings(None)),
        [find_peer(f"{peer}={bench.model}", bench.settings(None))],
        plan,
        Rules(judged=("new_tokens_per_s",), least=1, most=1),
        settings={},
    )
    found = results["measurements"][1]
    assert (found["failure"], found["quality"]) == (None, {"compared": 8, "equal": 8})


def test_openvino_needs_the_exported_folder(bench: Bench) -> None:
    (bench.model / "openvino_model.xml").unlink()
    failure = bench.latency("openvino")["failure"]
    assert failure.startswith("ValueError: no ")
    assert "name an exported folder, --peer openvino=FOLDER" in failure


def test_an_engine_that_stops_early_gets_no_numbers(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = (STAND_INS / "sglang.py").read_text().replace("- 2 -", "- 9 -")
    (tmp_path / "sglang.py").write_text(short)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{STAND_INS}")
    found = bench.latency("sglang")
    assert found["failure"] == "RuntimeError: 4 tokens came, 5 were asked for"
    assert found["repetitions"] == []


@pytest.mark.parametrize("peer", ["vllm"])
def test_where_it_is_not_installed_the_line_says_how(
    peer: str, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{peer}.py").write_text(f"raise ImportError('no {peer} here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    failure = bench.latency(peer)["failure"]
    assert failure.startswith(f"ImportError: no {peer} here; its environment ({sys.executable})")
    assert f"needs: pip install {peer}" in failure


def test_paths_may_hold_the_signs_that_divide(tmp_path: Path) -> None:
    folder = tmp_path / "a=b@c:d"
    folder.mkdir()
    peer, python, model = folder / "peer.py", folder / "python", folder / "m=1.gguf"
    for file in (peer, python, model):
        file.write_text("")
    for asked, expected in {
        f"{peer}": (str(peer), "", "", ""),
        f"{peer}:odd@{python}={model}": (str(peer), "odd", str(python), str(model)),
        f"llama_cpp={model}": ("llama_cpp", "", "", str(model)),
        f"llama_cpp@{python}": ("llama_cpp", "", str(python), ""),
        f"ftllm:disk@{python}={folder}": ("ftllm", "disk", str(python), str(folder)),
        # Nothing of it is there: the first way to read it.
        "vllm@no/python=no/model=1": ("vllm", "", "no/python", "no/model=1"),
        "x:y@z=": ("x", "y", "z", ""),
    }.items():
        assert split_peer(asked) == expected


def test_peers_of_one_name_are_called_after_what_sets_them_apart(tmp_path: Path) -> None:
    (tmp_path / "moe_runtime.py").write_text(COUNTING)
    for folder in ("packed", "other/packed"):
        (tmp_path / folder).mkdir(parents=True)
    python = tmp_path / "old" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    expected = {
        "vllm": "vllm",
        f"vllm@{python}": "vllm@old",
        f"moe_runtime={tmp_path}/packed": "moe_runtime=packed",
        f"moe_runtime@{python}={tmp_path}/packed/": "moe_runtime@old=packed",
        f"moe_runtime={tmp_path}/other/packed": "moe_runtime=packed#2",
        "vllm:": "vllm#2",
        # The only one of its name.
        f"llama_cpp@{python}={tmp_path}/packed": "llama_cpp",
        "transformers:eager": "transformers:eager",
        f"{tmp_path}/moe_runtime.py": "moe_runtime#2",
    }
    found = find_peers([word.removesuffix(":") for word in expected], {})
    assert [one.name for one in found] == list(expected.values())


@pytest.mark.parametrize(
    ("variant", "option"),
    [("int8", {"activations": "int8"}), ("planes", {"cache_code": "planes"}), (None, {})],
)
def test_this_project_beside_itself_has_its_options_and_the_variants(
    variant: str | None, option: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr("moe_runtime.load", lambda model, **given: loaded.append((model, given)))
    given = {"model": "m", "num_threads": torch.get_num_threads(), "cap_bytes": None}
    program = find_peer(
        f"moe_runtime:{variant}" if variant else "moe_runtime", {**given, "host_memory": "1GiB"}
    )
    peer = runpy.run_path(str(program.file))["Peer"](program.settings)
    peer.load()
    assert loaded == [("m", {"host_memory": "1GiB", **option})]


def test_an_interpreter_that_is_too_old_is_said_to_be(bench: Bench, tmp_path: Path) -> None:
    old = tmp_path / "python3.10"
    old.write_text("#!/bin/sh\necho 'unknown option -P' >&2\necho 'Try `python -h`' >&2\nexit 2\n")
    old.chmod(0o755)
    failure = why_unable(find_peer(f"vllm@{old}", bench.settings(None)), 60)
    assert failure == "its interpreter is older than Python 3.11, which peers need"


@pytest.mark.parametrize("read", ["counting.py", "model=a/openvino_model.xml"])
def test_results_replace_nothing_that_a_peer_reads(
    read: str, bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (tmp_path / read).read_text()
    peers = ["--peer", str(bench.counting), "--peer", f"openvino={bench.model}"]
    words = ["bench", "latency", "models/pocket", *peers, "-o", str(tmp_path / read)]
    assert main(words) == 2
    assert "would replace" in capsys.readouterr().err
    assert (tmp_path / read).read_text() == before
