"""This project: experts stream from the checkpoint; as a peer, another version or a packed copy."""

from typing import Any

INSTALL = "pip install moe-runtime"
PACKAGES = ("moe-runtime", "torch", "transformers")
VARIANTS = ("int8", "planes")
_OPTIONS = {"int8": {"activations": "int8"}, "planes": {"cache_code": "planes"}, None: {}}
_CACHE_NAMES = {"cache", "past_key_values"}  # of transformers from 5.24 on, and before


class Peer:
    """Needs ``model`` and ``num_threads``; what else it is given goes to ``moe_runtime.load``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch

        import moe_runtime

        names = ("model", "num_threads", "cap_bytes", "variant")
        given = {name: value for name, value in settings.items() if name not in names}
        self._options = given | _OPTIONS[settings.get("variant")]
        torch.set_num_threads(settings["num_threads"])
        self._torch, self._load, self._model_path = torch, moe_runtime.load, settings["model"]
        self._model: Any = None
        self._cache: dict[str, Any] = {}
        self._mask: Any = None

    def load(self) -> None:
        """Loads what is resident; experts come when they are routed to."""
        self._model = self._load(self._model_path, **self._options)

    def prefill_batch(self, prompts: list[list[int]]) -> list[int]:
        """Forgets everything, reads prompts side by side, returns the likeliest next ids."""
        width = max(map(len, prompts))  # shorter ones are filled up in front
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
