"""SGLang: generates by itself, and cannot be given tokens.

Not run by this project: the wheel on PyPI needs an NVIDIA GPU; its backend for processors is in no
package there, and takes AMX and a build from source. Without the GPU the import fails, and its
first line says so. With a GPU compare with ``moe-runtime bench serve`` as well.
"""

from collections.abc import Iterator
from typing import Any

INSTALL = "pip install sglang"
PACKAGES = ("sglang", "torch")
DEVICES = ("cpu", "cuda")


class Peer:
    """Needs ``model`` and ``max_tokens``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import sglang  # type: ignore[import-not-found]

        self._api: Any = sglang
        self._settings = settings
        self._engine: Any = None

    def load(self) -> None:
        """Loads all weights; no prompt is remembered, so that each is read whole."""
        self._engine = self._api.Engine(
            model_path=self._settings["model"],
            skip_tokenizer_init=True,
            context_length=self._settings["max_tokens"],
            disable_radix_cache=True,
        )

    def stream(self, ids: list[int], num_new: int) -> Iterator[int]:
        """Reads the ids and gives its own likeliest tokens, one after another."""
        rules = {"temperature": 0.0, "max_new_tokens": num_new, "ignore_eos": True}
        given = 0
        for found in self._engine.generate(input_ids=ids, sampling_params=rules, stream=True):
            tokens = found["output_ids"]
            yield from tokens[given:]
            given = len(tokens)

    def close(self) -> None:
        """Ends the engine's processes."""
        self._engine.shutdown()
