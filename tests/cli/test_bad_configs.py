"""A `config.json` with values of a wrong kind: one line that names key and file, and soon."""

import json
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.models.pocket import pocket_path

COMMANDS = {
    "run": ("--prompt", "The", "--max-new-tokens", "2"),
    "inspect": (),
    "bench latency": ("--quick",),
}


@pytest.fixture
def pocket(tmp_path: Path) -> Path:
    """The bundled model with a configuration of its own."""
    folder = tmp_path / "pocket"
    folder.mkdir()
    for file in pocket_path().iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file)
    return folder


def set_config(folder: Path, **values: Any) -> Path:
    file = folder / "config.json"
    content = json.loads((pocket_path() / "config.json").read_text()) | values
    file.unlink()
    file.write_text(json.dumps(content))
    return file


@pytest.mark.parametrize("command", COMMANDS)
def test_a_size_that_is_null(pocket, command, refused):
    file = set_config(pocket, vocab_size=None)
    expected = f"moe-runtime: error: {file}: expected vocab_size to be a whole number, found null\n"
    assert refused(*command.split(), str(pocket), *COMMANDS[command]) == expected


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("hidden_size", None, "a whole number, found null"),
        ("num_hidden_layers", None, "a whole number, found null"),
        ("intermediate_size", None, "a whole number, found null"),
        ("moe_intermediate_size", None, "a whole number, found null"),
        ("num_experts_per_tok", None, "a whole number, found null"),
        ("num_local_experts", None, "a whole number, found null"),
        ("rms_norm_eps", None, "a number, found null"),
        ("attention_dropout", None, "a number, found null"),
        ("hidden_act", None, "a text, found null"),
        ("tie_word_embeddings", 3, "true or false, found 3"),
        ("max_position_embeddings", True, "a whole number, found true"),
        ("dtype", "floaty", "a floating-point type of torch, such as 'bfloat16', found 'floaty'"),
    ],
)
def test_a_value_of_a_wrong_kind(pocket, key, value, expected, refused):
    file = set_config(pocket, **{key: value})
    message = refused("inspect", str(pocket))
    assert message.startswith(f"moe-runtime: error: {file}")
    assert message.endswith(f": expected {key} to be {expected}\n")
