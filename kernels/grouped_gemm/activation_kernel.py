"""The gate formula of `ActivationSpec` for Triton kernels, with its derivative, in fp32.

Every choice is a constexpr, so that a plain SwiGLU pays for none of the others. `tl.where` bounds
values instead of `tl.minimum`, which would drop a NaN that torch passes on.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_TWO_PI = tl.constexpr(0.3989422804014327)
_GELU_TANH_SCALE = tl.constexpr(0.7978845608028654)
_GELU_TANH_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _tanh(x):
    # Libraries of device functions exist on neither the interpreter nor every backend.
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _at_most(x, bound):
    return tl.where(x > bound, bound, x)


@triton.jit
def _within(x, bound):
    return tl.where(x > bound, bound, tl.where(x < -bound, -bound, x))


@triton.jit
def activate(x, alpha, gate_softcap, FUNCTION: tl.constexpr, HAS_GATE_SOFTCAP: tl.constexpr):
    """`(function(x), its derivative)`; what is not used costs nothing."""
    if FUNCTION == "silu":
        sigmoid = tl.sigmoid(alpha * x)
        factor = x
        factor_grad = x * 0 + 1
        if HAS_GATE_SOFTCAP:
            capped = _tanh(x / gate_softcap)
            factor = capped * gate_softcap
            factor_grad = 1 - capped * capped
        value = factor * sigmoid
        grad = sigmoid * (factor_grad + factor * alpha * (1 - sigmoid))
    elif FUNCTION == "gelu":
        normal = 0.5 * (1 + tl.erf(x * _SQRT_HALF))
        value = x * normal
        grad = normal + x * _INV_SQRT_TWO_PI * tl.exp(-0.5 * x * x)
    elif FUNCTION == "gelu_tanh":
        inner = _GELU_TANH_SCALE * (x + _GELU_TANH_CUBIC * x * x * x)
        bend = _tanh(inner)
        value = 0.5 * x * (1 + bend)
        slope = _GELU_TANH_SCALE * (1 + 3 * _GELU_TANH_CUBIC * x * x)
        grad = 0.5 * (1 + bend) + 0.5 * x * (1 - bend * bend) * slope
    elif FUNCTION == "relu":
        value = tl.where(x < 0, 0.0, x)
        grad = tl.where(x > 0, 1.0, 0.0)
    else:
        tl.static_assert(FUNCTION == "relu2")
        positive = tl.where(x < 0, 0.0, x)
        value = positive * positive
        grad = 2 * positive
    return value, grad


@triton.jit
def gate_fwd(
    gate,
    up,
    alpha,
    limit,
    up_offset,
    gate_softcap,
    up_softcap,
    FUNCTION: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_GATE_SOFTCAP: tl.constexpr,
    HAS_UP_SOFTCAP: tl.constexpr,
    CLAMPS_AFTER: tl.constexpr,
):
    """Hidden values of gate and up."""
    if HAS_LIMIT:
        up = _within(up, limit)
        if not CLAMPS_AFTER:
            gate = _at_most(gate, limit)
    hidden, _ = activate(gate, alpha, gate_softcap, FUNCTION, HAS_GATE_SOFTCAP)
    if HAS_LIMIT and CLAMPS_AFTER:
        hidden = _at_most(hidden, limit)
    if HAS_UP_SOFTCAP:
        up = _tanh(up / up_softcap) * up_softcap
    return hidden * (up + up_offset)


@triton.jit
def gate_bwd(
    dhidden,
    gate,
    up,
    alpha,
    limit,
    up_offset,
    gate_softcap,
    up_softcap,
    FUNCTION: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_GATE_SOFTCAP: tl.constexpr,
    HAS_UP_SOFTCAP: tl.constexpr,
    CLAMPS_AFTER: tl.constexpr,
):
    """`(hidden, dgate, dup)`. A bound passes the gradient at the bound itself, as torch's does."""
    bounded_gate, bounded_up = gate, up
    if HAS_LIMIT:
        bounded_up = _within(up, limit)
        if not CLAMPS_AFTER:
            bounded_gate = _at_most(gate, limit)
    value, dvalue = activate(bounded_gate, alpha, gate_softcap, FUNCTION, HAS_GATE_SOFTCAP)
    factor = bounded_up
    dfactor = up * 0 + 1
    if HAS_UP_SOFTCAP:
        capped = _tanh(bounded_up / up_softcap)
        factor = capped * up_softcap
        dfactor = 1 - capped * capped
    if HAS_LIMIT:
        dfactor = tl.where(tl.abs(up) > limit, 0.0, dfactor)
        if CLAMPS_AFTER:
            dvalue = tl.where(value > limit, 0.0, dvalue)
            value = _at_most(value, limit)
        else:
            dvalue = tl.where(gate > limit, 0.0, dvalue)
    factor += up_offset
    return value * factor, dhidden * factor * dvalue, dhidden * value * dfactor
