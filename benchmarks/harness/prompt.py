"""Token ids with the locality of real text, the same for every system under test.

Routing of the synthetic checkpoints depends on the token, so how often tokens come back decides how
well any expert cache can do. Random ids would have no locality and single bytes far too much.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from moe_runtime.bench.texts import language_reference as language_reference

# A prime that divides no vocabulary size in use: multiplying by it permutes the ids.
SPREAD = 7919
PIECE = re.compile(r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+(?=\S)|\s+")
LONGEST_PIECE = 6


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt ids, the ids of the text that follows them, and how they were made."""

    ids: tuple[int, ...]
    continuation: tuple[int, ...]
    source: str


def make_prompt(
    num_prompt: int, num_continuation: int, vocab_size: int, tokenizer_folder: Path | None
) -> Prompt:
    """Takes the ids of Python's own language reference, which every installation carries.

    Args:
        tokenizer_folder: a folder with `tokenizer.json`; None cuts the text into short words and
            hashes them into the vocabulary.

    Raises:
        ValueError: the text is shorter than the ids asked for.
    """
    wanted = num_prompt + num_continuation
    text = language_reference()
    if tokenizer_folder is None:
        ids = [_hash(piece, vocab_size) for piece in cut(text[: 40 * wanted])]
        source = "Python language reference, words hashed into the vocabulary"
    else:
        ids = _tokenize(text[: 40 * wanted], tokenizer_folder, vocab_size)
        source = f"Python language reference, tokenizer of {tokenizer_folder.name}"
    if len(ids) < wanted:
        raise ValueError(f"the text has {len(ids)} tokens, asked for {wanted}: ask for fewer")
    return Prompt(tuple(ids[:num_prompt]), tuple(ids[num_prompt:wanted]), source)


def cut(text: str) -> list[str]:
    """Cuts text about as a byte-pair tokenizer of 50 000 words does, long words in two or more."""
    return [
        piece[start : start + LONGEST_PIECE + 1]
        for piece in PIECE.findall(text)
        for start in range(0, len(piece), LONGEST_PIECE + 1)
    ]


def _hash(piece: str, vocab_size: int) -> int:
    digest = hashlib.blake2b(piece.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


def _tokenize(text: str, folder: Path, vocab_size: int) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    # A fixed one-to-one map when the vocabulary is larger than the tokenizer's.
    return [(index * SPREAD + 1) % vocab_size for index in ids]
