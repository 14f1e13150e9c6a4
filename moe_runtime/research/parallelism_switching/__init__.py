"""The degree of expert slicing chosen anew for every batch (Tutel)."""

from moe_runtime.research.parallelism_switching.switching import (
    AdaptiveParallelism,
    SwitchingExperts,
    cheapest_degree,
)

__all__ = ["AdaptiveParallelism", "SwitchingExperts", "cheapest_degree"]
