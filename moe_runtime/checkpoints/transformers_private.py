"""All uses of transformers that its documentation does not promise, with their first version.

A test keeps other modules from touching a private part; `make test-versions` runs both ends.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from moe_runtime.errors import MoERuntimeWarning, UnsupportedModelError
from moe_runtime.lazy import lazy_names

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: F401
    from transformers.core_model_loading import (  # noqa: F401
        Concatenate,
        Interleave,
        MergeModulelist,
        PermuteForRope,
        Transpose,
        WeightConverter,
        WeightRenaming,
        WeightTransform,
        convert_and_load_state_dict_in_model,
        dot_natural_key,
        rename_source_key,
        revert_weight_conversion,
    )
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface  # noqa: F401
    from transformers.integrations.moe import (  # noqa: F401
        ExpertsInterface,
        batched_mm_experts_forward,
        use_experts_implementation,
    )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: F401
    from transformers.modeling_utils import LoadStateDictConfig  # noqa: F401
else:
    _find = lazy_names(
        __name__,
        {
            # Names and stacking of weights, from checkpoints to models and back; 5.17. The map of
            # experts runs it on placeholders, dense loading on the weights, export backwards.
            "transformers.conversion_mapping": "get_model_conversion_mapping",
            "transformers.core_model_loading": "Concatenate Interleave MergeModulelist "
            "PermuteForRope Transpose WeightConverter WeightRenaming WeightTransform "
            "convert_and_load_state_dict_in_model dot_natural_key rename_source_key "
            "revert_weight_conversion",
            # The settings of dense loading; 5.17.
            "transformers.modeling_utils": "LoadStateDictConfig",
            # The experts interface, for our backend and for families that transformers builds
            # without it; 5.17.
            "transformers.integrations.moe": "ExpertsInterface batched_mm_experts_forward "
            "use_experts_implementation",
            "transformers.integrations.finegrained_fp8": "FP8ExpertsInterface",
            # The attention that ours calls; 5.17.
            "transformers.integrations.sdpa_attention": "sdpa_attention_forward",
        },
    )

    def __getattr__(name: str) -> Any:
        # cached, since some names are used in every step
        return globals().setdefault(name, _find(name))


FIRST_TESTED, FIRST_UNTESTED = (5, 17), (5, 25)
"""Tested versions of transformers; `pyproject.toml` has the same."""


@functools.cache
def warn_if_untested(version: str) -> None:
    """Warns once about an untested version of transformers."""
    number = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not FIRST_TESTED <= number < FIRST_UNTESTED:
        first, last = (".".join(map(str, v)) for v in (FIRST_TESTED, FIRST_UNTESTED))
        warnings.warn(
            f"transformers {version} is not one that moe_runtime was tested with: expected at "
            f"least {first} and below {last}; install one of those if a model fails or differs",
            MoERuntimeWarning,
            stacklevel=3,
        )


def is_experts_module(module: torch.nn.Module) -> bool:
    """Whether a module has the experts interface (flags and gate); 5.17."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def gate_of(experts: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that an experts module applies to gate and up in one tensor; 5.17."""
    return experts._apply_gate


def has_usual_gate(experts: Any) -> bool:
    """Whether the gate is the usual one, the activation of gate times up."""
    from transformers.integrations.moe import _default_apply_gate

    is_usual = type(experts)._apply_gate is _default_apply_gate
    return is_usual and "_apply_gate" not in vars(experts)


def dtype_plan(model: PreTrainedModel, dtype: torch.dtype) -> Any:
    """Weights that stay in another dtype than the model's; 5.17."""
    return model._get_dtype_plan(dtype)


def finish_loading(model: PreTrainedModel, config: Any, info: Any) -> Any:
    """Initialises and ties the remaining parameters, as `from_pretrained` does; 5.17."""
    return model._finalize_model_loading(model, config, info)


_FULL = {"mtp_layer_types": ["full_attention"]}
HEADS_WITHOUT_SETTINGS = {
    **{"qwen3_next": _FULL, "qwen3_5_moe_text": _FULL},
    "mimo_v2_flash": {"mtp_layer_types": ["sliding_attention"], "mtp_mlp_layer_types": ["dense"]},
}
"""Families without settings of their heads, and the kinds of the heads' layers."""
_NORMS_OF_HEADS = {
    "mimo_v2_flash": {
        "final_layernorm": "post_norm",
        "pre_mlp_layernorm": "post_attention_layernorm",
    }
}
"""Checkpoint names and names in a head that 5.23 does not know."""


def head_of_further_tokens(model: PreTrainedModel) -> tuple[PreTrainedModel, list[WeightTransform]]:
    """A model's first layer for further tokens on the meta device, without the parts that it shares
    with the model, and the conversions of its weights; 5.23. Raises UnsupportedModelError if this
    version of transformers has none."""
    import transformers
    from transformers.core_model_loading import WeightRenaming

    text: Any = model.config.get_text_config(decoder=True)
    try:
        from transformers.modeling_layers import MtpModel

        with ExitStack() as stack:
            if text.model_type in HEADS_WITHOUT_SETTINGS and not hasattr(text, "num_mtp_layers"):
                settings = {"num_mtp_layers": 1, **HEADS_WITHOUT_SETTINGS[text.model_type]}
                for name, value in settings.items():
                    setattr(text, name, value)
                    stack.callback(delattr, text, name)
            for context in MtpModel.get_init_context(model.dtype, False, False, None):
                stack.enter_context(context)
            head = MtpModel(model, 1)
    except (AttributeError, ImportError, StopIteration, ValueError) as error:
        raise UnsupportedModelError(
            f"draft mtp: transformers {transformers.__version__} makes no head for further tokens "
            f"of {type(model).__name__}; give lookup or a small model"
        ) from error
    conversions = head.get_weight_conversions(model)
    for each in conversions:  # with pictures, they look for the names of the text model
        if getattr(each, "scope_prefix", None) is not None:
            each.scope_prefix = None
    norms = _NORMS_OF_HEADS.get(text.model_type, {}).items()
    conversions = [*(WeightRenaming(f".{a}.", f".{b}.") for a, b in norms), *conversions]
    for shared in ("embed_tokens", "shared_head", "rotary_emb"):
        setattr(head, shared, None)
    return head, conversions


def unexpected_names(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """The names that `from_pretrained` reports as unexpected; 5.17."""
    info: Any = SimpleNamespace(missing_keys=set(), unexpected_keys=set(names))
    model._adjust_missing_and_unexpected_keys(info)
    return info.unexpected_keys


def mark_as_initialized(module: torch.nn.Module | torch.Tensor) -> None:
    """Keeps transformers from initialising a parameter, or those of a module; 5.17."""
    cast(Any, module)._is_hf_initialized = True


ATTENTION_SETTING = "_attn_implementation"
"""The configuration's attribute with the attention of a model; 5.17."""


def attention_names(model: Any) -> set[str]:
    """Attention names in the configurations of a model's attention layers."""
    configs = [vars(m).get("config") for m in model.modules() if "layer_idx" in vars(m)]
    names = (getattr(config, ATTENTION_SETTING, None) for config in configs)
    return {name for name in names if name}


def attention_name(model: PreTrainedModel) -> str | None:
    return getattr(model.config, ATTENTION_SETTING)


DECIDE_BY_ATTENTION_NAME = frozenset((
    "axk2", "deepseek_v32", "diffusion_gemma", "dots3_note", "falcon", "gemma4", "gemma4_unified",
    "glm5_next", "glm_moe_dsa", "hy_v4", "hy_v4_vl", "minimax_m3_vl", "mistral_large4",
))  # fmt: skip
"""Families that choose masked keys or omitted queries by the attention's name, and compute
something else under an unknown name; 5.17 to 5.24."""


def decides_by_attention_name(model: torch.nn.Module) -> bool:
    names = {type(part).__module__ for part in model.modules()}
    families = {parts[2] for name in names if len(parts := name.split(".")) == 4}
    return not DECIDE_BY_ATTENTION_NAME.isdisjoint(families)


def window_of_mask(function: Any) -> tuple[bool, int | None]:
    """Whether a mask function is causal, and the size of its window or None; 5.17.

    The function of a window is that of causal masks within one that keeps the window's size.
    """
    from transformers import masking_utils as masks

    if function is masks.causal_mask_function:
        return True, None
    of_window = masks.sliding_window_causal_mask_function(1)
    if getattr(function, "__code__", None) is not of_window.__code__:
        return False, None
    (parts,) = (cell.cell_contents for cell in function.__closure__)
    overlay, *causal = parts
    is_window = overlay.__code__ is masks.sliding_window_overlay(1).__code__
    if not is_window or causal != [masks.causal_mask_function]:
        return False, None
    (window,) = (cell.cell_contents for cell in overlay.__closure__)
    return isinstance(window, int), window


def is_output_recorder(hook: Callable[..., object]) -> bool:
    """Whether a hook is one with which transformers records requested outputs; 5.17."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def has_adapters(model: Any) -> bool:
    return getattr(model, "_hf_peft_config_loaded", False)


CACHE_NAMES = ("cache", "past_key_values")
"""Names of the cache in models, layers and outputs: from 5.24 on, which takes both, and before."""


def cache_name(forward: Callable[..., object]) -> str:
    new, old = CACHE_NAMES
    return new if new in inspect.signature(forward).parameters else old


def page_size_name(settings: Any) -> str:
    """The name of the page size in the settings of continuous batching."""
    return "page_size" if hasattr(settings, "page_size") else "block_size"  # until 5.20


def picture_processor(folder: Path, config: Any, tokenizer: Any) -> Any:
    """The processor of a vision-language checkpoint, for texts and pictures only; videos and sounds
    need other packages. None if the model has none; 5.17."""
    import transformers

    kind: Any = transformers.PROCESSOR_MAPPING.get(type(config), None)
    if kind is None or "image_processor" not in kind.get_attributes():
        return None
    pictures = transformers.AutoImageProcessor.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )
    parts = {"tokenizer": tokenizer, "image_processor": pictures}

    class PictureProcessor(kind):
        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **kwargs: Any) -> list[Any]:
            return [parts.get(name) for name in kind.get_attributes()]

        def check_argument_for_proper_class(self, *_: Any) -> None: ...

    return PictureProcessor.from_pretrained(folder, local_files_only=True)
