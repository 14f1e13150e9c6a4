"""Steps of training of one other system, in a process of its own: for `offload_training.py`.

It may run under another interpreter, one that has DeepSpeed, so it needs torch and transformers
alone. Prints one line of JSON: losses, seconds of each step and the highest resident memory, or
why the system cannot train this model here.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RATE, BETAS, EPS, DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1
Step = Callable[[torch.Tensor], float]


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def loss_of(model: Any, windows: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters, lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
    )


def transformers(folder: Path, storage: Path) -> Step:
    """Everything in memory."""
    del storage
    model = load(folder)
    optimizer = adamw(model.parameters())

    def step(windows: torch.Tensor) -> float:
        loss = loss_of(model, windows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def accelerate(folder: Path, storage: Path) -> Step:
    """Weights that its hooks fetch from the disk for each forward pass.

    The hooks give a module its weights before its forward pass and take them away after it. They
    are no leaves that an optimizer holds, so what to step by has to be found first.
    """
    from accelerate import disk_offload

    model = load(folder)
    disk_offload(model, str(storage), execution_device=torch.device("cpu"), offload_buffers=False)
    windows = torch.zeros(1, 9, dtype=torch.int64)
    try:
        loss_of(model, windows).backward()
    except (RuntimeError, NotImplementedError) as error:
        raise SystemExit(f"no backward pass through offloaded weights: {error}") from None
    away = [name for name, p in model.named_parameters() if p.is_meta]
    without = [name for name, p in model.named_parameters() if p.grad is None]
    raise SystemExit(
        f"forward and backward pass run, but {len(without)} of {len(list(model.parameters()))} "
        f"parameters have no gradient after them and {len(away)} no values: nothing that an "
        "optimizer could step"
    )


def deepspeed(folder: Path, storage: Path, device: str) -> Step:
    """ZeRO-3, parameters and optimizer states offloaded to a device: `cpu` or `nvme`."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(place, MASTER_PORT="29631", DS_ACCELERATOR="cpu")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    try:
        import deepspeed as engine_of  # type: ignore[import-not-found]
    except ImportError as error:
        raise SystemExit(f"not installed: {error}") from None
    offload: dict[str, Any] = {"device": device}
    if device == "nvme":
        offload["nvme_path"] = str(storage)
    options = {"lr": RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    model = load(folder)
    engine_of.init_distributed(dist_backend="gloo")
    try:
        engine, *_ = engine_of.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_batch_size": 1,
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": 0.0,  # not left out: that would be a norm of 1
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": offload,
                    "offload_param": offload,
                },
                "optimizer": {"type": "AdamW", "params": options},
            },
        )
    except RuntimeError as error:
        raise SystemExit(f"does not start: {error}") from None

    def step(windows: torch.Tensor) -> float:
        loss = loss_of(engine, windows)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


SYSTEMS: dict[str, Callable[[Path, Path], Step]] = {
    "transformers": transformers,
    "accelerate": accelerate,
    "deepspeed:cpu": lambda folder, storage: deepspeed(folder, storage, "cpu"),
    "deepspeed:nvme": lambda folder, storage: deepspeed(folder, storage, "nvme"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("model", type=Path, help="folder of a checkpoint of transformers")
    parser.add_argument("windows", type=Path, help="token ids [steps, B, C + 1], as torch.save has")
    parser.add_argument("storage", type=Path, help="an empty folder")
    arguments = parser.parse_args()
    windows = torch.load(arguments.windows, weights_only=True)
    losses, seconds = [], []
    try:
        step = SYSTEMS[arguments.system](arguments.model, arguments.storage)
        for ids in windows:
            started = time.perf_counter()
            losses.append(step(ids))
            seconds.append(time.perf_counter() - started)
    except SystemExit as error:
        print(json.dumps({"obstacle": " ".join(str(error).split())[:300]}))
        return
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"losses": losses, "seconds": seconds, "peak_rss_bytes": peak}))


if __name__ == "__main__":
    main()
