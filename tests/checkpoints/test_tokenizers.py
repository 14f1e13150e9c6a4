"""The files of a checkpoint's tokenizer: what is wrong with them is said of the one that it is."""

import re

import pytest
from text_checkpoint import tiny_text_model, tiny_tokenizer

from moe_runtime.checkpoints.opening import load_tokenizer
from moe_runtime.errors import CheckpointError


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", None, "model: has no tokenizer files, such as tokenizer.json"),
        ("tokenizer.json", "[]", "tokenizer.json cannot be read: expected a JSON object in UTF-8"),
        ("tokenizer_config.json", "3", "tokenizer_config.json cannot be read: expected a JSON"),
    ],
)
def test_tokenizers_that_are_missing_or_no_objects(tmp_path, name, content, reason):
    checkpoint = tmp_path / "model"
    tiny_text_model(300).save_pretrained(checkpoint)
    tiny_tokenizer().save_pretrained(checkpoint)
    (checkpoint / name).unlink()
    if content is not None:
        (checkpoint / name).write_text(content)
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        load_tokenizer(checkpoint)
