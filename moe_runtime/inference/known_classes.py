"""transformers' classes with fast paths, by name, and their formulas.

Other classes, and classes with replaced code, run transformers' own code. ``known_rows.py`` in
``tests/support`` checks each row numerically, for all families and both ends of the supported
versions.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, NamedTuple

import torch

from moe_runtime.checkpoints.transformers_private import (
    FIRST_TESTED,
    FIRST_UNTESTED,
    gate_of,
    has_usual_gate,
)
from moe_runtime.kernels.decode_step.expert_choice import ChoiceForm
from moe_runtime.kernels.expert_mlp import ActivationName, ActivationSpec
from moe_runtime.kernels.rms_norm import NormForm


def _names(text: str, ending: str = "") -> frozenset[str]:
    return frozenset(f"{name}{ending}" for name in text.split())


_WIDE_NORMS = _names(
    "Afmoe Beam DeepseekV4 DiffusionGemma FlexOlmo Flint Gemma4 GptOss Inkling2 Inkling2Loop "
    "LaraMini MuseSpark NemotronH OpenAIPrivacyFilter",
    "RMSNorm",
)
_ROUNDED_NORMS = _names(
    "AXK1 AXK2 AriaText BailingHybrid DeepseekOcr2Text DeepseekOcr2Vision DeepseekV2 DeepseekV3 "
    "DeepseekV32 Dots1 Dots3Note Ernie4_5_Moe Ernie4_5_VLMoe ExaoneMoe Glm4Moe Glm4MoeLite "
    "Glm4vMoe Glm4vMoeText Glm5Next Glm5NextText GlmMoeDsa GraniteMoe GraniteMoeHybrid "
    "GraniteMoeSWA GraniteMoeShared HYV3 HYV4 HYV4VL HunYuanMoEV1 Inkling Jamba JetMoe KimiLinear "
    "Kolibri1 Laguna Lfm2Moe Llama4Text LongcatFlash Mellum MiMoV2Flash MiniMax MiniMaxM2 Mistral4 "
    "MistralLarge4 Mixtral Olmoe Pixtral Qwen2Moe Qwen3Moe Qwen3OmniMoe Qwen3OmniMoeCode2Wav "
    "Qwen3OmniMoeText Qwen3OmniMoeThinkerText Qwen3VLMoeText SolarOpen UnlimitedOcrText Zaya",
    "RMSNorm",
)
_PLUS_ONE_NORMS = _names("MiniMaxM3VL Qwen3Next Qwen3_5Moe Qwen4ExpText", "RMSNorm")
_PLUS_ONE_IN_FP32 = "MuseSparkTextCenteredRMSNorm"
_ROUNDED_BEFORE = {"NemotronHRMSNorm": (5, 18), "DeepseekV4RMSNorm": (5, 20)}

ROTARY_ATTENTION = _names(
    "AriaText DeepseekOcr2Text Dots1 ExaoneMoe FlexOlmo Glm4Moe Glm4vMoeText GptOss GraniteMoe "
    "GraniteMoeSWA GraniteMoeShared HYV3 Kolibri1 LaraMini Mellum MiniMax MiniMaxM2 MiniMaxM3VL "
    "Mixtral Olmoe Phimoe Qwen2Moe Qwen3Moe Qwen3OmniMoeTalkerCodePredictor "
    "Qwen3OmniMoeThinkerText Qwen3VLMoeText SolarOpen UnlimitedOcrText",
    "Attention",
)
"""Attention that projects, norms heads, applies RoPE, attends and projects again."""
PAIRS_SHARE = _names("GptOssAttention")
"""Attention in which the two values of a pair share an angle."""

EAGER_ATTENTION_CLASSES = _names(
    "DeepseekV4 Flint GptOss GraniteMoeSWA HYV4 HYV4VL HYV4VLVision Inkling2LoopSliding "
    "Inkling2Sliding MiMoV2Flash OpenAIPrivacyFilter",
    "Attention",
)
"""Layers whose eager attention is a softmax, with sinks or without."""

LATENT_ATTENTION = _names(
    "AXK1Attention BailingHybridAttention DeepseekV2Attention DeepseekV3Attention "
    "Glm4MoeLiteAttention KimiLinearAttention LongcatFlashMLA Mistral4Attention"
)
"""Layers that expand latents by one product. A head's rows are keys without positions, then
values."""

RECURRENT_LAYERS = _names(
    "BailingHybridDeltaAttention Glm5NextTextLinearAttention GraniteMoeHybridMambaLayer "
    "Inkling2LoopShortConvolution Inkling2ShortConvolution InklingShortConvolution JambaMambaMixer "
    "KimiLinearDeltaAttention LaraMiniGatedDeltaNet Lfm2MoeShortConv NemotronHMamba2Mixer "
    "Qwen3NextGatedDeltaNet Qwen3_5MoeGatedDeltaNet Qwen4ExpTextGatedDeltaNet"
)
"""Layers with recurrent states, whose steps are global functions of their modules."""
LAYERS_WITH_STATES = RECURRENT_LAYERS | _names(
    "Inkling2DynamicShortConvolution Qwen4ExpTextNGramEmbedding Qwen4ExpTextPLELayer "
    "ZayaCCAProjection"
)
"""All layers that keep a state of earlier tokens."""


class ResidualForm(NamedTuple):
    """The names of a decoder layer's norm, attention, second norm and feed-forward. ``is_pair``
    means that the feed-forward returns two values, and the layer adds the first."""

    parts: tuple[str, str, str, str]
    is_pair: bool = False


_USUAL_PARTS = "input_layernorm", "self_attn", "post_attention_layernorm", "mlp"
RESIDUAL_LAYERS = {
    **dict.fromkeys(
        _names(
            "AXK1 AriaText DeepseekOcr2Text DeepseekV2 DeepseekV3 DeepseekV32 Dots1 Dots3NoteText "
            "Ernie4_5_Moe ExaoneMoe Flint Glm4Moe Glm4MoeLite Glm4vMoeText HYV3 HunYuanMoEV1 "
            "Laguna Mellum MiMoV2Flash MiniMaxM2 MiniMaxM3VL Mistral4 Mixtral Olmoe Qwen2Moe "
            "Qwen3Moe Qwen3OmniMoeTalker Qwen3OmniMoeTalkerCodePredictor Qwen3OmniMoeThinkerText "
            "Qwen3VLMoeText SolarOpen UnlimitedOcrText",
            "DecoderLayer",
        )
        | _names("DeepseekOcr2VisionEncoderLayer"),
        ResidualForm(_USUAL_PARTS),
    ),
    "GptOssDecoderLayer": ResidualForm(_USUAL_PARTS, is_pair=True),
    "OpenAIPrivacyFilterEncoderLayer": ResidualForm(_USUAL_PARTS, is_pair=True),
    "JambaAttentionDecoderLayer": ResidualForm(
        ("input_layernorm", "self_attn", "pre_ff_layernorm", "feed_forward")
    ),
}
"""Decoder layers of the usual pre-norm form, which pass their arguments to attention."""


class RouterForm(NamedTuple):
    """The formula of a router.

    Attributes:
        product: logits in the type of the model (``narrow``), ``widened`` to fp32, or products in
            fp32 (``wide``).
        num_choices: experts per row.
        keeps_dtype: weights have the type of the rows; else fp32.
        takes_batches: rows may be ``[B, Q, D]`` too.
    """

    product: str
    choice: ChoiceForm
    num_choices: int
    keeps_dtype: bool
    takes_batches: bool


class _Router(NamedTuple):
    product: str
    scores: str
    is_normed: bool | str = "norm_topk_prob"  # or the name of its setting
    least_sum: float = 0.0
    keeps_dtype: bool = True
    takes_batches: bool = True


_ROUTERS = {
    **dict.fromkeys(
        _names(
            "AXK1Topk AXK2Topk BailingHybridTopk BeamTopK DeepseekV32Topk DeepseekV3Topk Dots1Topk "
            "Dots3NoteTextTopk ExaoneMoeTopk Glm4MoeLiteTopk Glm4MoeTopk Glm4vMoeTextTopk "
            "Glm5NextTextTopk GlmMoeDsaTopk HYV4Topk HYV4VLTopk KimiLinearTopk MiMoV2FlashTopk "
            "NemotronHTopk SolarOpenTopk",
            "Router",
        ),
        _Router("wide", "sigmoid", least_sum=1e-20, keeps_dtype=False),
    ),
    **dict.fromkeys(
        _names("DeepseekOcr2Text DeepseekV2 UnlimitedOcrText", "TopkRouter"),
        _Router("wide", "softmax", is_normed=False, keeps_dtype=False),
    ),
    **dict.fromkeys(
        _names(
            "FlexOlmo Mellum Olmoe Qwen2Moe Qwen3Moe Qwen3Next Qwen3OmniMoeTalkerText "
            "Qwen3OmniMoeThinkerText Qwen4ExpText",
            "TopKRouter",
        ),
        _Router("narrow", "softmax"),
    ),
    **dict.fromkeys(
        _names("Qwen3VLMoeText Qwen3_5Moe", "TopKRouter"),
        _Router("narrow", "softmax", is_normed=True),
    ),
    **dict.fromkeys(
        _names("MiniMax Mixtral", "TopKRouter"),
        _Router("narrow", "softmax", is_normed=True, keeps_dtype=False),
    ),
    **dict.fromkeys(
        _names("AriaText Cohere2Moe GptOss", "TopKRouter"),
        _Router("narrow", "softmax_of_chosen", is_normed=False, takes_batches=False),
    ),
    **dict.fromkeys(
        _names("GraniteMoe GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared", "TopKRouter"),
        _Router("widened", "softmax_of_chosen", is_normed=False, takes_batches=False),
    ),
    "JambaTopKRouter": _Router("narrow", "softmax", is_normed=False, takes_batches=False),
    "FlintTopKRouter": _Router("wide", "sigmoid", keeps_dtype=False),
    "LaraMiniTopKRouter": _Router("wide", "softmax"),
    "MiniMaxM3VLTopKRouter": _Router("narrow", "sigmoid", is_normed=True, keeps_dtype=False),
    "MistralLarge4TextTopkRouter": _Router("wide", "softmax", is_normed=True, keeps_dtype=False),
}
_ROUTERS_SINCE = dict.fromkeys(
    _names("AriaText GraniteMoe GraniteMoeHybrid GraniteMoeShared", "TopKRouter"), (5, 21)
)
"""Routers with another order of results before this version."""

_ACTIVATIONS: dict[str, ActivationName] = {
    **dict.fromkeys(("SiLU", "SiLUActivation"), "silu"),
    "GELUActivation": "gelu",
    **dict.fromkeys(_names("AccurateGELU FastGELU NewGELU", "Activation"), "gelu_tanh"),
    "GELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}
"""Classes of activations that kernels compute."""
_GATES = _names(
    "Beam DeepseekV4 FP8 Glm5NextText GptOss HYV4 HYV4VL MiniMaxM3VL OpenAIPrivacyFilter",
    "Experts._apply_gate",
)
_SOFTCAPPED_GATES = _names("Inkling2 Inkling2Loop", "Experts._apply_gate")
"""Gate functions of families, with constants from settings."""


@functools.cache
def version() -> tuple[int, ...]:
    """The first two numbers of the installed transformers."""
    import transformers

    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


def is_tested() -> bool:
    """Whether this table was tested with the installed transformers."""
    return FIRST_TESTED <= version() < FIRST_UNTESTED


def is_theirs(function: Any) -> bool:
    """Whether a function and all functions that it wraps are of transformers."""
    while str(getattr(function, "__globals__", {}).get("__name__")).startswith("transformers."):
        if not hasattr(function, "__wrapped__"):
            return True
        function = function.__wrapped__
    return False


def class_name(module: torch.nn.Module) -> str:
    """The name of a module's class; empty if it is not a class of a tested transformers."""
    kind = type(module)
    if not kind.__module__.startswith("transformers.") or not is_theirs(kind.forward):
        return ""
    return kind.__name__ if is_tested() else ""


def norm_form(module: torch.nn.Module) -> NormForm | None:
    """The form of a root-mean-square norm; None for other modules."""
    name = class_name(module)
    if vars(module).get("group_size") is not None:  # each group has its own mean
        return None
    if version() < _ROUNDED_BEFORE.get(name, (0,)) or name in _ROUNDED_NORMS:
        return "rounded"
    if name in _WIDE_NORMS:
        return "wide"
    weight = module._parameters.get("weight")
    in_fp32 = weight is not None and weight.dtype is torch.float32
    is_plus_one = name in _PLUS_ONE_NORMS or (name == _PLUS_ONE_IN_FP32 and in_fp32)
    return "plus_one" if is_plus_one else None


def router_form(module: Any) -> RouterForm | None:
    """The formula of a router with its current settings; None if unknown."""
    name = class_name(module)
    row = _ROUTERS.get(name)
    if row is None or version() < _ROUTERS_SINCE.get(name, (0,)):
        return None
    own = vars(module)
    are_groups_limited = own.get("topk_group", 1) < own.get("num_group", 1)
    if are_groups_limited and own.get("topk_method") != "greedy":
        return None
    if own.get("expert_selection_fn", "softmax") != "softmax":
        return None
    is_normed = bool(own[row.is_normed]) if isinstance(row.is_normed, str) else row.is_normed
    least_sum = row.least_sum if is_normed else 0.0
    factor = float(own.get("routed_scaling_factor", 1.0))
    choice = ChoiceForm(row.scores, is_normed, factor, least_sum)  # type: ignore[arg-type]
    return RouterForm(row.product, choice, own["top_k"], row.keeps_dtype, row.takes_batches)


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A router's tensors: `weight`, perhaps `bias`, and perhaps a bias of the choice."""
    tensors = {**module._parameters, **module._buffers}
    return {name: each for name, each in tensors.items() if each is not None}


def activation_of(experts: Any) -> ActivationSpec | None:
    """The formula of an experts module's activation and gate; None if unknown."""
    function: Any = getattr(experts, "act_fn", None)
    plain = None
    if function is torch.nn.functional.silu:
        plain = "silu"
    elif type(function).__module__.startswith(("torch.", "transformers.")):
        plain = _ACTIVATIONS.get(type(function).__name__)
    if not experts.has_gate or has_usual_gate(experts):
        return None if plain is None else ActivationSpec(plain)
    gate: Any = getattr(gate_of(experts), "__func__", None)
    name = gate.__qualname__ if is_theirs(gate) and is_tested() else ""
    if name in _SOFTCAPPED_GATES and is_theirs(type(function).forward):
        return _softcapped(function.gate_softcap.softcap, function.up_softcap.softcap)
    if name not in _GATES or (function is not None and plain is None):
        return None
    if getattr(experts, "gate_softcap", None) is not None:
        return _softcapped(experts.gate_softcap, experts.up_softcap)
    limit = _setting(experts, "swiglu_limit", "limit") or math.inf
    slope = _setting(experts, "swiglu_alpha", "alpha")
    if slope is None:
        return ActivationSpec(plain or "silu", limit=limit)
    return ActivationSpec("silu", alpha=slope, limit=limit, up_offset=1.0)


def _softcapped(gate: float, up: float) -> ActivationSpec:
    return ActivationSpec("silu", gate_softcap=float(gate), up_softcap=float(up))


def _setting(experts: Any, *names: str) -> float | None:
    found = (getattr(experts, name, None) for name in names)
    return next((float(value) for value in found if value is not None), None)


def recognise_activation(experts: torch.nn.Module) -> ActivationSpec | None:
    """`activation_of`, a constant for the compiler."""
    found = _formula(id(experts))
    if found is None:
        return None
    function, *numbers = found.split()
    return ActivationSpec.from_numbers(function, [float(number) for number in numbers])


# text, since the compiler would make numbers symbolic; torch 2.11 passes only addresses of objects
@torch.compiler.assume_constant_result
def _formula(address: int) -> str | None:
    spec = activation_of(ctypes.cast(address, ctypes.py_object).value)
    return None if spec is None else " ".join([spec.function, *map(repr, spec.numbers())])


KEEPS_NOTHING = "DummyLayer"
"""A class of cache layers that transformers 5.17 does not have."""

_KNOWN_LAYERS = {
    *("DynamicLayer", "DynamicSlidingWindowLayer"),
    KEEPS_NOTHING,
    *("LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer"),
    "LinearAttentionAndSlidingWindowAttentionLayer",
}
"""Cache layers with running states, or keys and values."""


def can_share_a_pass(config: Any) -> bool:
    """Whether a sequence's cache consists of running states, keys and values."""
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    if getattr(config, "is_encoder_decoder", False) or "chunked_attention" in kinds:
        return False
    if getattr(text, "attention_chunk_size", None) is not None:
        return False
    return has_known_layers(config)


def has_known_layers(config: Any) -> bool:
    return all(type(layer).__name__ in _KNOWN_LAYERS for layer in _layers(config))


def keeps_states(config: Any) -> bool:
    from transformers.cache_utils import LinearAttentionLayer

    return any(isinstance(layer, LinearAttentionLayer) for layer in _layers(config))


def keeps_every_token(config: Any) -> bool:
    """Whether a sequence's cache can be cut to any length."""
    is_sliding = any(getattr(layer, "is_sliding", False) for layer in _layers(config))
    return not is_sliding and not keeps_states(config)


def _layers(config: Any) -> list[Any]:
    from transformers.cache_utils import DynamicCache

    return DynamicCache(config=config).layers
