"""Lets a model read a text for the `predictor` commands: its routing and its hidden states."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_runtime.cli.console import Session, loading_bar, quiet_transformers

if TYPE_CHECKING:
    import numpy as np

    from moe_runtime.policies.prediction import Estimator, Routes
    from moe_runtime.types import ModelSignature

WINDOW_TOKENS = 128
"""Tokens of a sequence; the text is cut into such windows, what is left over is not read."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadText:
    """What a model did while it read a text.

    Attributes:
        model: the model.
        signature: what it is.
        routes: where the tokens went.
        hidden_TLD: ``[T, L, D]`` float16, what the gates were given.
    """

    model: Any
    signature: "ModelSignature"
    routes: "Routes"
    hidden_TLD: "np.ndarray"

    def part(self, windows: list[int]) -> "tuple[Routes, np.ndarray]":
        """Some of the windows, with their hidden states."""
        import numpy as np

        rows = [np.arange(*self.routes.tokens_of(window).indices(10**9)[:2]) for window in windows]
        return self.routes.select(windows), self.hidden_TLD[np.concatenate(rows)]

    def trained(self, name: str, windows: list[int]) -> "Estimator":
        """The named predictor, trained on some of the windows.

        Those that look at hidden states get the model's gates.
        """
        from moe_runtime.inference.prediction.hidden_states import fit_lookahead, next_gate
        from moe_runtime.policies.prediction import HiddenLookahead, NextGate, make_estimator

        routes, hidden = self.part(windows)
        if name == HiddenLookahead.name:
            return fit_lookahead(self.model, routes, hidden)
        if name == NextGate.name:
            return next_gate(self.model, routes.shape)
        estimator = make_estimator(name, routes.shape)
        estimator.fit(routes)
        return estimator


def read_text(session: Session, model: str, text: Path, host_memory: str) -> ReadText:
    """Lets a model read a text file window by window.

    Raises:
        CheckpointError: the model or its tokenizer cannot be loaded.
        ValueError: the text is not UTF-8, or shorter than two windows.
    """
    from moe_runtime.cli.commands.run import load_tokenizer
    from moe_runtime.cli.prompts import read_text as read_words

    words = read_words(text)
    quiet_transformers(session)
    tokenizer = load_tokenizer(model)
    ids = tokenizer(words)["input_ids"]
    windows = [ids[at : at + WINDOW_TOKENS] for at in range(0, len(ids), WINDOW_TOKENS)]
    windows = [window for window in windows if len(window) == WINDOW_TOKENS]
    if len(windows) < 2:
        raise ValueError(
            f"{text}: has {len(ids)} tokens, expected at least {2 * WINDOW_TOKENS} to learn from"
        )
    import moe_runtime
    from moe_runtime.inference.prediction.hidden_states import record_hidden

    with loading_bar() as progress:
        loaded: Any = moe_runtime.load(
            model, host_memory=host_memory, max_tokens=WINDOW_TOKENS, progress=progress
        )
        with loaded.moe:
            routes, hidden = record_hidden(
                loaded, windows, progress=lambda n: progress(f"window {n} of {len(windows)}", 0, 0)
            )
    return ReadText(
        model=loaded,
        signature=loaded.moe.facts.signature,
        routes=routes,
        hidden_TLD=hidden,
    )
