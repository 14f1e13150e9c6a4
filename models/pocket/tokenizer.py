"""The pocket model's tokenizer: byte-level BPE trained on the training documents."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moe_runtime.models.lm import tokenizer as lm_tokenizer
from moe_runtime.models.pocket.corpus import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 4096

# The code outweighs the prose about ten times; without a correction its identifiers would take
# most of the merges.
_REPEATS = {"topic": 6, "docstring": 3, "source": 1}


def train_tokenizer(
    documents: list[Document], *, vocab_size: int = VOCAB_SIZE, max_length: int = 512
) -> "PreTrainedTokenizerFast":
    """Train byte-level BPE on documents of all kinds, prose counting more than code.

    Args:
        documents: the training documents.
        vocab_size: entries of the vocabulary, the two special tokens included.
        max_length: context length recorded in the tokenizer's configuration.
    """
    return lm_tokenizer.train_tokenizer(
        _weighted(documents), vocab_size=vocab_size, max_length=max_length
    )


def _weighted(documents: list[Document]) -> Iterator[str]:
    for document in documents:
        for _ in range(_REPEATS[document.kind]):
            yield document.text
