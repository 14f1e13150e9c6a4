"""The look-ahead from hidden states, on the bundled model and text that it was not trained on."""

import argparse
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

import moe_runtime
from moe_runtime.inference.prediction import find_gates, fit_lookahead, record_hidden
from moe_runtime.lab.replay.evaluation import evaluate
from moe_runtime.models.pocket import pocket_path
from moe_runtime.policies.prediction import HiddenLookahead, NextGate, Shape


def test_gates_answer_as_the_model_does_and_learning_improves_on_them():
    tokenizer = AutoTokenizer.from_pretrained(pocket_path())
    source = Path(argparse.__file__).read_text(encoding="utf-8")
    ids = tokenizer(source, verbose=False)["input_ids"][: 24 * 96]
    windows = [ids[start : start + 96] for start in range(0, len(ids), 96)]
    model = moe_runtime.load(pocket_path(), device="cpu", max_tokens=128)
    with model.moe:
        routes, hidden = record_hidden(model, windows)
        shape = routes.shape
        gates, biases = find_gates(model, [f"model.layers.{i}.mlp" for i in range(6)], shape)

        # the control: a layer's own gate on its own input chooses the model's experts
        own = np.einsum("tld,led->tle", hidden.astype(np.float32), gates) + biases
        chosen = np.sort(np.argsort(-own, axis=2)[:, :, : shape.top_k], axis=2)
        same = (chosen == np.sort(routes.expert_ids, axis=2)).mean()
        assert same > 0.99  # ties and the rounding of float16 aside

        train, test = routes.select(range(18)), routes.select(range(18, 24))
        cut = train.num_tokens
        learned = fit_lookahead(model, train, hidden[:cut])
        plain = NextGate(shape)
        plain.set_gates(gates, biases)
    again = HiddenLookahead.from_state(shape, learned.state())
    control, gate, after = evaluate([plain, again], test, distances=(1, 2), hidden_TLD=hidden[cut:])
    assert control.at(1).mean_at_k == 1.0
    ahead = slice(1, None)
    assert gate.at(1).at_2k[ahead].mean() > 0.8
    assert after.at(1).at_2k[ahead].mean() > gate.at(1).at_2k[ahead].mean()
    assert after.at(2).at_2k[2:].mean() > gate.at(2).at_2k[2:].mean()


def test_gates_must_fit_the_hidden_states():
    estimator = HiddenLookahead(Shape(num_layers=2, num_experts=4, top_k=1))
    gates, biases = np.zeros((2, 4, 6), np.float32), np.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match=r"\(2, 4, 8\).*got \(2, 4, 6\)"):
        estimator.fit_hidden(None, np.zeros((1, 2, 8)), gates, biases)  # type: ignore[arg-type]
