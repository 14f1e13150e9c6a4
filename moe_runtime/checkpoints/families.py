"""Families whose blocks `transformers` builds without its experts interface.

A row of `BLOCKS` turns the blocks of one family, in place, into blocks that have that interface.

Shapes: T tokens, K top-k, D model, F hidden, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def give_experts_interface(model: PreTrainedModel) -> None:
    """Gives the blocks of a meta model that are in `BLOCKS` the experts interface."""
    for block in list(model.modules()):
        if (found := BLOCKS.get(type(block).__name__)) is not None:
            block.experts = found.experts_of(block, model.config)
            block.__class__ = _with_forward(type(block), found.forward)


def checkpoint_renamings(model: PreTrainedModel) -> list[private.WeightRenaming]:
    """Renamings of checkpoint names for the blocks that were changed."""
    bases = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    return [
        private.WeightRenaming(source_patterns=source, target_patterns=target)
        for name in sorted(BLOCKS.keys() & bases)
        for source, target in BLOCKS[name].renamings.items()
    ]


@functools.cache
def _with_forward(block: type, forward: Callable[..., Any]) -> type:
    return type(f"Routed{block.__name__}", (block,), {"forward": forward, "__module__": __name__})


class _Stacked(torch.nn.Module):
    """Routed experts as two weights `[E, 2F, D]` and `[E, D, F]`, or transposed."""

    def __init__(
        self,
        config: Any,
        act_fn: torch.nn.Module,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        may_be_padded: bool = False,
    ) -> None:
        super().__init__()
        self.may_be_padded = may_be_padded
        self.num_experts = len(down)
        self.act_fn = act_fn
        self.gate_up_proj = torch.nn.Parameter(gate_up)
        self.down_proj = torch.nn.Parameter(down)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """`[T, D]`, from hidden states `[T, D]`, expert ids `[T, K]` and gate weights `[T, K]`."""
        return private.batched_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)


@functools.cache
def _stacked_experts(*, is_transposed: bool = False) -> type[_Stacked]:
    """The class of experts; made when needed, since its decorator imports `transformers`."""
    decorate: Any = private.use_experts_implementation(is_transposed=is_transposed)
    return decorate(type("StackedExperts", (_Stacked,), {"__module__": __name__}))


def _jetmoe_experts(block: Any, config: Any) -> _Stacked:
    gate_up, down = block.input_linear.weight, block.output_linear.weight
    del block.input_linear, block.output_linear
    return _stacked_experts()(config, block.activation, gate_up, down)


def _jetmoe_forward(self: Any, layer_input: torch.Tensor) -> torch.Tensor:
    """The bias is added after the sum."""
    hidden_TD = layer_input.reshape(-1, self.input_size)
    logits_TE = self.router(hidden_TD)[-1]
    chosen_TK, ids_TK = logits_TE.topk(self.router.top_k, dim=1)
    weights_TK = chosen_TK.softmax(dim=1).type_as(hidden_TD)
    return self.experts(hidden_TD, ids_TK, weights_TK).view_as(layer_input) + self.bias


def _llama4_experts(block: Any, config: Any) -> _Stacked:
    """Refuses several experts for each token, and pictures if transformers cannot run them."""
    import transformers

    if config.model_type == "llama4" and transformers.__version__ == "5.24.0":
        raise UnsupportedModelError(
            "transformers 5.24.0 cannot run Llama4ForConditionalGeneration, not even on text: it "
            "reads image_outputs, which its language model does not return; install another "
            "version, such as 5.23.0, for llama4"
        )
    if block.top_k != 1:
        raise UnsupportedModelError(
            f"llama4 with {block.top_k} experts for each token is not supported; expected "
            "num_experts_per_tok 1, as in all published models of the family"
        )
    own, kind = block.experts, _stacked_experts(is_transposed=True)
    found: Any = kind(config.get_text_config(), own.act_fn, own.gate_up_proj, own.down_proj)
    found.is_turned_for_adapters = True  # the class in transformers does not say is_transposed
    return found


def _llama4_forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate weight of the one expert multiplies the expert's input."""
    hidden_TD = hidden_states.reshape(-1, self.hidden_dim)
    scores_TE, logits_TE = self.router(hidden_TD)
    ids_T1 = logits_TE.argmax(dim=-1, keepdim=True)
    scale_T1 = scores_TE.gather(1, ids_T1)
    routed_TD = self.experts(hidden_TD * scale_T1, ids_T1, torch.ones_like(scale_T1))
    return self.shared_expert(hidden_TD) + routed_TD, logits_TE


def _longcat_experts(block: Any, config: Any) -> _Stacked:
    own = block.experts
    gate_up = own.gate_up_proj[: len(own.down_proj)].detach()
    # transformers pads one of the two weights for identity experts, and never reads that part
    return _stacked_experts()(config, own.act_fn, gate_up, own.down_proj, may_be_padded=True)


def _longcat_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Some choices of the router are identity experts without weights."""
    hidden_TD = hidden_states.view(-1, hidden_states.shape[-1])
    # before transformers 5.20 the router did not return its logits first
    *_, weights_TK, ids_TK = self.router(hidden_states)
    num_experts = self.experts.num_experts
    # this id adds nothing in the experts; the token's own values are added below
    routed_TD = self.experts(hidden_TD, ids_TK.clamp(max=num_experts), weights_TK)
    own_T1 = (weights_TK * (ids_TK >= num_experts)).sum(-1, keepdim=True)
    return (routed_TD + (hidden_TD * own_T1).to(routed_TD.dtype)).view_as(hidden_states)


class Family(NamedTuple):
    """A row of the table."""

    name: str
    experts_of: Callable[[Any, Any], torch.nn.Module]  # of a block and its configuration
    forward: Callable[..., Any]
    renamings: Mapping[str, str] = {}  # checkpoint names to names in the changed model


BLOCKS: Mapping[str, Family] = {
    "JetMoeMoE": Family(
        *("jetmoe", _jetmoe_experts, _jetmoe_forward),
        {
            r"mlp\.input_linear\.weight": "mlp.experts.gate_up_proj",
            r"mlp\.output_linear\.weight": "mlp.experts.down_proj",
        },
    ),
    "Llama4TextMoe": Family("llama4", _llama4_experts, _llama4_forward),
    "LongcatFlashMoE": Family("longcat_flash", _longcat_experts, _longcat_forward),
}
"""By the class of a block in `transformers`."""
