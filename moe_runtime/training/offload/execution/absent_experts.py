"""What all modules have in common that stand where a model had the experts that are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn

from moe_runtime.checkpoints.absent import AbsentParameters, TrainedElsewhere
from moe_runtime.training.offload.execution.window import MicroBatchBarrier
from moe_runtime.training.offload.site import ExpertsModuleSpec


class AbsentExperts(AbsentParameters):
    """Routed experts that the optimizer has; parameters are listed, and refuse to be read.

    Args:
        site: the module whose place it takes.
        layer: its number among the layers with experts.
        has_gradient: whether a gradient of any expert waits for the optimizer's step.
    """

    _misses_absent = False  # the optimizer's `load_state_dict` brings them

    def __init__(
        self, site: ExpertsModuleSpec, layer: int, has_gradient: Callable[[], bool]
    ) -> None:
        super().__init__()
        self.num_experts = site.num_experts
        self.layer = layer
        self.window: MicroBatchBarrier[Any] | None = None
        self._keeps_dtype = site.keeps_dtype
        self._site = site
        for name in site.parameter_names:
            parameter = site.module.get_parameter(name)
            self.register_parameter(name, TrainedElsewhere.parameter(parameter, has_gradient))

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts of {self._site.name}, not in this module"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Converts what is here; records of experts keep their type and place."""
        with self._without_absent():
            return nn.Module._apply(self, fn, recurse)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        TrainedElsewhere.refuse()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        TrainedElsewhere.refuse()
