"""The recipe of the desk model, and the card that is made of a run."""

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_runtime.cli.main import main
from moe_runtime.models.desk import evaluate as desk
from moe_runtime.models.pocket import evaluate as pocket
from moe_runtime.models.pocket.corpus import KINDS, Document
from moe_runtime.models.pocket.texts import write_texts
from moe_runtime.training.config_tree import read_tree
from moe_runtime.training.run_config import TrainConfig

FOLDER = Path(desk.__file__).resolve().parent
MIB = 2**20
LAYERS, EXPERTS = 2, 6


def documents() -> list[Document]:
    """Little text of each kind, on both sides of the split."""
    line = "The for statement is used to iterate over the elements of sequence number {}.\n"
    found = [
        Document(kind=kind, name=f"topic:{number}", text=line.format(number) * 8)
        for kind in KINDS
        for number in range(40)
    ]
    assert {one.held_out for one in found} == {True, False}
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the recipe with fewer and smaller experts, two short steps long."""
    folder = tmp_path_factory.mktemp("desk")
    shutil.copyfile(FOLDER / "train.toml", folder / "train.toml")
    write_texts(documents(), folder / "texts")
    small = ["run.steps=2", "data.tokens_per_step=512", "run.evaluate_tokens=512"]
    small += [f"model.num_layers={LAYERS}", f"model.moe.num_experts={EXPERTS}"]
    small += ["model.moe.intermediate_size=40", "model.hidden_size=64"]
    words = [word for setting in small for word in ("--set", setting)]
    assert main(["train", str(folder / "train.toml"), *words]) == 0
    return folder / "runs" / "moe"


def test_the_recipe_has_experts_of_real_size_and_is_what_the_card_measured():
    config = read_tree(TrainConfig, FOLDER / "train.toml")
    moe = config.model.moe
    assert moe is not None
    assert MIB <= 2 * 3 * config.model.hidden_size * moe.intermediate_size <= 2 * MIB
    shape = json.loads((FOLDER / "evaluation.json").read_text())["shape"]
    assert shape == {
        "layers": config.model.num_layers,
        "experts": moe.num_experts,
        "top_k": moe.top_k,
        "hidden": config.model.hidden_size,
        "intermediate": moe.intermediate_size,
        "heads": config.model.num_heads,
        "kv_heads": config.model.num_kv_heads,
        "head_dim": config.model.head_dim,
    }


def test_the_card_is_of_a_model_that_learnt_and_uses_its_experts():
    evaluation = json.loads((FOLDER / "evaluation.json").read_text())
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == desk.render_card(evaluation)
    losses = evaluation["held_out_mixture"]
    assert losses["moe"]["nats_per_token"] < losses["unigram"]["nats_per_token"] - 1.5
    for layer in evaluation["expert_usage"]:
        assert 0.8 < layer["entropy"] < 1.0


def test_a_run_is_measured_and_gets_its_card(run, tmp_path, monkeypatch):
    monkeypatch.setattr(pocket, "gather", documents)
    monkeypatch.setattr(pocket, "SAMPLE_TOKENS", 3)
    desk.main(["--run", str(run), "--output", str(tmp_path), "--note", "Two steps."])
    found: dict[str, Any] = json.loads((tmp_path / "evaluation.json").read_text())
    assert "Two steps." in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "dense" not in found["held_out_mixture"]

    tokenizer: Any = AutoTokenizer.from_pretrained(run / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32).eval()
    end = tokenizer.eos_token_id
    ids: list[int] = []
    for one in documents():
        if one.kind == "topic" and one.held_out:
            ids += [*tokenizer(one.text)["input_ids"], end]
    assert len(ids) < pocket.CONTEXT, "else the text is measured in several windows"
    with torch.inference_mode():
        outputs = model(torch.tensor([[end, *ids]]), output_router_logits=True)
        scores = outputs.logits[0, :-1].double().log_softmax(-1)
        nats = -float(scores[torch.arange(len(ids)), ids].mean())
    # sums of float32 in another order; the file has four decimals
    assert found["held_out"]["topic"]["moe"]["nats_per_token"] == pytest.approx(nats, abs=2e-4)
    # all kinds have the same text here, so the shares of one are those of all
    for layer, logits in zip(found["expert_usage"], outputs.router_logits, strict=True):
        # the measured windows lack the last token
        chosen = Counter(logits[:-1].topk(2, dim=-1).indices.flatten().tolist())
        shares = [chosen[expert] / chosen.total() for expert in range(EXPERTS)]
        assert layer["shares"] == pytest.approx(shares, abs=1e-4)
        entropy = -sum(share * math.log(share) for share in shares if share)
        assert layer["entropy"] == pytest.approx(entropy / math.log(EXPERTS), abs=1e-3)
