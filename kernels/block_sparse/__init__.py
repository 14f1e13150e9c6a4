"""Block-sparse matrix products: sampled dense-dense, and sparse-dense either way round."""

from moe_runtime.kernels.block_sparse.op import dds, dsd, sdd
from moe_runtime.kernels.block_sparse.topology import (
    BlockTopology,
    ExpertColumns,
    expert_topology,
)

__all__ = [
    "BlockTopology",
    "ExpertColumns",
    "dds",
    "dsd",
    "expert_topology",
    "sdd",
]
