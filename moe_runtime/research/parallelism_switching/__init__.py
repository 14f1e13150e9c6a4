"""The degree of expert slicing chosen anew for every batch (Tutel)."""

from moe_runtime.research.parallelism_switching.adaptive import AdaptiveParallelism, cheapest_degree
from moe_runtime.research.parallelism_switching.switching import SwitchingExperts

__all__ = ["AdaptiveParallelism", "SwitchingExperts", "cheapest_degree"]
