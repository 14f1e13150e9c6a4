"""vLLM: generates by itself, and cannot be given tokens.

Not run by this project: the wheel on PyPI needs an NVIDIA GPU; its builds for processors come from
source or vLLM's own index, and keep all weights in memory. Without the GPU the import fails, and
its first line says so. With a GPU compare with ``moe-runtime bench serve`` as well.
"""

from collections.abc import Iterator
from typing import Any

INSTALL = "pip install vllm"
PACKAGES = ("vllm", "torch")
DEVICES = ("cpu", "cuda")


class Peer:
    """Needs ``model`` and ``max_tokens``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import vllm  # type: ignore[import-not-found]

        self._api: Any = vllm
        self._settings = settings
        self._engine: Any = None
        self._number = 0

    def load(self) -> None:
        """Loads all weights; no prompt is remembered, so that each is read whole."""
        self._engine = self._api.LLMEngine.from_engine_args(
            self._api.EngineArgs(
                model=self._settings["model"],
                skip_tokenizer_init=True,
                max_model_len=self._settings["max_tokens"],
                enable_prefix_caching=False,
            )
        )

    def stream(self, ids: list[int], num_new: int) -> Iterator[int]:
        """Reads the ids and gives its own likeliest tokens, one after another."""
        self._number += 1
        rules = {"temperature": 0.0, "max_tokens": num_new, "ignore_eos": True}
        asked = self._api.SamplingParams(**rules, detokenize=False)
        self._engine.add_request(str(self._number), {"prompt_token_ids": ids}, asked)
        given = 0
        while self._engine.has_unfinished_requests():
            for found in self._engine.step():
                tokens = found.outputs[0].token_ids
                yield from tokens[given:]
                given = len(tokens)

    def close(self) -> None:
        """Ends the engine's processes."""
        self._engine = None
