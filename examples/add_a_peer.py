"""A peer of `moe-runtime bench latency` in one file: here transformers with a static cache.

moe-runtime bench latency MODEL --peer examples/add_a_peer.py

The file needs nothing of this project. Run as a program, it says what comes after three tokens:

python examples/add_a_peer.py [MODEL]
"""

import inspect
import sys
from pathlib import Path
from typing import Any

INSTALL = "pip install torch transformers"
PACKAGES = ("torch", "transformers")


class Peer:
    """Needs ``model``, ``num_threads`` and ``max_tokens``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(settings["num_threads"])
        self._torch, self._transformers, self._settings = torch, transformers, settings
        self._model: Any = None
        self._cache: dict[str, Any] = {}

    def load(self) -> None:
        """Loads all weights."""
        kind: Any = self._transformers.AutoModelForCausalLM
        self._model = kind.from_pretrained(self._settings["model"], dtype="auto").eval()

    def prefill(self, ids: list[int]) -> int:
        """Forgets everything, reads the ids, returns the likeliest next one."""
        cache = self._transformers.StaticCache(
            config=self._model.config, max_cache_len=self._settings["max_tokens"]
        )
        known = inspect.signature(self._model.forward).parameters
        self._cache = {"cache" if "cache" in known else "past_key_values": cache}
        return self._forward(ids)

    def step(self, token: int) -> int:
        """Appends a token, returns the likeliest next one."""
        return self._forward([token])

    def close(self) -> None:
        """Frees the model."""
        self._model, self._cache = None, {}

    def _forward(self, ids: list[int]) -> int:
        with self._torch.inference_mode():
            output = self._model(self._torch.tensor([ids]), logits_to_keep=1, **self._cache)
        return int(output.logits[0, -1].argmax())


if __name__ == "__main__":
    model = sys.argv[1] if sys.argv[1:] else Path(__file__).parents[1] / "models" / "pocket"
    peer = Peer({"model": str(model), "num_threads": 2, "max_tokens": 16})
    peer.load()
    token = peer.prefill([510, 11, 7])
    print(token, peer.step(token))
    peer.close()
