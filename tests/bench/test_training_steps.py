"""`bench training`: losses agree with transformers'; who trains otherwise is out."""

import json
from pathlib import Path

import pytest
import torch
from text_checkpoint import NUM_EXPERTS, TOP_K, save_text_checkpoint

from moe_runtime.bench.experts.layers import LayerSizes
from moe_runtime.bench.results import read_results
from moe_runtime.bench.runner import PeerFailedError
from moe_runtime.bench.training_steps import (
    FusedAdamW,
    TrainingPlan,
    in_transformers,
    ours_in_memory,
)
from moe_runtime.cli.main import main
from moe_runtime.models.lm.export import export_hugging_face
from moe_runtime.models.lm.model import LanguageModel

SIZES = LayerSizes(num_experts=4, top_k=2, dim_model=32, dim_hidden=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_who_takes_other_steps_has_no_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    plan = TrainingPlan(sizes=SIZES, layers=1, sequences=2, context=16, dtype=dtype)
    reference = ours_in_memory(plan, [])
    expected = [reference.step() for _ in range(3)]
    assert len(set(expected)) == 3
    torch.manual_seed(0)
    export_hugging_face(LanguageModel(plan.config()), tmp_path / "model")
    sound = in_transformers("eager", plan, tmp_path / "model", expected)
    assert sound.repeat()["step_s"] > 0  # type: ignore[operator]
    assert sound.equal == sound.compared == 3
    wrong = in_transformers("eager", plan, tmp_path / "model", expected)
    assert isinstance(wrong._optimizer, FusedAdamW)
    # A rate that is a hundred times as large: the first loss agrees, those after it do not.
    for group in wrong._optimizer._adamw.param_groups:
        group["lr"] *= 100
    with pytest.raises(PeerFailedError, match="a loss differs by"):
        wrong.repeat()
    assert 1 <= wrong.equal < 3


def test_the_command_trains_in_memory_and_offloaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_text_checkpoint(tmp_path / "model")
    path = tmp_path / "r.json"
    words = ["--layers", "1", "--sequences", "1", "--context", "8", "--host-memory", "64MiB"]
    words += ["--quick", "--time", "1", "--threads", "1", "--precision", "1"]
    words += ["-o", str(path), "--json"]
    assert main(["bench", "training", str(tmp_path / "model"), *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == read_results(path)
    names = [one["system"] for one in printed["measurements"]]
    assert names == ["moe_runtime", "grouped_mm", "eager", "moe_runtime:offloaded"]
    for one in printed["measurements"]:
        assert one["quality"] == {"compared": 3, "equal": 3}
        assert list(one["summary"]) == ["step_s", "tokens_per_s"]
    found = printed["settings"]
    sizes = [found[name] for name in ("num_experts", "top_k", "dim_model", "dim_hidden")]
    assert sizes == [NUM_EXPERTS, TOP_K, 64, 48]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "expected MODEL or --shape"),
        (["--shape", "olmo"], "unknown shape 'olmo'"),
        (["--shape", "pocket", "--dtype", "float16"], "--dtype must be float32 or bfloat16"),
        (["--shape", "300m", "--layers", "1000"], "fewer --layers"),
    ],
)
def test_bad_words_of_training_are_one_line(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "training", *words]) == 2
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1
