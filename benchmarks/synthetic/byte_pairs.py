"""A tokenizer for synthetic checkpoints, which servers need to take texts: byte pairs of a text.

Learned from the language reference that every installation carries, so that texts are cut as a
published tokenizer of English would cut them; ids that no text has fill the vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path

from moe_runtime.benchmarks.suite.texts import language_reference

TOKENIZER_NAME = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`; the end of a text has the last id.

    Args:
        vocab_size: more than the 256 bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = bytes_alone
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator([language_reference()], trainer)
    model = json.loads(learner.to_str())["model"]
    vocab = dict(model["vocab"])
    for index in range(len(vocab), vocab_size - 1):
        vocab[f"<unused{index}>"] = index
    vocab[END_OF_TEXT] = vocab_size - 1
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(pair) for pair in model["merges"]]))
    tokenizer.pre_tokenizer = bytes_alone
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(folder / TOKENIZER_NAME))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
