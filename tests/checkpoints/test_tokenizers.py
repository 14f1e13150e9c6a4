"""The files of a checkpoint's tokenizer: what is wrong with them is said of the one that it is."""

import base64
import json
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


def test_a_tokenizer_without_tokens_is_refused(tmp_path):
    checkpoint = tmp_path / "model"
    tiny_text_model(300).save_pretrained(checkpoint)
    model = {"type": "BPE", "vocab": {}, "merges": []}
    content = {"version": "1.0", "added_tokens": [], "model": model}
    (checkpoint / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="has no tokenizer files"):
        load_tokenizer(checkpoint)


def test_a_checkpoint_may_have_only_the_tokenizer_of_mistral(tmp_path):
    checkpoint = tmp_path / "model"
    tiny_text_model(300).save_pretrained(checkpoint)
    tokens = [
        {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode(), "token_str": None}
        for byte in range(256)
    ]
    names = ["<unk>", "<s>", "</s>"]
    special = [{"rank": n, "token_str": name, "is_control": True} for n, name in enumerate(names)]
    sizes = {"default_vocab_size": 259, "default_num_special_tokens": 3, "num_vocab_tokens": 256}
    config = {"pattern": r"\p{L}+|\s+|.", "version": "v7", **sizes}
    content = {"config": config, "vocab": tokens, "special_tokens": special}
    (checkpoint / "tekken.json").write_text(json.dumps(content))
    found = load_tokenizer(checkpoint)
    assert found.decode(found.encode("a b", add_special_tokens=False)) == "a b"
