"""Configuration files: what they become, and what is said about a bad one."""

from pathlib import Path

import pytest
from training_runs import CONFIG, write_run

from moe_runtime.training.config_tree import read_tree
from moe_runtime.training.run_config import TrainConfig


def test_a_file_becomes_a_tree(tmp_path):
    config = read_tree(TrainConfig, write_run(tmp_path))
    assert config.model.moe is not None
    assert config.model.moe.loss_weights == {"load_balance": 0.01, "z": 0.001}
    assert config.data.sources["tales"].files == ("texts/tales-*.txt",)
    assert config.data.sequences_per_step == 8
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.run.output == Path("out")


def test_settings_override_the_file(tmp_path):
    settings = (
        "run.steps=3",
        "run.output = elsewhere/x",
        "model.moe.gate_options={ renormalize = false }",
        "data.sources.rules.weight=2",
        "optimizer.betas=[0.8, 0.9]",
    )
    config = read_tree(TrainConfig, write_run(tmp_path), settings=settings)
    assert config.run.steps == 3
    assert config.run.output == Path("elsewhere/x")
    assert config.model.moe is not None
    assert config.model.moe.gate_options == {"renormalize": False}
    assert config.data.sources["rules"].weight == 2.0
    assert config.optimizer.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps = 8", "stebs = 8", r"unknown key 'run.stebs'; did you mean 'steps'\?"),
        ("[optimizer]\npeak_rate = 1e-2\n", "[run.more]\n", "lacks the key 'optimizer.peak_rate'"),
        ("[optimizer]", "[optimiser]", r"unknown key 'optimiser'; did you mean 'optimizer'\?"),
        ("top_k = 2", "topk = 2", r"unknown key 'model.moe.topk'; did you mean 'top_k'\?"),
        ("[data.sources.rules]", "[data.sources.rules.x]", "unknown key 'data.sources.rules.x'"),
        ("steps = 8\n", "", "lacks the key 'run.steps'"),
        ("steps = 8", "steps = 8.5", "run.steps must be a whole number, got 8.5"),
        ("steps = 8", "steps = true", "run.steps must be a whole number, got True"),
        ("steps = 8", "steps = 0", r"\[run\]: steps must be at least 1, got 0"),
        (
            "[optimizer]",
            "[parallel]\noverlap = 'fast'\n[optimizer]",
            "parallel.overlap must be a whole number or 'auto', got 'fast'",
        ),
        (
            "[optimizer]",
            "[parallel]\noverlap = 'auto'\ntransport = 'panels'\n[optimizer]",
            "overlap auto is for the transports flat and hierarchical",
        ),
        (
            "steps = 8",
            "steps = 8\nlost_stage = 'neighbours'",
            "lost_stage is for runs with snapshots",
        ),
        (
            "[optimizer]",
            "[parallel]\nexperts = 'switching'\noverlap = 'auto'\nrebalance_every = 7\n[optimizer]",
            "rebalance_every is for experts that are rebalanced, not switching",
        ),
        (
            "[optimizer]",
            "[parallel]\netp = 2\noverlap = 'auto'\nrebalance_every = 7\n[optimizer]",
            "or for auto without placement and etp",
        ),
        (
            "steps = 8",
            "steps = 8\nlost_stage = 'neighbours'\nsnapshot_every = 1",
            "parallel.pp of at least 3 and a schedule other than zbv, got pp 1 and 1f1b",
        ),
        ("peak_rate = 1e-2", 'peak_rate = "fast"', "optimizer.peak_rate must be a number"),
        ("peak_rate = 1e-2", "peak_rate = 1" + "0" * 400, "peak_rate must be a number"),
        ("peak_rate = 1e-2", "peak_rate = nan", "peak_rate must be positive, got nan"),
        ("peak_rate = 1e-2", "peak_rate = 1\nbetas = [0.9]", "betas must be two numbers"),
        ("vocab_size = 300", "vocab_size = 999999999999", "at most 16777216"),
        ("warmup_steps = 2", "warmup_steps = -2", "warmup_steps must be at least 0"),
        ("tokens_per_step = 256", "tokens_per_step = 250", "must be a multiple of context"),
        ("micro_batches = 2", "micro_batches = 3", "must divide the 8 sequences"),
        ("short_context = 16", "short_context = 15", "must divide context"),
        ("context = 32", "context = 64", r"must be at most model.max_positions \(32\)"),
        ("num_kv_heads = 2", "num_kv_heads = 3", "num_kv_heads"),
        ("head_dim = 8", "head_dim = 7", "head_dim must be even"),
        ("head_dim = 8", "head_dim = 8\ndense_layers = [2]", r"must lie in 0\.\.1, got 2"),
        ("head_dim = 8", "head_dim = 8\ndense_layers = [0]", "intermediate_size is needed"),
        ("vocab_size = 300", "", "give either path"),
        ("vocab_size = 300", "vocab_size = 100", "at least 260"),
        ('files = ["texts/rules.txt"]', 'files = "texts/rules.txt"', "must be a list"),
        ('files = ["texts/rules.txt"]', "files = []", "at least one file"),
        ("weight = 1.0", "weight = -1.0", "weight must be at least 0"),
        ("threads = 1", "threads = 99999", "threads must be at most 4096, got 99999"),
        ("threads = 1", "seed = 9223372036854775808", "seed must be at most 9223372036854775807"),
        ("threads = 1", 'precision = "float16"', "run.precision is 'float16'"),
        ("z = 1e-3", 'z = "much"', "model.moe.loss_weights.z must be a number"),
        ("[run]", "[run", "not a TOML file"),
    ],
)
def test_bad_files_are_explained(tmp_path, old, new, message):
    assert old in CONFIG
    path = write_run(tmp_path, config=CONFIG.replace(old, new, 1))
    with pytest.raises(ValueError, match=message) as caught:
        read_tree(TrainConfig, path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("run.steps", "expected KEY=VALUE"),
        ("run.stebs=3", "did you mean 'steps'"),
        ("run.steps.more=3", "'steps' is not a table"),
        ("run.steps=soon", "must be a whole number, got 'soon'"),
    ],
)
def test_bad_settings_are_explained(tmp_path, setting, message):
    with pytest.raises(ValueError, match=message):
        read_tree(TrainConfig, write_run(tmp_path), settings=(setting,))
