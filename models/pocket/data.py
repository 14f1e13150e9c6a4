"""Token streams of the corpus and the training batches drawn from them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moe_runtime.models.pocket.corpus import KINDS, Document, Kind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Share of the training windows by kind: the prose first, the code a third. The language reference
# is small, so even this share shows it more often than the rest.
SHARES: dict[Kind, float] = {"topic": 0.15, "docstring": 0.50, "source": 0.35}

Streams = dict[Kind, npt.NDArray[np.uint16]]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """How many windows of how many tokens each step takes, and the seed they are drawn with."""

    tokens_per_step: int = 2048
    seed: int = 0

    def draw(self, streams: Streams, *, step: int, window: int) -> npt.NDArray[np.int64]:
        """The batch of one step, (windows, window + 1) token ids; depends on nothing but `step`.

        Two models trained with one plan and number of steps therefore see the same tokens, and an
        interrupted run goes on where it stopped.
        """
        random = np.random.default_rng([self.seed, step])
        kinds = random.choice(len(KINDS), size=self.tokens_per_step // window, p=list(_shares()))
        rows: list[npt.NDArray[np.uint16]] = []
        for kind_id in kinds:
            stream = streams[KINDS[kind_id]]
            start = int(random.integers(len(stream) - window))
            rows.append(stream[start : start + window + 1])
        return np.stack(rows).astype(np.int64)


def _shares() -> tuple[float, ...]:
    return tuple(SHARES[kind] for kind in KINDS)


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
