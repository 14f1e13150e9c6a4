"""`moe-runtime finetune --zeroth-order` against MeZO with everything in memory."""

from functools import partial
from typing import Any

import numpy as np
import torch
from finetuning_runs import (
    EPS,
    ERNIE,
    PARTS,
    SEQUENCES,
    STEPS,
    checkpoint_of,
    config_of,
    finetuned,
    resident,
    run_losses,
    smallest,
)
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

from moe_runtime.research.zeroth_order import ZerothOrderFinetuneConfig, direction
from moe_runtime.training.finetune.finetune_run import FinetunePreparation, prepare
from moe_runtime.training.loop import learning_rate


def mezo(preparation: FinetunePreparation, model: PreTrainedModel) -> list[float]:
    """The definition in memory: to one side, to the other, back, and down by the difference."""
    config = preparation.config
    tensors = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        stacked = ".experts." in name
        parts = {f"{name}.{e}": t for e, t in enumerate(parameter.data)} if stacked else {}
        tensors |= parts or {name: parameter.data}
    losses = []
    for step in range(STEPS):
        windows = torch.from_numpy(preparation.batches.draw(SEQUENCES)).chunk(PARTS)
        draw = partial(direction, seed=config.run.seed, step=step)
        along = {name: draw(tensor, name=name) for name, tensor in tensors.items()}
        sums = []
        for times in (1, -2):
            for name, tensor in tensors.items():
                tensor += along[name] * times * EPS
            found = [model(input_ids=i[:, :-1], use_cache=False).logits for i in windows]
            pairs = zip(found, windows, strict=True)
            parts = [cross_entropy(f.flatten(0, 1), i[:, 1:].flatten()) for f, i in pairs]
            sums.append(float(torch.stack(parts).mean()))
        slope = (sums[0] - sums[1]) / (2 * EPS)
        rate = learning_rate(config.optimizer, step, STEPS)
        for name, tensor in tensors.items():
            tensor += along[name] * EPS
            decay = config.optimizer.weight_decay if tensor.ndim >= 2 else 0.0
            tensor -= rate * (slope * along[name] + decay * tensor)
        losses.append(sum(sums) / 2)
    return losses


def test_zeroth_order_as_in_memory(tmp_path):
    """MeZO on the resident model; all experts on the disk; stopped, and with another budget."""
    folder = checkpoint_of(ERNIE, tmp_path / "first")
    options: dict[str, Any] = {"kind": ZerothOrderFinetuneConfig, "zeroth_order": {"eps": EPS}}
    config = smallest(config_of(folder, tmp_path, **options))
    losses, summary = finetuned(config)
    assert summary["offload"]["experts_in_memory"] == 0
    assert summary["offload"]["read_bytes"] > 0
    with torch.no_grad():
        model = resident(folder)
        frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
        np.testing.assert_allclose(losses, mezo(prepare(config), model), rtol=1e-5)
    exported = AutoModelForCausalLM.from_pretrained(summary["model"], dtype=torch.float32)
    wanted = model.state_dict()
    for name, tensor in exported.state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-3, atol=1e-4)
        assert torch.equal(tensor, frozen.get(name, tensor)), name
    assert frozen

    other = config_of(folder, tmp_path, run={"output": str(tmp_path / "other")}, **options)
    again = run_losses(smallest(other), stop_after=2)
    again += run_losses(other, resume=True)
    assert again == losses
