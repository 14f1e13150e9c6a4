"""A tiny random Mixture-of-Experts language model with a real tokenizer, for text to text."""

from pathlib import Path

import torch
from tiny_checkpoints import randomise
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

NUM_LAYERS = 3
NUM_EXPERTS = 8
TOP_K = 2
MAX_POSITIONS = 256

_SENTENCES = (
    "The store reads an expert from the disk when it is asked for one that is not in memory.",
    "A router sends every token to a few experts, and the rest of them may stay where they are.",
    "def function(argument): return argument if argument is not None else default",
    "Städte, naïve façades, π ≈ 3.14 and 日本語 are text as well.",
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with 400 entries; ``<|end|>`` (0) ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def tiny_text_model(vocab_size: int, dim_hidden: int = 48) -> OlmoeForCausalLM:
    """A random model, the same one on every call, in fp32; it never ends a text by itself."""
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=dim_hidden,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = OlmoeForCausalLM(config).float().eval()
    randomise(model)
    return model


def save_text_checkpoint(folder: Path) -> None:
    """Writes model and tokenizer in Hugging Face's format."""
    tokenizer = tiny_tokenizer()
    tiny_text_model(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
