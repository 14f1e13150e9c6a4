"""Trains a byte-level BPE tokenizer.

Source: Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units" (2016), over
bytes as in GPT-2; the work is done by the `tokenizers` library.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, max_length: int | None = None
) -> "PreTrainedTokenizerFast":
    """Trains byte-level BPE; any text round-trips, since all 256 bytes are tokens.

    `<|endoftext|>` ends a document and begins the next one (it is eos and bos).
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
    tokenizer.train_from_iterator(texts, trainer=trainer)
    length = {} if max_length is None else {"model_max_length": max_length}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
        **length,
    )
