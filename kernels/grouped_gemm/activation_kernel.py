"""The formula of an `ActivationSpec` for Triton kernels, with its derivative, in fp32.

The spec is one constexpr, `ACTIVATION`, so a plain SwiGLU pays for no other formula. `tl.where`
bounds values instead of `tl.minimum`, which would drop a NaN that torch passes on.
"""

# pyright: reportAttributeAccessIssue=false
# Triton reads attributes of a constexpr from its value, which the type checker does not know of.

from __future__ import annotations

import triton
import triton.language as tl

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_TWO_PI = tl.constexpr(0.3989422804014327)
_GELU_TANH_SCALE = tl.constexpr(0.7978845608028654)
_GELU_TANH_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _tanh(x):
    # neither the interpreter nor every backend has a library of device functions
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _at_most(x, bound):
    return tl.where(x > bound, bound, x)


@triton.jit
def _within(x, bound):
    return tl.where(x > bound, bound, tl.where(x < -bound, -bound, x))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """`(function(x), its derivative)`; unused results cost nothing."""
    if ACTIVATION.function == "silu":
        sigmoid = tl.sigmoid(ACTIVATION.alpha * x)
        factor = x
        factor_grad = x * 0 + 1
        if ACTIVATION.gate_softcap != float("inf"):
            capped = _tanh(x / ACTIVATION.gate_softcap)
            factor = capped * ACTIVATION.gate_softcap
            factor_grad = 1 - capped * capped
        value = factor * sigmoid
        grad = sigmoid * (factor_grad + factor * ACTIVATION.alpha * (1 - sigmoid))
    elif ACTIVATION.function == "gelu":
        normal = 0.5 * (1 + tl.erf(x * _SQRT_HALF))
        value = x * normal
        grad = normal + x * _INV_SQRT_TWO_PI * tl.exp(-0.5 * x * x)
    elif ACTIVATION.function == "gelu_tanh":
        inner = _GELU_TANH_SCALE * (x + _GELU_TANH_CUBIC * x * x * x)
        bend = _tanh(inner)
        value = 0.5 * x * (1 + bend)
        slope = _GELU_TANH_SCALE * (1 + 3 * _GELU_TANH_CUBIC * x * x)
        grad = 0.5 * (1 + bend) + 0.5 * x * (1 - bend * bend) * slope
    elif ACTIVATION.function == "relu":
        value = tl.where(x < 0, 0.0, x)
        grad = tl.where(x > 0, 1.0, 0.0)
    else:
        tl.static_assert(ACTIVATION.function == "relu2")
        positive = tl.where(x < 0, 0.0, x)
        value = positive * positive
        grad = 2 * positive
    return value, grad


@triton.jit
def gate_fwd(gate, up, ACTIVATION: tl.constexpr):
    """Hidden values of gate and up."""
    if ACTIVATION.limit != float("inf"):
        up = _within(up, ACTIVATION.limit)
        if not ACTIVATION.clamps_after:
            gate = _at_most(gate, ACTIVATION.limit)
    hidden, _ = activate(gate, ACTIVATION)
    if ACTIVATION.limit != float("inf") and ACTIVATION.clamps_after:
        hidden = _at_most(hidden, ACTIVATION.limit)
    if ACTIVATION.up_softcap != float("inf"):
        up = _tanh(up / ACTIVATION.up_softcap) * ACTIVATION.up_softcap
    return hidden * (up + ACTIVATION.up_offset)


@triton.jit
def gate_bwd(dhidden, gate, up, ACTIVATION: tl.constexpr):
    """`(hidden, dgate, dup)`. A bound passes the gradient at the bound itself, like torch."""
    bounded_gate, bounded_up = gate, up
    if ACTIVATION.limit != float("inf"):
        bounded_up = _within(up, ACTIVATION.limit)
        if not ACTIVATION.clamps_after:
            bounded_gate = _at_most(gate, ACTIVATION.limit)
    value, dvalue = activate(bounded_gate, ACTIVATION)
    factor = bounded_up
    dfactor = up * 0 + 1
    if ACTIVATION.up_softcap != float("inf"):
        capped = _tanh(bounded_up / ACTIVATION.up_softcap)
        factor = capped * ACTIVATION.up_softcap
        dfactor = 1 - capped * capped
    if ACTIVATION.limit != float("inf"):
        dfactor = tl.where(tl.abs(up) > ACTIVATION.limit, 0.0, dfactor)
        if ACTIVATION.clamps_after:
            dvalue = tl.where(value > ACTIVATION.limit, 0.0, dvalue)
            value = _at_most(value, ACTIVATION.limit)
        else:
            dvalue = tl.where(gate > ACTIVATION.limit, 0.0, dvalue)
    factor += ACTIVATION.up_offset
    return value * factor, dhidden * factor * dvalue, dhidden * value * dfactor
