"""This project: experts stream from the checkpoint. Settings: those of ``moe_runtime.load``."""

import importlib
from typing import Any

INSTALL = "pip install moe-runtime"
PACKAGES = ("moe-runtime", "torch", "transformers")
_CACHE_NAMES = {"cache", "past_key_values"}  # of transformers from 5.24 on, and before


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
        self._cache: dict[str, Any] = {}
        self._mask: Any = None

    def load(self) -> None:
        """Loads what is resident; experts come when they are routed to."""
        self._model = self._load(self._model_path, **self._options)

    def prefill_batch(self, prompts: list[list[int]]) -> list[int]:
        """Forgets everything, reads prompts side by side, returns the likeliest next ids."""
        # Shorter ones are filled up in front.
        width = max(map(len, prompts))
        rows = [[-1] * (width - len(ids)) + ids for ids in prompts]
        tokens = self._torch.tensor(rows, device=self._model.device)
        self._cache, self._mask = {}, (tokens >= 0).long()
        return self._forward(tokens.clamp(min=0))

    def step_batch(self, tokens: list[int]) -> list[int]:
        """Appends a token to each sequence, returns the likeliest next ones."""
        self._mask = self._torch.nn.functional.pad(self._mask, (0, 1), value=1)
        return self._forward(self._torch.tensor(tokens, device=self._model.device)[:, None])

    def close(self) -> None:
        """Ends its threads."""
        self._model.moe.close()

    def _forward(self, tokens: Any) -> list[int]:
        more = {}
        if not self._mask.all():
            places = (self._mask.cumsum(-1) - 1).clamp(min=0)
            more = {"attention_mask": self._mask, "position_ids": places[:, -tokens.shape[1] :]}
        with self._torch.inference_mode():
            output = self._model(tokens, use_cache=True, logits_to_keep=1, **self._cache, **more)
        self._cache = {name: output[name] for name in output.keys() & _CACHE_NAMES}
        return output.logits[:, -1].argmax(-1).tolist()
