"""What the systems are asked: token ids of real text, which every installation carries."""

from typing import Any


def language_reference() -> str:
    """The prose topics of ``pydoc``, Python's own language reference, longest first."""
    from pydoc_data.topics import topics

    return "\n\n".join(sorted(topics.values(), key=lambda topic: (-len(topic), topic)))


def cut_prompts(tokenizer: Any, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Prompts of equal length, one after another from the language reference.

    Args:
        tokenizer: of the model.
        num_prompts: how many.
        num_tokens: ids of each.

    Raises:
        ValueError: the text is too short for them.
    """
    wanted = num_prompts * num_tokens
    # No token of a text in English is as long as 40 characters on average.
    ids = tokenizer(language_reference()[: 40 * wanted], add_special_tokens=False)["input_ids"]
    if len(ids) < wanted:
        raise ValueError(
            f"the built-in text has {len(ids)} tokens, and {num_prompts} prompts of {num_tokens} "
            "are asked for; ask for shorter ones, or give --prompts FILE"
        )
    return [ids[start : start + num_tokens] for start in range(0, wanted, num_tokens)]
