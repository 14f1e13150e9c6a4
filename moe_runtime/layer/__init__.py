"""The drop-in Mixture-of-Experts layer."""

from moe_runtime.layer.aux import LayerAux
from moe_runtime.layer.experts import Experts, SharedExperts
from moe_runtime.layer.moe import MoELayer
from moe_runtime.layer.zero import ZeroExperts

__all__ = ["Experts", "LayerAux", "MoELayer", "SharedExperts", "ZeroExperts"]
