"""Floating-point operations of the experts' operators, for torch's counter.

Lists of shapes leave open how many rows an expert has, so each choice counts, also one that is not
dispatched. Only products count, as in torch's own formulas. (torch's registry is not written to:
importing it takes as long as importing the layer, and brings Triton.)

Letters: R routed rows, S slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from moe_runtime.kernels.expert_mlp import projection, torch_op

Shape = Sequence[int]


def _expert_mlp(
    x: Shape, ids: Shape | None, _weights: Any, _counts: Any, gate_up: Shape, down: Shape,
    *_: Any, **__: Any,
) -> int:  # fmt: skip
    num_rows = x[0] if ids is None else math.prod(ids)
    return 2 * num_rows * (math.prod(gate_up[1:]) + math.prod(down[1:]))


def _expert_mlp_backward(
    _grad: Any, x: Shape, weights: Shape | None, z: Shape, _order: Any, _offsets: Any,
    gate_up: Shape, down: Shape, *rest: Any, **_: Any,
) -> int:  # fmt: skip
    needs_x, needs_weights, needs_gate_up, needs_down, needs_gate_up_bias, _ = rest[-1]
    num_rows = x[0] if weights is None else math.prod(weights)
    is_recomputed = z[0] == 0
    through_down = needs_x or needs_weights or needs_gate_up or needs_gate_up_bias
    products_up = needs_x + needs_gate_up + is_recomputed
    products_down = through_down + needs_down
    return 2 * num_rows * (
        products_up * math.prod(gate_up[1:]) + products_down * math.prod(down[1:])
    )  # fmt: skip


def _expert_projection(
    x: Shape, tokens: Shape | None, _offsets: Any, weight: Shape, *_: Any, **__: Any
) -> int:
    return 2 * (x if tokens is None else tokens)[0] * math.prod(weight[1:])


def _expert_projection_backward(grad: Shape, *rest: Any, **_: Any) -> int:
    weight, (needs_x, needs_weight, _) = rest[3], rest[-1]
    return 2 * grad[0] * math.prod(weight[1:]) * (needs_x + needs_weight)


FLOP_FORMULAS: Mapping[Any, Callable[..., int]] = {
    getattr(torch.ops.moe_runtime, name.partition("::")[2]): formula
    for name, formula in (
        (torch_op.FORWARD, _expert_mlp),
        (torch_op.BACKWARD, _expert_mlp_backward),
        (projection.FORWARD, _expert_projection),
        (projection.BACKWARD, _expert_projection_backward),
    )
}
"""For ``FlopCounterMode(custom_mapping=FLOP_FORMULAS)`` of ``torch.utils.flop_counter``."""
