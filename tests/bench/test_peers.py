"""Peers that are not installed here, each against a stand-in of its package (`support/peers`).

The stand-ins say the sum of all ids so far modulo 97; a peer that loses a token says another one.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.benchmarks.suite import PeerFailedError
from moe_runtime.benchmarks.suite.peers import (
    find_peer,
    find_peers,
    split_peer,
    started,
    why_unable,
)
from moe_runtime.cli.main import main

STAND_INS = Path(__file__).resolve().parents[1] / "support" / "peers"
PROMPTS = [[3, 5], [60, 70]]
ANSWERS = [[8, 16, 32, 64, 31], [33, 66, 35, 70, 43]]
COUNTING = """
INSTALL = "pip install nothing"
PACKAGES = ()
class Peer:
    def __init__(self, settings): ...
    def load(self): ...
    def prefill(self, ids): ...
    def step(self, token): ...
    def close(self): ...
"""


class StandIns:
    """A folder with a model, and a log of what the stand-ins are called with."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log, self.model = folder / "calls.jsonl", folder / "model=a"
        self.model.mkdir()
        (self.model / "a.gguf").write_bytes(b"")
        (self.model / "a.safetensors").write_bytes(bytes(1000))
        (self.model / "openvino_model.xml").write_text("<net/>")
        monkeypatch.setenv("PYTHONPATH", f"{folder}:{STAND_INS}:{STAND_INS / 'dispatched'}")
        monkeypatch.setenv("RECORDED_CALLS", str(self.log))

    def answers(self, peer: str, *, batch: bool = False, **settings: Any) -> list[list[int]]:
        """Likeliest tokens after the prompts, one after the other or in a batch."""
        common = {"num_threads": 3, "max_tokens": 7, "cap_bytes": None}
        model = self.model / "a.gguf" if peer == "llama_cpp" else self.model
        program = find_peer(f"{peer}@{sys.executable}={model}", common | settings)
        asked = {"num_new": 5, "given": None}
        with started(program, 60) as process:
            process.ask("start", settings=program.settings)
            process.ask("load")
            found = [process.ask("measure", prompts=[ids], **asked)["ids"][0] for ids in PROMPTS]
            if batch:
                assert process.ask("measure", prompts=PROMPTS, **asked)["ids"] == found
            process.ask("end")
        return found

    def calls(self, name: str) -> list[tuple[list[Any], dict[str, Any]]]:
        lines = map(json.loads, self.log.read_text().splitlines())
        return [(args, options) for found, args, options in lines if found == name]


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    return StandIns(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("peer", "batch"),
    [
        *[(name, True) for name in ("accelerate", "openvino", "vllm")],
        *[(name, False) for name in ("ftllm:disk", "sglang")],
    ],
)
def test_every_token_arrives_once(peer, batch, stand_ins):
    assert stand_ins.answers(peer, batch=batch) == ANSWERS


@pytest.mark.parametrize(
    ("settings", "memory"),
    [
        # half of the checkpoint's 1000 bytes, or what libraries and a layer leave of the cap
        ({}, {"cpu": 500}),
        ({"cap_bytes": 7 << 30}, {"cpu": (7 << 30) - (5 << 29)}),
        # 10,000 bytes are free on the GPU, 7,000 in RAM
        ({"device": "cuda:0", "device_memory": "auto"}, {"0": 9_000, "cpu": 7_000}),
        (
            {"device": "cuda:0", "device_memory": 6_000, "cap_bytes": 3 << 30},
            {"0": 6_000, "cpu": 1 << 29},
        ),
    ],
)
def test_accelerate_has_the_gpu_s_memory_first_and_what_the_cap_leaves(settings, memory, stand_ins):
    assert stand_ins.answers("accelerate", **settings) == ANSWERS
    ((args, options),) = stand_ins.calls("from_pretrained")
    assert args == [str(stand_ins.model)]
    assert options["max_memory"] == memory
    assert (options["device_map"], options["dtype"]) == ("auto", "auto")
    assert not Path(options["offload_folder"]).exists()


@pytest.mark.parametrize(
    ("device", "asked", "layers"),
    [("cuda:0", "auto", [0, 999]), ("cuda:0", 4_500, [0, 4]), ("cpu", "auto", [0])],
)
def test_llama_cpp_gives_a_gpu_as_many_layers_as_there_is_room_for(
    device, asked, layers, stand_ins
):
    assert stand_ins.answers("llama_cpp", device=device, device_memory=asked) == ANSWERS
    assert [args for args, _ in stand_ins.calls("load")] == [
        [str(stand_ins.model / "a.gguf"), True, number] for number in layers
    ]
    assert len(stand_ins.calls("free")) == len(layers) + 1  # the context, too


def changed(name: str, old: str, new: str, folder: Path) -> None:
    """A stand-in that is found before the one that it differs from."""
    (folder / name).write_text((STAND_INS / name).read_text().replace(old, new))


def test_llama_cpp_without_a_gpu_in_its_build_says_so(stand_ins, tmp_path):
    changed("llama_cpp.py", "return True", "return False", tmp_path)
    with pytest.raises(PeerFailedError, match="built without a GPU"):
        stand_ins.answers("llama_cpp", device="cuda:0", device_memory="auto")


def test_openvino_needs_the_exported_folder(stand_ins):
    (stand_ins.model / "openvino_model.xml").unlink()
    said = r"^ValueError: no .*name an exported folder, --peer openvino=FOLDER"
    with pytest.raises(PeerFailedError, match=said):
        stand_ins.answers("openvino")


def test_an_engine_that_stops_early_gets_no_numbers(stand_ins, tmp_path):
    changed("sglang.py", "- 2 -", "- 9 -", tmp_path)
    with pytest.raises(PeerFailedError, match=r"^RuntimeError: 4 tokens came, 5 were asked for"):
        stand_ins.answers("sglang")


def test_where_it_is_not_installed_the_line_says_how(stand_ins, tmp_path):
    (tmp_path / "vllm.py").write_text("raise ImportError('no vllm here')\n")
    with pytest.raises(PeerFailedError) as failure:
        stand_ins.answers("vllm")
    said = f"ImportError: no vllm here; its environment ({sys.executable}) needs: pip install vllm"
    assert str(failure.value).startswith(said)


def test_paths_may_hold_the_signs_that_divide(tmp_path):
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


def test_peers_of_one_name_are_called_after_what_sets_them_apart(tmp_path):
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
    [
        ("int8", {"activations": "int8"}),
        ("planes", {"cache_code": "planes"}),
        ("lookup", {"draft": "lookup"}),
        ("none+lru", {"draft": "none", "policy": "lru"}),
        (None, {}),
    ],
)
def test_this_project_beside_itself_has_its_options_and_the_variants(variant, option, monkeypatch):
    loaded: list[Any] = []
    monkeypatch.setattr("moe_runtime.load", lambda model, **given: loaded.append((model, given)))
    given = {"model": "m", "num_threads": torch.get_num_threads(), "cap_bytes": None}
    program = find_peer(
        f"moe_runtime:{variant}" if variant else "moe_runtime", {**given, "host_memory": "1GiB"}
    )
    peer = runpy.run_path(str(program.file))["Peer"](program.settings)
    peer.load()
    assert loaded == [("m", {"host_memory": "1GiB", **option})]


def test_an_interpreter_that_is_too_old_is_said_to_be(tmp_path):
    old = tmp_path / "python3.10"
    old.write_text("#!/bin/sh\necho 'unknown option -P' >&2\necho 'Try `python -h`' >&2\nexit 2\n")
    old.chmod(0o755)
    failure = why_unable(find_peer(f"vllm@{old}", {"num_threads": 1}), 60)
    assert failure == "its interpreter is older than Python 3.11, which peers need"


@pytest.mark.parametrize("read", ["counting.py", "model=a/openvino_model.xml"])
def test_results_replace_nothing_that_a_peer_reads(read, stand_ins, tmp_path, capsys):
    (tmp_path / "counting.py").write_text(COUNTING)
    before = (tmp_path / read).read_text()
    peers = ["--peer", str(tmp_path / "counting.py"), "--peer", f"openvino={stand_ins.model}"]
    words = ["bench", "latency", "models/pocket", *peers, "-o", str(tmp_path / read)]
    assert main(words) == 2
    assert "would replace" in capsys.readouterr().err
    assert (tmp_path / read).read_text() == before
