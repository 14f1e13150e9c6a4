"""Block-sparse products: sampled dense-dense (`sdd`), and sparse-dense both ways (`dsd`, `dds`)."""

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
