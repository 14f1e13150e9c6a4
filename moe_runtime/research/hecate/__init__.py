"""Sparse materialisation of experts for every batch (Hecate)."""

from moe_runtime.research.hecate.fssdp import (
    CopyRules,
    SparseExperts,
    hidden_experts,
    reshard_layers,
)
from moe_runtime.research.hecate.sparse import SparseMaterialisation, sparse_expert_parallel

__all__ = [
    "CopyRules",
    "SparseExperts",
    "SparseMaterialisation",
    "hidden_experts",
    "reshard_layers",
    "sparse_expert_parallel",
]
