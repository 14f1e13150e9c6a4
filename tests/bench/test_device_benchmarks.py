"""`benchmarks/device_decode.py`, `fine_tuning.py` and `kernels.py`: what needs no GPU."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.benchmarks import device_decode, fine_tuning, kernels
from moe_runtime.benchmarks.device_decode import Answer, compare, error_of
from moe_runtime.benchmarks.suite import read_results

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"
# 2 layers, D, F, E, K = 64, 32, 8, 2; 2 heads of 32, 1 of keys; 320 tokens.
EXPERT_BYTES = 2 * 3 * 64 * 32
LAYER = 64 * 64 * 2 + 2 * 32 * 64 + 8 * 64 + 2 * 64 + 2 * 32
ACTIVE_BYTES = 2 * (2 * LAYER + 320 * 64 + 64 + 64) + 2 * 2 * EXPERT_BYTES


def rehearsed(
    module: Any, out: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    script = SCRIPTS / f"{module.__name__}.py"
    words = [str(script), "--device", "cpu", "--tiny", "--output", str(out), *words]
    monkeypatch.setattr(sys, "argv", words)
    assert module.main() == 0
    return read_results(out)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("module", [device_decode, fine_tuning, kernels])
def test_without_a_gpu_it_says_so_in_one_line(module, monkeypatch, capsys):
    words = ["device"] if module is fine_tuning else []
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *words])
    assert module.main() == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "no GPU here; rehearse with --device cpu --tiny\n")


def test_the_rehearsal_of_decoding(tmp_path, monkeypatch):
    words = ["--repeats", "2", "--prompt-tokens", "4", "--new-tokens", "4", "--long-prompt", "64"]
    found = rehearsed(
        device_decode, tmp_path / "found.json", [*words, "--seconds", "1e9"], monkeypatch
    )
    settings = found["settings"]
    assert settings["active_bytes_a_token"] == ACTIVE_BYTES
    systems = {one["system"]: one for one in found["measurements"]}
    resident, half, quarter = (
        f"moe_runtime, {share} resident, misses device, dynamic cache"
        for share in ("100%", "50%", "25%")
    )
    kinds = ("grouped_mm", "moe_runtime")
    peers = [f"transformers, {kind}, dynamic cache" for kind in kinds]
    assert [*systems] == [resident, half, *peers, quarter]
    errors = {name: one["summary"]["error"]["median"] for name, one in systems.items()}
    # bf16 has 8 bits, and a residual stream a few roundings in each of two layers
    assert all(2**-12 < error < 2**-5 for error in errors.values())
    assert errors[resident] == errors[half] == errors[quarter]
    most = pytest.approx(1.5 * max(errors[name] for name in peers))
    assert [*settings["aims"]] == [f"{name}: error" for name in (resident, half, quarter)]
    for aim in settings["aims"].values():
        assert (aim["asked"], aim["measured"], aim["holds"]) == (most, errors[half], True)
    for name, one in systems.items():
        first, _ = one["repetitions"]
        assert "prefill_tokens_per_s" in first
        for row in one["repetitions"]:
            read = row["tokens_per_s"] * ACTIVE_BYTES / settings["rates"]["copy_bytes_s"]
            assert row["read_of_copy"] == pytest.approx(read)
            if name in (half, quarter):
                # every layer asks for two experts
                assert row["missed_a_token"] == pytest.approx(4 * (1 - row["hit_rate"]))
                assert row["read_bytes_a_token"] >= row["missed_a_token"] * EXPERT_BYTES > 0
        if name in (half, quarter):
            assert (first["same_bits"], one["quality"]) == (1, {"compared": 4, "equal": 4})
    assert [row["hit_rate"] for row in systems[resident]["repetitions"]] == [1, 1]


@pytest.mark.long
def test_the_rehearsal_of_training(tmp_path, monkeypatch):
    words = ["device", "--steps", "2", "--rows", "2", "--context", "8"]
    found = rehearsed(fine_tuning, tmp_path / "found.json", words, monkeypatch)
    resident, partial = (one["repetitions"] for one in found["measurements"])
    assert [resident[0]["experts_with_slots"], partial[0]["experts_with_slots"]] == [16, 6]
    assert [one["loss"] for one in resident] == [one["loss"] for one in partial]
    for steps in (resident, partial):
        assert [one.get("tokens_per_s", 0) * one.get("step_s", 0) for one in steps] == (
            pytest.approx([0, 16, 16])
        )
    speed, difference = found["settings"]["aims"].values()
    speeds = (one["summary"]["tokens_per_s"]["median"] for one in found["measurements"])
    assert speed["measured"] == pytest.approx(1 / next(speeds) * next(speeds))
    assert speed["holds"] == (speed["measured"] >= 0.5)
    assert (difference["measured"], difference["holds"]) == (0, True)


def test_what_was_measured_stays_where_a_later_row_fails(tmp_path, monkeypatch):
    words = ["--repeats", "1", "--prompt-tokens", "4", "--new-tokens", "4", "--long-prompt", "8"]

    def fail(bench: Any) -> None:
        raise OSError("no memory is left")

    monkeypatch.setattr(device_decode, "peers", fail)
    with pytest.raises(OSError, match="no memory is left"):
        rehearsed(device_decode, tmp_path / "found.json", [*words, "--seconds", "1e9"], monkeypatch)
    found = read_results(tmp_path / "found.json")["measurements"]
    assert [len(one["repetitions"]) for one in found] == [1, 1]


def test_the_rehearsal_of_kernels_measures_every_backend(tmp_path, monkeypatch, capsys):
    results = rehearsed(kernels, tmp_path / "found.json", [], monkeypatch)
    settings = results["settings"]
    assert settings["dense_tflops"] > 0
    (shape,) = settings["shapes"].values()
    # 2 T D + 4 T K F bytes for T, D, F, K = 32, 64, 48, 2.
    assert shape["closed_form_bytes"] == 2 * 32 * 64 + 4 * 32 * 2 * 48
    found = {one["system"]: one["repetitions"][0] for one in results["measurements"]}
    assert [*found][:3] == ["tiny, eager", "tiny, grouped_mm", "tiny, moe_runtime"]
    rows = [found.pop(name) for name in [*found][:3]]
    for row in rows:
        seconds = 6 * 32 * 2 * 64 * 48 / row["forward_tflops"] / 1e12
        assert seconds == pytest.approx(row["forward_s"])
        assert row["forward_of_dense"] == pytest.approx(
            row["forward_tflops"] / settings["dense_tflops"]
        )
        # Every expert was chosen by somebody: all weights were read.
        read = 8 * 3 * 64 * 48 * 2 / row["forward_s"]
        assert row["read_of_copy"] == pytest.approx(read / settings["copy_bytes_s"])
        assert row["both_tflops"] * row["both_s"] == pytest.approx(18 * 32 * 2 * 64 * 48 / 1e12)
        # What takes a GPU is absent.
        assert not {"graph_forward_s", "graph_read_of_copy", "kept_bytes", "peak_bytes"} & {*row}
    packed = [product for name, product in found.items() if "T=" in name]
    assert len(packed) == 8
    assert all(layer["read_of_copy"] > 0 and layer["written_ratio"] > 0 for layer in packed)
    assert len(found) == 6 + 8
    for product in found.values():
        assert product["ratio"] == pytest.approx(product["peer_seconds"] / product["seconds"])
    aims = settings["aims"]
    whole = ["tiny: forward_s", "tiny: both_of_peer"]
    assert [*aims] == whole + [f"{name}: ratio" for name in found]
    assert aims["tiny: both_of_peer"]["measured"] == rows[1]["both_s"] / rows[2]["both_s"]
    assert aims["mxfp4, T=4: ratio"]["asked"] == 1.6
    assert aims["mxfp4, T=40: ratio"]["asked"] == 0.7
    for name, aim in aims.items():
        at_most = name.endswith("_s")
        assert aim["holds"] == (
            aim["measured"] <= aim["asked"] if at_most else aim["measured"] >= aim["asked"]
        )
    said = capsys.readouterr().out.split()
    assert said.count("holds") + said.count("MISSED") == len(aims)


def test_logits_are_compared_as_far_as_texts_agree():
    """The token that differs counts, since it was taken from logits of the same text."""
    logits_NV = torch.tensor([[0.0, 4.0], [4.0, 0.0], [2.0, 1.9], [9.0, 0.0]])
    other_NV = torch.tensor([[0.0, 4.0], [4.0, 0.0], [1.9, 2.0], [0.0, 9.0]])
    wanted, answer = (Answer(each.argmax(1), each) for each in (logits_NV, other_NV))
    (found, counts), deviation = compare(answer, wanted), float(logits_NV.std())
    assert counts == {"compared": 4, "equal": 2}
    largest = pytest.approx(0.1 / deviation, rel=1e-5)
    assert found == {"same_bits": 0, "largest_difference": largest}
    # two of six logits differ by 0.1
    assert error_of(answer, wanted) == pytest.approx(0.1 / 3**0.5 / deviation, rel=1e-5)
    assert compare(wanted, wanted)[0] == {"same_bits": 1, "largest_difference": 0}
    assert error_of(wanted, wanted) == 0
