"""DeepSpeed's ZeRO-Offload on the CPU; its operators are compiled at first, for minutes."""

import os
import sys
from pathlib import Path
from typing import Any

INSTALL = (
    "pip install torch transformers setuptools wheel ninja, and then, with a C++ compiler, "
    "DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed"
)
PACKAGES = ("deepspeed", "torch", "transformers")
CASES = ("training",)


class Peer:
    """Needs all settings of the case."""

    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0")
        # It calls ninja by its name.
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        import deepspeed
        import torch
        import transformers
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

        torch.set_num_threads(settings["num_threads"])
        group: Any = torch.distributed
        group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)
        self._torch, self._settings = torch, settings
        self._initialize: Any = deepspeed.initialize  # type: ignore[attr-defined]
        self._adam = DeepSpeedCPUAdam
        self._model_class: Any = transformers.AutoModelForCausalLM
        self._engine: Any = None

    def load(self) -> None:
        """Loads in fp32; with ``bfloat16`` these weights are the optimizer's alone."""
        asked = self._settings
        options = {"dtype": self._torch.float32, "experts_implementation": "grouped_mm"}
        model = self._model_class.from_pretrained(asked["model"], **options).train()
        matrices, norms = ([p for p in model.parameters() if (p.ndim > 1) == m] for m in (1, 0))
        groups = [{"params": matrices, "weight_decay": asked["decay"]}, {"params": norms}]
        config = {
            "train_micro_batch_size_per_gpu": asked["sequences"],
            "gradient_clipping": 0.0,  # not left out: that would be a norm of 1
            "bf16": {"enabled": asked["dtype"] == "bfloat16"},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        }
        adam = self._adam(groups, lr=asked["rate"], betas=asked["betas"])
        self._engine, *_ = self._initialize(model=model, optimizer=adam, config=config)

    def train(self, windows: list[list[int]]) -> float:
        """One optimizer step on tokens ``[B, C + 1]``; the loss before it."""
        ids = self._torch.tensor(windows)
        logits = self._engine(ids[:, :-1], use_cache=False).logits.float().flatten(0, 1)
        loss = self._torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        self._engine.backward(loss)
        self._engine.step()
        return float(loss.detach())
