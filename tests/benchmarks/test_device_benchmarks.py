"""`benchmarks/device_decode.py` and `device_training.py`: what of them needs no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import device_decode
import device_training
import pytest
import torch
from gpu_parts.device_decoding import Answer, compare, error_of

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"
# 2 layers, D, F, E, K = 64, 32, 8, 2; 2 heads of 32, 1 of keys; 320 tokens.
EXPERT_BYTES = 2 * 3 * 64 * 32
LAYER = 64 * 64 * 2 + 2 * 32 * 64 + 8 * 64 + 2 * 64 + 2 * 32
ACTIVE_BYTES = 2 * (2 * LAYER + 320 * 64 + 64 + 64) + 2 * 2 * EXPERT_BYTES


def rehearsed(
    module: Any, out: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    script = SCRIPTS / f"{module.__name__}.py"
    words = [str(script), "--device", "cpu", "--tiny", "--out", str(out), *words]
    monkeypatch.setattr(sys, "argv", words)
    assert module.main() == 0
    return json.loads(out.read_text())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("module", [device_decode, device_training])
def test_without_a_gpu_it_says_so_in_one_line(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py"])
    assert module.main() == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "no GPU here; rehearse with --device cpu --tiny\n")


def test_the_rehearsal_of_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--repeats", "1", "--prompt-tokens", "4", "--new-tokens", "4", "--long-prompt", "64"]
    found = rehearsed(
        device_decode, tmp_path / "found.json", [*words, "--seconds", "1e9"], monkeypatch
    )
    assert found["active_bytes_a_token"] == ACTIVE_BYTES
    rows = found["rows"]
    names = [(row["system"], row.get("share", row.get("experts"))) for row in rows]
    peers = [("transformers", kind) for kind in ("grouped_mm", "batched_mm", "moe_runtime")]
    fp32 = rows.pop(names.index(("fp32", None)))
    assert names == [("ours", 1.0), ("ours", 0.5), *peers, ("fp32", None), ("ours", 0.25)]
    assert fp32["is_equal_up_to_rounding"]
    # bf16 has 8 bits, and a residual stream a few roundings in each of two layers
    assert all(2**-12 < error < 2**-5 for error in fp32["errors"].values())
    for row in rows:
        read = row["tokens_per_s"] * ACTIVE_BYTES / found["rates"]["copy_bytes_s"]
        assert row["read_of_copy"] == pytest.approx(read)
        assert ("prefill_tokens_per_s" in row) == (row.get("experts") != "batched_mm")
        if row.get("share", 1) < 1:
            assert row["beside_resident"]["is_bit_equal"]
            own = fp32["errors"]["ours, 50% resident, misses device, dynamic cache"]
            assert row.get("error", own) == own
            # every layer asks for two experts
            assert row["missed_a_token"] == pytest.approx(4 * (1 - row["hit_rate"]))
            assert row["read_bytes_a_token"] >= row["missed_a_token"] * EXPERT_BYTES > 0
    assert rows[0]["hit_rate"] == 1


def test_the_rehearsal_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--steps", "1", "--tokens", "16", "--context", "8", "--rank", "2"]
    found = rehearsed(device_training, tmp_path / "found.json", words, monkeypatch)
    resident, partial = found["rows"]
    assert [resident["experts_with_slots"], partial["experts_with_slots"]] == [16, 6]
    assert resident["losses"] == partial["losses"]
    speed, difference = found["aims"]
    measured = partial["tokens_per_s"] / resident["tokens_per_s"]
    assert speed["measured"] == measured
    assert speed["holds"] == (measured >= 0.5)
    assert (difference["measured"], difference["holds"]) == (0, True)


def test_logits_are_compared_as_far_as_texts_agree() -> None:
    """The token that differs counts, since it was taken from logits of the same text."""
    logits_NV = torch.tensor([[0.0, 4.0], [4.0, 0.0], [2.0, 1.9], [9.0, 0.0]])
    other_NV = torch.tensor([[0.0, 4.0], [4.0, 0.0], [1.9, 2.0], [0.0, 9.0]])
    wanted, answer = (Answer(each.argmax(1), each) for each in (logits_NV, other_NV))
    found, deviation = compare(answer, wanted), float(logits_NV.std())
    assert (found["equal_tokens"], found["of_tokens"], found["is_bit_equal"]) == (2, 4, False)
    largest = pytest.approx(0.1 / deviation, rel=1e-5)
    assert found["largest_difference_in_deviations"] == largest
    # two of six logits differ by 0.1
    assert error_of(answer, wanted) == pytest.approx(0.1 / 3**0.5 / deviation, rel=1e-5)
    same = compare(wanted, wanted)
    assert (same["equal_tokens"], same["is_bit_equal"]) == (4, True)
    assert error_of(wanted, wanted) == 0
