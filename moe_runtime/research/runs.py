"""What the keys of `[research]` change in a training run."""

import dataclasses
from collections.abc import Callable
from functools import partial

from moe_runtime.research.dynamoe import RecompilingOptimizer, check_layers
from moe_runtime.research.memory_layers import MemoryOptimizer, ValueRows, add_memory
from moe_runtime.research.slimfit import SlimFit
from moe_runtime.training.optimizer import Optimizer
from moe_runtime.training.train_run import Preparation


def equip(preparation: Preparation) -> tuple[Preparation, Callable[..., Optimizer]]:
    """The run with its model as the keys change it, and what makes its optimizer."""
    research, model = preparation.config.research, preparation.model
    if research.frozen_share:
        return preparation, partial(SlimFit, share=research.frozen_share)
    if (recompile := research.recompile) is not None:
        check_layers(model, recompile)
        if recompile.reuse_at:
            preparation.batches.repeat_windows()
        return preparation, partial(RecompilingOptimizer, recompile=recompile)
    if (memory := research.memory) is not None:
        add_memory(model, memory)
        width, num_rows = model.config.hidden_size, memory.keys**2
        used = memory.heads * memory.top_k * len(memory.layers)
        changed = dataclasses.replace(
            preparation,
            num_parameters=model.num_parameters() + num_rows * width,
            num_active_parameters=model.num_active_parameters() + used * width,
        )
        path = preparation.output / "memory.scratch"
        rows = partial(ValueRows, path, num_rows, width, std=width**-0.5)
        return changed, partial(MemoryOptimizer, open_rows=rows)
    return preparation, Optimizer
