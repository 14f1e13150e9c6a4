"""transformers with accelerate: layers that do not fit in memory are read from disk at each use.

Memory for weights is what ``cap_bytes`` leaves, and half of the checkpoint's without one.
"""

import tempfile
from pathlib import Path
from typing import Any

INSTALL = "pip install torch transformers accelerate"
PACKAGES = ("torch", "transformers", "accelerate")
_CACHE_NAMES = {"cache", "past_key_values"}  # of transformers from 5.24 on, and before
# Interpreter, libraries, and one layer's experts twice, as read and as fused.
_RESERVED_BYTES = 5 << 29


class Peer:
    """Needs ``model``, ``num_threads`` and ``cap_bytes``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(settings["num_threads"])
        transformers.utils.logging.disable_progress_bar()
        self._torch, self._settings = torch, settings
        self._model_class: Any = transformers.AutoModelForCausalLM
        self._folder = tempfile.TemporaryDirectory()
        self._model: Any = None
        self._cache: dict[str, Any] = {}

    def load(self) -> None:
        """Loads what fits; the rest stays in the checkpoint, or is written to a folder."""
        path, cap = self._settings["model"], self._settings["cap_bytes"]
        files = Path(path).glob("*.safetensors")
        room = sum(file.stat().st_size for file in files) // 2 if cap is None else cap
        room = room if cap is None else max(0, cap - _RESERVED_BYTES)
        options = {"device_map": "auto", "offload_folder": self._folder.name, "dtype": "auto"}
        memory = {"cpu": room}
        self._model = self._model_class.from_pretrained(path, max_memory=memory, **options).eval()

    def prefill_batch(self, prompts: list[list[int]]) -> list[int]:
        """Forgets everything, reads prompts of one length, returns the likeliest next ids."""
        self._cache = {}
        return self._forward(self._torch.tensor(prompts))

    def step_batch(self, tokens: list[int]) -> list[int]:
        """Appends a token to each sequence, returns the likeliest next ones."""
        return self._forward(self._torch.tensor(tokens)[:, None])

    def close(self) -> None:
        """Frees the weights and what was written."""
        self._model, self._cache = None, {}
        self._folder.cleanup()

    def _forward(self, tokens: Any) -> list[int]:
        with self._torch.inference_mode():
            output = self._model(tokens, use_cache=True, **self._cache)
        self._cache = {name: output[name] for name in output.keys() & _CACHE_NAMES}
        return output.logits[:, -1].argmax(-1).tolist()
