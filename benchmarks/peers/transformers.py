"""Hugging Face transformers with all weights in memory. Variants: its experts implementations."""

from typing import Any

INSTALL = "pip install torch transformers accelerate"  # accelerate: only on a GPU
PACKAGES = ("torch", "transformers")
VARIANTS = ("eager", "grouped_mm")
DEVICES = ("cpu", "cuda")
_CACHE_NAMES = {"cache", "past_key_values"}  # transformers 5.24 and later, and earlier


class Peer:
    """Needs ``model``, ``num_threads`` and ``variant`` (None for transformers' default)."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(settings["num_threads"])
        transformers.utils.logging.disable_progress_bar()
        variant, self._device = settings["variant"], settings.get("device", "cpu")
        self._options = {} if variant is None else {"experts_implementation": variant}
        if self._device != "cpu":
            self._options["device_map"] = self._device
        self._torch, self._model_path = torch, settings["model"]
        self._model_class: Any = transformers.AutoModelForCausalLM

    def load(self) -> None:
        """Load all weights in the checkpoint's dtype."""
        model = self._model_class.from_pretrained(self._model_path, dtype="auto", **self._options)
        self._model = model.eval()

    def prefill_batch(self, prompts: list[list[int]]) -> list[int]:
        width = max(map(len, prompts))  # shorter prompts are padded on the left
        rows = [[-1] * (width - len(ids)) + ids for ids in prompts]
        tokens = self._torch.tensor(rows, device=self._device)
        self._mask = (tokens >= 0).long() if min(map(len, prompts)) < width else None
        self._cache: dict[str, Any] = {}
        return self._forward(tokens.clamp(min=0))

    def step_batch(self, tokens: list[int]) -> list[int]:
        if self._mask is not None:
            self._mask = self._torch.nn.functional.pad(self._mask, (0, 1), value=1)
        return self._forward(self._torch.tensor(tokens, device=self._device)[:, None])

    def close(self) -> None:
        vars(self).clear()

    def _forward(self, tokens: Any) -> list[int]:
        more = {}
        if self._mask is not None:
            places = (self._mask.cumsum(-1) - 1).clamp(min=0)
            more = {"attention_mask": self._mask, "position_ids": places[:, -tokens.shape[1] :]}
        with self._torch.inference_mode():
            output = self._model(tokens, use_cache=True, logits_to_keep=1, **self._cache, **more)
        self._cache = {name: output[name] for name in output.keys() & _CACHE_NAMES}
        return output.logits[:, -1].argmax(-1).tolist()
