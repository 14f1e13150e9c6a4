"""Hugging Face transformers, all weights in memory. Variants: its experts implementations."""

from typing import Any

INSTALL = "pip install torch transformers"
PACKAGES = ("torch", "transformers")
VARIANTS = ("eager", "grouped_mm")


class Peer:
    """Needs ``model``, ``num_threads`` and ``variant``, None for the implementation it prefers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(settings["num_threads"])
        transformers.utils.logging.disable_progress_bar()
        variant = settings["variant"]
        self._options = {} if variant is None else {"experts_implementation": variant}
        self._torch, self._model_path = torch, settings["model"]
        self._model_class: Any = transformers.AutoModelForCausalLM
        self._model: Any = None
        self._cache: Any = None

    def load(self) -> None:
        """Loads all weights in the type of the checkpoint."""
        model = self._model_class.from_pretrained(self._model_path, dtype="auto", **self._options)
        self._model = model.eval()

    def prefill(self, ids: list[int]) -> int:
        """Forgets everything, reads the ids, returns the likeliest next one."""
        self._cache = None
        return self._forward(ids)

    def step(self, token: int) -> int:
        """Appends a token, returns the likeliest next one."""
        return self._forward([token])

    def close(self) -> None:
        """Frees the weights."""
        self._model = self._cache = None

    def _forward(self, ids: list[int]) -> int:
        tokens = self._torch.tensor([ids])
        with self._torch.inference_mode():
            output = self._model(
                tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
        self._cache = output.past_key_values
        return int(output.logits[0, -1].argmax())
