"""Token streams of the corpus, for measuring a trained model."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moe_runtime.models.pocket.corpus import KINDS, Document, Kind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Share of the training windows by kind, as train.toml has it.
SHARES: dict[Kind, float] = {"topic": 0.15, "docstring": 0.50, "source": 0.35}

Streams = dict[Kind, npt.NDArray[np.uint16]]


def tokenize(documents: list[Document], tokenizer: "PreTrainedTokenizerBase") -> Streams:
    """One stream of token ids per kind, each document followed by the end-of-text token."""
    end: Any = tokenizer.eos_token_id
    streams: Streams = {}
    for kind in KINDS:
        ids: list[int] = []
        for document in documents:
            if document.kind == kind:
                ids.extend(tokenizer(document.text, verbose=False)["input_ids"])
                ids.append(end)
        streams[kind] = np.array(ids, dtype=np.uint16)
    return streams
