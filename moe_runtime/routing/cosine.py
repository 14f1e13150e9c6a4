"""Cosine gate (Chi et al. 2022; Tutel's `cosine_top`): angles instead of scalar products."""

from __future__ import annotations

import math
from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_runtime.routing.base import GateOptions, RoutingContext, score_dtype
from moe_runtime.routing.topk import SoftmaxTopK


class CosineTopK(SoftmaxTopK):
    """`logits = cos(P x, m_e) * exp(min(t, log 100))`, then top-k softmax.

    Scores do not depend on the length of a token, which keeps representations from collapsing
    onto the experts' directions.

    Args:
        projection_size: Width that tokens are projected to.
        temperature: The scores start with the factor `1 / temperature`.
        options: As `Gate`.

    Attributes:
        projector: `[P, D]`.
        centers: `[E, P]`, a direction for each expert.
        log_scale: Scalar, `t`.

    Raises:
        ValueError: `projection_size` or `temperature` is not positive.
    """

    is_linear: ClassVar = False
    max_scale: ClassVar[float] = 100.0

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        projection_size: int = 256,
        temperature: float = 0.5,
        renormalize: bool | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, renormalize=renormalize, **options)
        if projection_size < 1 or not temperature > 0:
            raise ValueError(
                "projection_size and temperature must be positive, got "
                f"{projection_size} and {temperature}"
            )
        device, dtype = options.get("device"), options.get("dtype")
        self.temperature = temperature
        self.projector = nn.Parameter(
            torch.empty(projection_size, hidden_size, device=device, dtype=dtype)
        )
        self.centers = nn.Parameter(
            torch.empty(num_experts, projection_size, device=device, dtype=dtype)
        )
        self.log_scale = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.projector, std=1 / math.sqrt(self.hidden_size))
        nn.init.normal_(self.centers, std=0.01)
        nn.init.constant_(self.log_scale, math.log(1 / self.temperature))

    def logits(self, x_TD: Tensor, context: RoutingContext) -> Tensor:
        precise = score_dtype(x_TD)
        projected_TP = F.linear(x_TD.to(precise), self.projector.to(precise))
        centers_EP = F.normalize(self.centers.to(precise), dim=-1)
        cosines_TE = F.linear(F.normalize(projected_TP, dim=-1), centers_EP)
        return cosines_TE * self.log_scale.to(precise).clamp(max=math.log(self.max_scale)).exp()
