"""This project as a peer: another version, or a packed copy. Experts stream from the checkpoint."""

from importlib import import_module
from typing import Any

INSTALL = "pip install moe-runtime"
PACKAGES = ("moe-runtime", "torch", "transformers")
VARIANTS = ("int8", "planes", "none", "lookup", "mtp", "lru", "reuse", "off", "enforce", "auto",
            "next-gate", "running-counts", "eam", "trained", "taught")  # fmt: skip
DEVICES = ("cpu", "cuda")
_OF = f"activations cache_code {3 * 'draft '}{2 * 'policy '}{3 * 'prefetch '}{3 * 'predictor '}"


class Peer:
    """Needs ``model`` and ``num_threads``; other settings go to ``moe_runtime.load``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._torch, self._api = map(import_module, ("torch", "moe_runtime"))
        self._torch.set_num_threads(settings["num_threads"])
        names = settings.keys() - {"model", "num_threads", "cap_bytes", "variant", "routes"}
        words = str(settings.get("variant")).split("+")
        named = {of: word for of, word in zip(_OF.split(), VARIANTS, strict=False) if word in words}
        self._options: dict[str, Any] = {name: settings[name] for name in names} | named
        self._path, self._routes, self._cache = settings["model"], settings.get("routes"), {}

    def load(self) -> None:
        self._model = self._api.load(self._path, **self._options)
        if self._routes is not None:
            routed = import_module("moe_runtime.benchmarks.cases.routed_model").RoutedModel
            self.take = routed(self._model, self._routes).take
        self.counts = lambda: import_module("dataclasses").asdict(self._model.moe.stats())

    def prefill_batch(self, prompts: list[list[int]]) -> list[int]:
        width = max(map(len, prompts))  # shorter prompts are padded on the left
        rows = [[-1] * (width - len(ids)) + ids for ids in prompts]
        tokens = self._torch.tensor(rows, device=self._model.device)
        self._mask = (tokens >= 0).long() if min(map(len, prompts)) < width else None
        room, count = self._options["max_tokens"] // len(prompts), len(prompts)
        on_gpu = getattr(self._model, "new_cache", None)  # a static cache, whose steps are recorded
        with self._torch.inference_mode():
            self._cache = on_gpu(count, room, self._cache) if on_gpu else {}
        return self._forward(tokens.clamp(min=0))

    def step_batch(self, tokens: list[int]) -> list[int]:
        if self._mask is not None:
            self._mask = self._torch.nn.functional.pad(self._mask, (0, 1), value=1)
        return self._forward(self._torch.tensor(tokens, device=self._model.device)[:, None])

    def close(self) -> None:
        self._model.moe.close()

    def _forward(self, tokens: Any) -> list[int]:
        more = {}
        if self._mask is not None:
            places = (self._mask.cumsum(-1) - 1).clamp(min=0)
            more = {"attention_mask": self._mask, "position_ids": places[:, -tokens.shape[1] :]}
        with self._torch.inference_mode():
            output = self._model(tokens, use_cache=True, logits_to_keep=1, **self._cache, **more)
        self._cache = {k: output[k] for k in output.keys() & {"cache", "past_key_values"}}
        return output.logits[:, -1].argmax(-1).tolist()
