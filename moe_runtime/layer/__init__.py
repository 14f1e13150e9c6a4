"""The drop-in Mixture-of-Experts layer."""

from moe_runtime.layer.activations import ACTIVATIONS
from moe_runtime.layer.aux import LayerAux
from moe_runtime.layer.experts import Experts, HeterogeneousExperts, SharedExperts, ZeroExperts
from moe_runtime.layer.moe import MoELayer
from moe_runtime.layer.scmoe import ScMoEBlock, ScMoEParts
from moe_runtime.layer.state import export_state, import_state

__all__ = [
    "ACTIVATIONS",
    "Experts",
    "HeterogeneousExperts",
    "LayerAux",
    "MoELayer",
    "ScMoEBlock",
    "ScMoEParts",
    "SharedExperts",
    "ZeroExperts",
    "export_state",
    "import_state",
]
