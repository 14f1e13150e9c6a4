"""transformers with accelerate: layers that do not fit are read from disk at each use."""

import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

INSTALL = "pip install torch transformers accelerate"
PACKAGES = ("torch", "transformers", "accelerate")
DEVICES = ("cpu", "cuda")
_CACHE_NAMES = {"cache", "past_key_values"}  # transformers 5.24 and later, and earlier
_RESERVED_BYTES = 5 << 29  # interpreter, libraries, one layer's experts as read and fused


class Peer:
    """Needs ``model``, ``num_threads``, ``cap_bytes`` and, on a GPU, ``device_memory``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._torch, self._api = map(import_module, ("torch", "transformers"))
        self._torch.set_num_threads(settings["num_threads"])
        self._api.utils.logging.disable_progress_bar()
        self._settings, self._device = settings, settings.get("device", "cpu")
        self._folder = tempfile.TemporaryDirectory()

    def load(self) -> None:
        """Load what fits; the rest stays in the checkpoint or goes to a folder."""
        path, cap = self._settings["model"], self._settings["cap_bytes"]
        sizes = (file.stat().st_size for file in Path(path).glob("*.safetensors"))
        # without a cap, half, so that the rest is read; with a GPU, all RAM
        memory: dict[Any, Any] = {"cpu": sum(sizes) // 2}
        if self._device != "cpu":
            memory = import_module("accelerate").utils.get_max_memory()
            wanted = self._settings["device_memory"]
            share = 0.9 if wanted == "auto" else wanted  # a share of the free memory, or bytes
            memory[0] = int(share * memory[0]) if isinstance(share, float) else share
        memory["cpu"] = memory["cpu"] if cap is None else max(0, cap - _RESERVED_BYTES)
        options = {"device_map": "auto", "max_memory": memory, "offload_folder": self._folder.name}
        self._model = self._api.AutoModelForCausalLM.from_pretrained(path, dtype="auto", **options)

    def prefill_batch(self, prompts: list[list[int]]) -> list[int]:
        self._cache: dict[str, Any] = {}
        return self._forward(prompts)

    def step_batch(self, tokens: list[int]) -> list[int]:
        return self._forward([[token] for token in tokens])

    def close(self) -> None:
        self._folder.cleanup()
        vars(self).clear()

    def _forward(self, rows: list[list[int]]) -> list[int]:
        tokens = self._torch.tensor(rows, device=self._device)
        with self._torch.inference_mode():
            output = self._model(tokens, use_cache=True, **self._cache)
        self._cache = {name: output[name] for name in output.keys() & _CACHE_NAMES}
        return output.logits[:, -1].argmax(-1).tolist()
