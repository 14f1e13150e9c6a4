"""Offloaded training in a process of its own; `unchecked` reads records without comparing digests.

moe-runtime bench training --shape few --sequences 1 --context 32 --host-memory 120MiB
    --peer benchmarks/ablations/record_digests.py
    --peer benchmarks/ablations/record_digests.py:unchecked
"""

from typing import Any

INSTALL = "pip install moe-runtime"
PACKAGES = ("moe-runtime", "torch", "transformers")
CASES = ("training",)
VARIANTS = ("unchecked",)


class Peer:
    """Needs all settings of the case, a budget among them."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch

        import moe_runtime
        from moe_runtime.training.offload.disk import Disk

        torch.set_num_threads(settings["num_threads"])
        if settings["variant"]:
            setattr(Disk, "_compare", lambda *_: None)  # noqa: B010
        self._torch, self._settings, self._api = torch, settings, moe_runtime

    def load(self) -> None:
        """Loads in fp32; experts and their states move off memory beyond the budget."""
        from transformers import AutoModelForCausalLM

        asked = self._settings
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            asked["model"], dtype=self._torch.float32
        ).train()
        self._training = self._api.offload_training(
            self._model,
            host_memory=asked["host_memory"],
            storage_dir=asked["model"],
            optimizer=self._api.AdamW(betas=tuple(asked["betas"]), weight_decay=asked["decay"]),
        )

    def train(self, windows: list[list[int]]) -> float:
        """One optimizer step on tokens ``[B, C + 1]``; the loss before it."""
        ids, rate = self._torch.tensor(windows), self._settings["rate"]

        def loss() -> Any:
            logits = self._model(ids[:, :-1], use_cache=False).logits.float().flatten(0, 1)
            return self._torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())

        (found,) = self._training.backward([loss], rate=rate)
        self._training.step(rate)
        return float(found.detach())

    def close(self) -> None:
        self._training.close()
