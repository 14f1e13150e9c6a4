"""A tokenizer as Llama's and Mixtral's: spaces lie in the tokens, and decoding drops the first."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ("Once", "upon", "a", "time", "there", "was")


def sentencepiece_tokenizer(words: Sequence[str] = WORDS) -> Any:
    """Byte-fallback BPE with ``<s>`` before each text; a token for each word and its beginnings."""
    words = [f"\u2581{word}" for word in words]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += sorted({char for word in words for char in word})
    merges = []
    for word in words:
        for end in range(1, len(word)):
            if word[: end + 1] not in tokens:
                tokens.append(word[: end + 1])
                merges.append((word[:end], word[end]))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
