"""DeepSpeed on the CPU: ZeRO-Offload, or ZeRO-3 with weights too in memory or files (variants)."""

import os
import sys
from typing import Any

INSTALL = (
    "pip install torch transformers setuptools wheel ninja, and then, with a C++ compiler, "
    "DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed"
)
PACKAGES = ("deepspeed", "torch", "transformers")
CASES = ("training",)
VARIANTS = ("zero3", "nvme")


class Peer:
    """Needs all settings of the case. Operators are compiled first, which takes minutes."""

    def __init__(self, settings: dict[str, Any]) -> None:
        ninja = f"{sys.prefix}/bin{os.pathsep}"  # it is found by name
        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0", PATH=ninja + os.environ["PATH"])
        import deepspeed
        import torch

        torch.set_num_threads(settings["num_threads"])
        group: Any = torch.distributed
        group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)
        self._torch, self._settings, self._api = torch, settings, deepspeed
        self._engine: Any = None

    def load(self) -> None:
        """Load in fp32; with ``bfloat16`` only the optimizer keeps fp32 weights."""
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]
        from transformers import AutoModelForCausalLM

        asked, place = self._settings, {"device": "cpu"}
        options: Any = {"dtype": self._torch.float32, "experts_implementation": "grouped_mm"}
        model: Any = AutoModelForCausalLM.from_pretrained(asked["model"], **options).train()
        matrices, norms = ([p for p in model.parameters() if (p.ndim > 1) == m] for m in (1, 0))
        groups = [{"params": matrices, "weight_decay": asked["decay"]}, {"params": norms}]
        if asked["variant"] == "nvme":
            place = {"device": "nvme", "nvme_path": asked["model"]}
        weights = {"stage": 3, "offload_param": place} if asked["variant"] else {"stage": 2}
        config = {
            "train_micro_batch_size_per_gpu": asked["sequences"],
            "gradient_clipping": 0.0,  # if omitted, it would be 1
            "bf16": {"enabled": asked["dtype"] == "bfloat16"},
            "zero_optimization": {"offload_optimizer": place, **weights},
        }
        adam = DeepSpeedCPUAdam(groups, lr=asked["rate"], betas=asked["betas"])
        self._engine, *_ = self._api.initialize(model=model, optimizer=adam, config=config)

    def train(self, windows: list[list[int]]) -> float:
        """Take one optimizer step on tokens ``[B, C + 1]``; return the loss before it."""
        ids = self._torch.tensor(windows)
        logits = self._engine(ids[:, :-1], use_cache=False).logits.float().flatten(0, 1)
        loss = self._torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        self._engine.backward(loss)
        self._engine.step()
        return float(loss.detach())
