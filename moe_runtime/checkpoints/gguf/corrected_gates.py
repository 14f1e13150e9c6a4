"""Models whose gates add a correction to scores as they choose: GLM-4.5, ERNIE 4.5, MiniMax-M2.

What only some of their files have (biases, norms of heads, shared experts) is seen in the tensors.
Source: llama.cpp's converter, and its graphs of the three.
"""

from __future__ import annotations

from pathlib import Path

from moe_runtime.checkpoints.gguf.architectures import (
    ATTENTION,
    CORRECTION,
    DENSE,
    EXPERT_WIDTH,
    EXPERTS,
    FIELDS,
    HEAD_NORMS,
    MIXTRAL_EXPERTS,
    SHARED_EXPERTS,
    Architecture,
    refuse,
    unsupported,
)
from moe_runtime.checkpoints.gguf.header import GgufHeader
from moe_runtime.checkpoints.strict_json import clipped

_SIGMOID = 2
_SIZES = {"moe_intermediate_size": EXPERT_WIDTH, "intermediate_size": ("ffn_gate", -2)}
_COMMON = {setting: key for setting, key in FIELDS.items() if "num_experts" not in setting}


def glm4moe(header: GgufHeader, file: Path) -> Architecture:
    """The row of a file of GLM-4.5 to 4.7, or of Solar Open.

    Raises:
        CheckpointError: something that it needs is missing.
        UnsupportedModelError: its gates are no sigmoid, or it is Solar Open with half of the
            positions, as llama.cpp's converter writes where the configuration does not say it.
    """
    found = _File(header, file)
    found.require_sigmoid(otherwise=_SIGMOID)
    if not found.has("attn_q.bias") and found.rotated != 1:  # GLM's have biases
        expected = f"glm4moe.rope.dimension_count {found.head_dim} without biases, as Solar Open is"
        unsupported(file, expected, f"{found.rotated} of it: convert it again, or set the key")
    parts = {
        **ATTENTION,
        **HEAD_NORMS,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.gate",
        "exp_probs_b": f"mlp.gate.{CORRECTION}",
        **EXPERTS,
        **DENSE,
        **SHARED_EXPERTS,
    }
    constants = {
        "head_dim": found.head_dim,
        "attention_bias": found.has("attn_q.bias"),
        "use_qk_norm": found.has("attn_q_norm.weight"),
        "first_k_dense_replace": found.value("leading_dense_block_count", 0),
        "routed_scaling_factor": found.value("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": bool(found.value("expert_weights_norm", False)),
        "n_group": found.value("expert_group_count", 1),
        "topk_group": found.value("expert_group_used_count", 1),
        "num_nextn_predict_layers": 0,
    }
    fields = {
        **_COMMON,
        "n_routed_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "n_shared_experts": "expert_shared_count",
    }
    return Architecture(
        "glm4_moe", "Glm4MoeForCausalLM", parts, _SIZES, constants, fields, rotated=found.rotated
    )


def ernie4_5_moe(header: GgufHeader, file: Path) -> Architecture:
    """The row of a file of ERNIE 4.5.

    Raises:
        CheckpointError: something that it needs is missing.
        UnsupportedModelError: heads are not turned as a whole.
    """
    found = _File(header, file)
    if found.rotated != 1:
        unsupported(file, "positions that turn all values of a head", f"{found.rotated} of them")
    parts = {
        **ATTENTION,
        "ffn_gate_inp": "mlp.gate",
        "exp_probs_b": f"mlp.moe_statics.{CORRECTION}",
        **EXPERTS,
        **DENSE,
        **SHARED_EXPERTS,
    }
    width, shared = (found.rows_of(f"ffn_gate_{end}.weight") for end in ("exps", "shexp"))
    constants = {
        "head_dim": found.head_dim,
        "use_bias": found.has("attn_q.bias"),
        "moe_layer_start_index": found.value("leading_dense_block_count", 0),
        "moe_layer_end_index": -1,
        "moe_num_shared_experts": shared // max(1, width),
    }
    fields = {
        **_COMMON,
        "moe_num_experts": "expert_count",
        "moe_k": "expert_used_count",
        "moe_layer_interval": "interleave_moe_layer_step",
    }
    return Architecture("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", parts, _SIZES, constants, fields)


def minimax_m2(header: GgufHeader, file: Path) -> Architecture:
    """The row of a file of MiniMax-M2.

    Raises:
        CheckpointError: something that it needs is missing.
        UnsupportedModelError: its gates are no sigmoid.
    """
    found = _File(header, file)
    found.require_sigmoid(otherwise=None)
    parts = {
        **ATTENTION,
        **HEAD_NORMS,
        "ffn_gate_inp": "block_sparse_moe.gate",
        "exp_probs_b": f"block_sparse_moe.{CORRECTION}",
        **MIXTRAL_EXPERTS,
    }
    fields = {
        **_COMMON,
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
    }
    return Architecture(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        parts,
        {"intermediate_size": EXPERT_WIDTH},
        {"head_dim": found.head_dim},
        fields,
        rotated=found.rotated,
    )


class _File:
    """What a file says of its model beside the names and sizes of all architectures."""

    def __init__(self, header: GgufHeader, file: Path) -> None:
        self.value, self._file = header.value, file
        self._tensors = {
            tensor.name.split(".", 2)[2]: tensor
            for tensor in reversed(header.tensors)
            if tensor.name.startswith("blk.") and tensor.name.count(".") > 2
        }

    def has(self, name: str) -> bool:
        """Whether a layer has a tensor of this name."""
        return name in self._tensors

    def rows_of(self, name: str) -> int:
        """Rows of the matrices of this name; 0 where there are none."""
        tensor = self._tensors.get(name)
        return 0 if tensor is None or len(tensor.shape) < 2 else tensor.shape[-2]

    @property
    def head_dim(self) -> int:
        """Values of a head: all of the queries' by how many heads there are."""
        rows, heads = self.rows_of("attn_q.weight"), self.value("attention.head_count")
        if type(heads) is not int or heads < 1 or not rows or rows % heads:
            refuse(self._file, "a matrix attn_q with as many rows for each head", clipped(heads))
        return rows // heads

    @property
    def rotated(self) -> float:
        """The share of a head's values that positions turn."""
        turned = self.value("rope.dimension_count", self.head_dim)
        if type(turned) is not int or not 0 < turned <= self.head_dim:
            expected = f"rope.dimension_count of 1 to {self.head_dim}"
            refuse(self._file, expected, clipped(turned))
        return turned / self.head_dim

    def require_sigmoid(self, otherwise: int | None) -> None:
        """Refuses other gates.

        Args:
            otherwise: what a file has that does not say it.
        """
        gating = self.value("expert_gating_func", otherwise)
        if gating != _SIGMOID:
            unsupported(self._file, f"expert_gating_func {_SIGMOID}, a sigmoid", clipped(gating))
