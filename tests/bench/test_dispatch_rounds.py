"""`bench dispatch`: bytes of the closed form, equal results, and a peer that differs is out."""

import json
from pathlib import Path

import pytest
import torch

from moe_runtime.bench.dispatch_rounds import DispatchBenchPlan, DispatchSide
from moe_runtime.bench.padded_exchange import LOADS, ExchangeShape
from moe_runtime.bench.results import read_results
from moe_runtime.bench.runner import PeerFailedError
from moe_runtime.cli.main import main


def shape(load: str) -> ExchangeShape:
    return ExchangeShape(12, 8, 4, 2, load, "float32")


@pytest.mark.parametrize("load", LOADS)
def test_choices_of_a_token_differ_and_those_of_ranks_too(load: str) -> None:
    ids = shape(load).ids_TK(0)
    assert (ids[:, 0] != ids[:, 1]).all()
    assert (ids.min(), ids.max()) == (0, 3)
    assert not torch.equal(ids, shape(load).ids_TK(1))
    if load == "balanced":
        assert ids.flatten().bincount().tolist() == [6, 6, 6, 6]


class OneTokenOff:
    """Rounds that find one token of the comparison unequal."""

    plan = DispatchBenchPlan(shapes=[shape("uniform")], rounds=1)

    def tell(self, what: str, number: int, side: str) -> list[float]:
        return [11.0]


def test_a_peer_whose_results_differ_has_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    with pytest.raises(PeerFailedError, match="1 of 12 tokens differ"):
        DispatchSide("padded", OneTokenOff()).repeat()  # type: ignore[arg-type]


def test_the_command_measures_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    words = ["--tokens", "12", "--dim", "8", "--experts", "4", "--load", "balanced,zipf"]
    words += ["--dtype", "float32", "--quick", "--time", "1", "--precision", "1"]
    before = torch.get_num_threads()
    try:
        assert main(["bench", "dispatch", *words, "-o", str(path), "--json"]) == 0
    finally:
        torch.set_num_threads(before)
    printed = json.loads(capsys.readouterr().out)
    assert printed == read_results(path)
    assert (printed["settings"]["max_s"], printed["settings"]["precision"]) == (1.0, 1.0)
    ours, padded = printed["measurements"]
    assert ours["quality"] == padded["quality"] == {"compared": 48, "equal": 48}
    sent = [one["summary"]["balanced_float32_bytes"]["median"] for one in (ours, padded)]
    # Half of 12 * 2 rows of each rank leave it, of 8 * 4 bytes, there and back, on two ranks.
    assert sent == [12 * 8 * 4 * 2 * 2] * 2
    skewed = [one["summary"]["zipf_float32_bytes"]["median"] for one in (ours, padded)]
    assert skewed[0] < skewed[1]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--load", "zpif"], "unknown load 'zpif'"),
        (["--experts", "5"], "a multiple of the 2 ranks"),
        (["--top-k", "9", "--experts", "8"], "at most --experts"),
    ],
)
def test_bad_words_of_dispatch_are_one_line(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "dispatch", *words]) == 2
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1
