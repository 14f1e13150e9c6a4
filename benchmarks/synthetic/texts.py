"""The text of benchmark prompts, Python's language reference, and a tokenizer trained on it.

Texts are cut as a published tokenizer of English would cut them; unused ids fill the vocabulary.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

TOKENIZER_NAME = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"


def language_reference() -> str:
    """The prose topics of ``pydoc``, Python's own language reference, longest first."""
    from pydoc_data.topics import topics

    return "\n\n".join(sorted(topics.values(), key=lambda topic: (-len(topic), topic)))


def cut_prompts(tokenizer: Any, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Prompts of equal length, consecutive parts of the language reference."""
    wanted = num_prompts * num_tokens
    # English tokens have fewer than 40 characters on average.
    ids = tokenizer(language_reference()[: 40 * wanted], add_special_tokens=False)["input_ids"]
    if len(ids) < wanted:
        raise ValueError(
            f"the built-in text has {len(ids)} tokens, and {num_prompts} prompts of {num_tokens} "
            "are asked for; ask for shorter ones, or give --prompts FILE"
        )
    return [ids[start : start + num_tokens] for start in range(0, wanted, num_tokens)]


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`; the last id is the end of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab, merges = _learned(vocab_size - 1)
    vocab = vocab | {f"<unused{index}>": index for index in range(len(vocab), vocab_size - 1)}
    vocab[END_OF_TEXT] = vocab_size - 1
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(folder / TOKENIZER_NAME))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


@cache
def _learned(vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and byte-pair merges learned from the language reference."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator([language_reference()], trainer)
    model = json.loads(learner.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]
