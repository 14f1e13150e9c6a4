"""This project: experts stream from the checkpoint. Settings: those of ``moe_runtime.load``."""

import importlib
from typing import Any

INSTALL = "pip install moe-runtime"
PACKAGES = ("moe-runtime", "torch", "transformers")


class Peer:
    """Needs ``model`` and ``num_threads``; every other setting goes to ``moe_runtime.load``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch

        names = ("model", "num_threads")
        self._options = {name: value for name, value in settings.items() if name not in names}
        self._model_path = settings["model"]
        torch.set_num_threads(settings["num_threads"])
        self._torch = torch
        self._load = importlib.import_module("moe_runtime").load
        self._model: Any = None
        self._cache: Any = None

    def load(self) -> None:
        """Loads what is resident; experts come when they are routed to."""
        self._model = self._load(self._model_path, **self._options)

    def prefill(self, ids: list[int]) -> int:
        """Forgets everything, reads the ids, returns the likeliest next one."""
        self._cache = None
        return self._forward(ids)

    def step(self, token: int) -> int:
        """Appends a token, returns the likeliest next one."""
        return self._forward([token])

    def close(self) -> None:
        """Ends its threads."""
        self._model.moe.close()

    def _forward(self, ids: list[int]) -> int:
        tokens = self._torch.tensor([ids], device=self._model.device)
        with self._torch.inference_mode():
            output = self._model(
                tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
        self._cache = output.past_key_values
        return int(output.logits[0, -1].argmax())
