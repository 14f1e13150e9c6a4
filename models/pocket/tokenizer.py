"""The pocket model's tokenizer: byte-level BPE trained on the training documents."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moe_runtime.models.pocket.corpus import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"
VOCAB_SIZE = 4096

# The code outweighs the prose about ten times; without a correction its identifiers would take
# most of the merges.
_REPEATS = {"topic": 6, "docstring": 3, "source": 1}


def train_tokenizer(
    documents: list[Document], *, vocab_size: int = VOCAB_SIZE, max_length: int = 512
) -> "PreTrainedTokenizerFast":
    """Train byte-level BPE; any text round-trips, since all 256 bytes are tokens.

    `<|endoftext|>` ends a document and begins the next one (it is eos and bos); nothing is added
    to a text on encoding. Deterministic for given documents and library version.

    Args:
        documents: the training documents.
        vocab_size: entries of the vocabulary, the two special tokens included.
        max_length: context length recorded in the tokenizer's configuration.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_weighted(documents), trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def _weighted(documents: list[Document]) -> Iterator[str]:
    for document in documents:
        for _ in range(_REPEATS[document.kind]):
            yield document.text
