"""Loaded models on a GPU, whose decode steps are recorded and prepared in no time."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from moe_runtime.inference.cpu.small_batch import as_rms_norm
from moe_runtime.inference.device.decode_graphs import DecodeGraphs, has_static_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OTHER_WAYS = (
    "past_key_values", "use_cache", "assistant_model", "prompt_lookup_num_tokens",
    "custom_generate", "prefill_chunk_size", "penalty_alpha", "num_return_sequences",
)  # fmt: skip
"""Options of `generate` with one of which the kind of cache stays as it was asked for."""
_WITHOUT_POSITIONS = frozenset({"use_cache", "logits_to_keep", "position_ids"})


def record_decoding(model: PreTrainedModel, modules: Sequence[Any]) -> None:
    """Has the decode steps of a loaded model recorded as CUDA graphs.

    Args:
        model: the model; its class becomes a subclass of its own.
        modules: its `DeviceExperts`.
    """
    if model.device.type == "cuda":
        _fuse_norms(model)
    cast(Any, model).forward = DecodeGraphs(model, modules)
    if model.can_generate():
        kind = type(model)
        names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        model.__class__ = type(kind.__name__, (RecordedDecoding, kind), names)


def _fuse_norms(model: torch.nn.Module) -> None:
    """Makes normalisations one kernel each, where they compute just what that does."""
    known: dict[tuple[type, int, float], bool] = {}
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            norm = as_rms_norm(child, known)
            if norm is not None:
                setattr(module, name, norm)


class RecordedDecoding:
    """Comes before the class of a loaded model on a GPU that generates text."""

    _unpadded: weakref.ref[Any] | None = None

    def generate(
        self, inputs: Any = None, generation_config: Any = None, *rest: Any, **options: Any
    ) -> Any:
        """As in transformers, with a static cache where nothing else was asked for.

        The memory of a static cache stays where it is, which is what a graph needs. It is used for
        greedy decoding and sampling of models that attend to all tokens in every layer, where the
        number of new tokens is given.
        """
        options.setdefault("disable_compile", True)
        if "cache_implementation" not in options and self._can_be_static(
            generation_config, options
        ):
            options["cache_implementation"] = "static"
        return cast(Any, super()).generate(inputs, generation_config, *rest, **options)

    def _can_be_static(self, config: Any, options: dict[str, Any]) -> bool:
        model = cast(Any, self)

        def asked(name: str) -> Any:
            found = options.get(name)
            return getattr(config, name, None) if found is None else found

        settings = model.generation_config if config is None else config
        return (
            asked("max_new_tokens") is not None
            and asked("num_beams") in (None, 1)
            and not any(options.get(name) is not None for name in _OTHER_WAYS)
            and settings.cache_implementation is None
            and settings.use_cache is not False
            and getattr(model, "_can_compile_fullgraph", False)
            and has_static_layers(model.config)
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in transformers; later steps without padding need the last tokens alone.

        Positions and the mask are what the model makes of the cache, within a graph.
        """
        known = None if self._unpadded is None else self._unpadded()
        if is_first_iteration:
            self._unpadded = None
        elif past_key_values is not None and past_key_values is known and next_sequence_length == 1:
            given = {name: value for name, value in kwargs.items() if value is not None}
            if given.keys() <= _WITHOUT_POSITIONS:
                given.pop("position_ids", None)
                ids_B1 = input_ids[:, -1:].contiguous()
                return {"input_ids": ids_B1, "past_key_values": past_key_values, **given}
        elif past_key_values is not None and DecodeGraphs.takes(past_key_values):
            is_whole = attention_mask is None or bool(attention_mask.all())
            self._unpadded = weakref.ref(past_key_values) if is_whole else None
        return cast(Any, super()).prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, past_key_values=past_key_values,
            attention_mask=attention_mask, inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration, **kwargs,
        )  # fmt: skip
