"""Steps of a model whose stages are in different processes, by the schedules of torch.

`torch.distributed.pipelining` decides when which micro-batch passes a stage forwards and backwards,
and moves what travels between the stages. Sources of the schedules: Huang et al., "GPipe" (2019);
Narayanan et al., "PipeDream" (2019) for one forward, one backward (1F1B).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from moe_runtime.models.lm.model import Losses
from moe_runtime.models.lm.parallel import StageModule
from moe_runtime.training.run_config import PipelineSchedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Pipeline:
    """Takes micro-batches through all stages; every method is a collective call of the stages.

    The losses that it gives are those of this stage times the number of stages, so that the mean
    over the stages is that of the whole model.

    Args:
        group: The processes of all stages, in their order.
        schedule: When which micro-batch is computed: `1f1b` or `gpipe`.
        loss_scale: Factor of the cross-entropy that is trained on, as the stages have it for the
            losses of gates.
    """

    def __init__(
        self,
        module: StageModule,
        group: ProcessGroup,
        *,
        schedule: PipelineSchedule,
        loss_scale: float,
    ) -> None:
        self._module = module
        self._group = group
        self._schedule = schedule
        self._loss_scale = loss_scale
        # Of the last call that trained and of the last that measured: lengths change rarely.
        self._built: dict[bool, tuple[tuple[int, ...], Schedule1F1B | ScheduleGPipe]] = {}

    def backward(self, parts: Sequence[Tensor]) -> list[Losses]:
        """Adds the gradients of micro-batches to those of this stage's parameters.

        Args:
            parts: Windows `[B, C + 1]` of token ids, of equal shapes, the same in every stage.

        Returns:
            The losses of each.
        """
        return self._pass(parts, is_training=True)

    @torch.no_grad()
    def measure(self, parts: Sequence[Tensor], *, at_once: int) -> list[Losses]:
        """The losses of windows, without gradients.

        Args:
            parts: As of `backward`, but the shapes may differ.
            at_once: Most parts that are under way together.
        """
        found: list[Losses] = []
        start = 0
        while start < len(parts):
            end = start + 1
            while end < min(len(parts), start + at_once) and parts[end].shape == parts[start].shape:
                end += 1
            found += self._pass(parts[start:end], is_training=False)
            start = end
        return found

    def _pass(self, parts: Sequence[Tensor], *, is_training: bool) -> list[Losses]:
        module = self._module
        schedule = self._schedule_for(parts, is_training=is_training)
        windows = torch.cat(list(parts))
        module.found.clear()
        with _own_errors():
            schedule.step(target=windows, windows=windows, return_outputs=False)
        count = module.stage.count
        # Blocks that are computed again in the backward pass are no calls of the stage.
        found = [_times(losses, count) for losses in module.found]
        module.found.clear()
        return found

    def _schedule_for(
        self, parts: Sequence[Tensor], *, is_training: bool
    ) -> Schedule1F1B | ScheduleGPipe:
        key = (len(parts), *parts[0].shape)
        if is_training not in self._built or self._built[is_training][0] != key:
            module = self._module
            # Shapes are told, so that torch need not find them out by calls of its own, which
            # would exchange rows and count loads.
            stage = PipelineStage(
                module,
                module.stage.index,
                module.stage.count,
                parts[0].device,
                input_args=module.received_of(parts[0]),
                output_args=module.sent_of(parts[0]),
                group=self._group,
            )
            make = _SCHEDULES[self._schedule] if is_training else ScheduleGPipe
            loss = self._scaled if is_training else None
            self._built[is_training] = (key, make(stage, len(parts), loss, scale_grads=False))
        return self._built[is_training][1]

    def _scaled(self, cross_entropy: Tensor, _windows: Tensor) -> Tensor:
        return cross_entropy * self._loss_scale


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Takes off the wrapping that torch puts around the errors of a stage's forward pass."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is None or "failed to run forward" not in str(error):
            raise
        raise error.__cause__ from None


def _times(losses: Losses, factor: int) -> Losses:
    values: dict[str, Any] = {name: getattr(losses, name) for name in Losses.__dataclass_fields__}
    return replace(losses, **{n: v if v is None else v * factor for n, v in values.items()})
