"""Rows of `inference.known_classes` against the modules of a tiny model that they are of."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from moe_runtime.checkpoints.transformers_private import (
    cache_name,
    gate_of,
    is_experts_module,
    sdpa_attention_forward,
)
from moe_runtime.inference import known_classes as known
from moe_runtime.inference.cpu.step_layers import is_router, is_usual_rotary
from moe_runtime.inference.device.fused_layers import compute_router, tensors_of
from moe_runtime.kernels.decode_step.split_attention import RowNorm, turned_step
from moe_runtime.kernels.rms_norm import rms_norm_reference

DTYPES = (torch.float32, torch.bfloat16)


def checks_of(model: torch.nn.Module) -> dict[tuple[str, str], Callable[[], None]]:
    """By kind and class, a check of each row that a model's modules have; it asserts."""
    return {
        (kind, type(module).__name__): check
        for module in model.modules()
        for kind, check in _checks_of_module(module)
    }


def _checks_of_module(module: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    if known.norm_form(module) is not None and "weight" in module._parameters:
        yield "norm", lambda: _check_norm(module)
    if is_router(module) and known.router_form(module) is not None:
        yield "router", lambda: _check_router(module)
    if known.class_name(module) in known.ROTARY_ATTENTION:
        yield "attention", lambda: _check_attention(module)
    if known.class_name(module) in known.RESIDUAL_LAYERS:
        yield "layer", lambda: _check_layer(module)
    if is_experts_module(module) and known.activation_of(module) is not None:
        yield "gate", lambda: _check_gate(module)


def _check_norm(module: Any) -> None:
    """The bits, also in bf16, where roundings show the form."""
    for dtype in DTYPES:
        own = copy.deepcopy(module).to(dtype)
        form = known.norm_form(own)
        if form is None:
            continue
        torch.nn.init.normal_(own.weight)
        eps = getattr(own, "variance_epsilon", getattr(own, "eps", None))
        x = torch.randn(3 + 256 // len(own.weight), len(own.weight))
        x[1] *= eps**0.5  # where the epsilon is added shows in rows whose mean square is near it
        found = rms_norm_reference(x.to(dtype), own.weight, eps, form)
        assert torch.equal(found, own(x.to(dtype)))


def _check_router(module: Any) -> None:
    """Choices, and weights but for roundings of a sum in another order; large and small logits."""
    for dtype in DTYPES:
        own = copy.deepcopy(module).to(dtype)
        for tensor in tensors_of(own).values():
            torch.nn.init.normal_(tensor, std=0.5)
        form, dim = known.router_form(own), own.weight.shape[1]
        assert form is not None
        shape = (2, 16, dim) if form.takes_batches else (32, dim)
        for scale in (1.0, 30.0, 1e3):
            x = (torch.randn(shape) * scale).to(dtype)
            logits, weights, ids = compute_router(form, x, tensors_of(own), "reference")
            own_logits, own_weights, own_ids = own(x)
            assert torch.equal(logits, own_logits)
            assert weights.dtype == own_weights.dtype
            if scale == 1:
                places = logits.gather(1, ids).sort(dim=1), logits.gather(1, own_ids).sort(dim=1)
                assert torch.equal(places[0].values, places[1].values)
                pair = (
                    weights.gather(1, places[0].indices),
                    own_weights.gather(1, places[1].indices),
                )
            else:  # nobody says which of equal probabilities comes first
                pair = weights.sort(dim=1).values, own_weights.sort(dim=1).values
            eps, least = torch.finfo(weights.dtype).eps, torch.finfo(weights.dtype).tiny
            torch.testing.assert_close(*pair, rtol=max(eps, 1e-6), atol=least, equal_nan=True)


def _check_attention(module: Any) -> None:
    """The bits of a token of two sequences behind others in a static cache."""
    for dtype, length, is_masked in ((torch.float32, 3, False), (torch.bfloat16, 6, True)):
        own = copy.deepcopy(module).to(dtype).eval()
        if not is_usual_rotary(own, own.config):
            return
        attend: Any = sdpa_attention_forward
        if own.config._attn_implementation == "eager":
            attend = inspect.unwrap(type(own).forward).__globals__["eager_attention_forward"]
        pairs_share, heads = type(own).__name__ in known.PAIRS_SHARE, own.k_proj.out_features
        heads //= own.head_dim
        cached = [
            torch.randn(2, heads, length, width, dtype=dtype)
            for width in (own.head_dim, own.v_proj.out_features // heads)
        ]
        layers = [StaticLayer(length + 3) for _ in range(2)]
        for layer in layers:
            layer.update(*cached)
        hidden = torch.randn(2, 1, own.q_proj.in_features, dtype=dtype)
        angles = torch.randn(2, 2, 1, own.head_dim // (1 + pairs_share), dtype=dtype).unbind()
        mask = torch.zeros(2, 1, 1, length + 3, dtype=dtype)
        if is_masked:
            mask[..., 0] = -torch.inf

        def update(keys: Tensor, values: Tensor, *_: Any, first: Any = layers[0], **__: Any) -> Any:
            return first.update(keys, values)

        given = {cache_name(type(own).forward): SimpleNamespace(update=update)}
        with torch.no_grad():
            expected, _ = own(
                hidden_states=hidden, position_embeddings=angles, attention_mask=mask, **given
            )
            query, key, value = (
                part(hidden).flatten(1) for part in (own.q_proj, own.k_proj, own.v_proj)
            )
            query = turned_step(
                (query, key, value),
                (angles[0].flatten(1), angles[1].flatten(1)),
                (layers[1].keys, layers[1].values),
                layers[1].cumulative_length,
                (_norm_of(own, "q_norm"), _norm_of(own, "k_norm")),
                pairs_share=pairs_share,
            )
            mixed, _ = attend(
                own, query, layers[1].keys, layers[1].values, mask, scaling=own.scaling, dropout=0.0
            )
            found = own.o_proj(mixed.reshape(2, 1, -1))
        assert torch.equal(found, expected)
        assert torch.equal(layers[0].keys, layers[1].keys)
        assert torch.equal(layers[0].values, layers[1].values)


def _norm_of(layer: Any, name: str) -> RowNorm | None:
    norm = layer._modules.get(name)
    form = None if norm is None else known.norm_form(norm)
    if norm is None or form is None:
        assert norm is None, "the fast paths leave a layer alone whose norms are not known"
        return None
    return RowNorm(norm.weight, getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)), form)


def _check_layer(module: Any) -> None:
    """What its parts are called with, in order, and the sums that it makes of what they give."""
    form, calls = known.RESIDUAL_LAYERS[type(module).__name__], list[Any]()
    names = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
    options = {name: object() for name in (*names[1:], "more") if name not in ("kwargs", "args")}
    results = torch.randn(4, 2, 3, 8).unbind()

    def stand_in(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, args, kwargs))
            found = results[len(calls) - 1]
            is_pair = name == form.parts[1] or (name == form.parts[3] and form.is_pair)
            return (found, None) if is_pair else found

        return call

    own = copy.copy(module)
    vars(own).update(_modules={name: stand_in(name) for name in module._modules}, training=False)
    hidden = torch.randn(2, 3, 8)
    found = type(module).forward(own, hidden, **options)
    assert [name for name, *_ in calls] == [*form.parts]
    (_, first, _), (_, more, passed), (_, second, _), (_, last, _) = calls
    assert first == (hidden,)
    assert not more
    assert passed.pop("hidden_states") is results[0]
    assert passed == options
    assert torch.equal(second[0], hidden + results[1])
    assert last == (results[2],)
    assert torch.equal(found, hidden + results[1] + results[3])


def _check_gate(module: Any) -> None:
    """In fp64 over the range in which its constants act."""
    spec = known.activation_of(module)
    assert spec is not None
    reach = 3 * max((number for number in spec.numbers() if number < 1e4), default=1) + 3
    gate, up = torch.empty(2, 1, 2048, dtype=torch.float64).uniform_(-reach, reach)
    if not module.has_gate:
        expected, gate = module.act_fn(up), None
    elif module.is_concatenated:
        expected = gate_of(module)(torch.cat((gate, up), -1))
    else:
        expected = gate_of(module)(torch.stack((gate, up), -1).flatten(-2))
    # some families compute it in fp32
    torch.testing.assert_close(spec(gate, up), expected.to(up.dtype), rtol=1e-5, atol=1e-5)
