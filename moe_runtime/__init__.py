"""Run Mixture-of-Experts models whose experts do not fit in memory.

`load` returns an ordinary `transformers` model whose routed experts are read from the checkpoint on
demand and kept in a cache of bounded size. Public names are imported on first use.
"""

from typing import TYPE_CHECKING

from moe_runtime.lazy import lazy_names

if TYPE_CHECKING:
    from moe_runtime.errors import CapacityError as CapacityError
    from moe_runtime.errors import CheckpointError as CheckpointError
    from moe_runtime.errors import MoERuntimeError as MoERuntimeError
    from moe_runtime.errors import UnsupportedModelError as UnsupportedModelError
    from moe_runtime.errors import UnsupportedUseError as UnsupportedUseError
    from moe_runtime.inference.hugging_face.backend import (
        register_with_transformers as register_with_transformers,
    )
    from moe_runtime.inference.loading import load as load
    from moe_runtime.inference.routing_replay import decode_routing as decode_routing
    from moe_runtime.inference.routing_replay import replay_routing as replay_routing
    from moe_runtime.layer import MoELayer as MoELayer
    from moe_runtime.training.offload.adamw import AdamW as AdamW
    from moe_runtime.training.offload.entry import offload_training as offload_training
else:
    __getattr__ = lazy_names(
        __name__,
        {
            ".errors": "CapacityError CheckpointError MoERuntimeError UnsupportedModelError "
            "UnsupportedUseError",
            ".inference.hugging_face.backend": "register_with_transformers",
            ".inference.loading": "load",
            ".inference.routing_replay": "decode_routing replay_routing",
            ".layer": "MoELayer",
            ".training.offload.entry": "offload_training",
            ".training.offload.adamw": "AdamW",
            ".research.zeroth_order": "ZerothOrder offload_zeroth_order",  # not in `__all__`
        },
    )

__version__ = "0.1.0"

__all__ = [
    "AdamW",
    "CapacityError",
    "CheckpointError",
    "MoELayer",
    "MoERuntimeError",
    "UnsupportedModelError",
    "UnsupportedUseError",
    "decode_routing",
    "load",
    "offload_training",
    "register_with_transformers",
    "replay_routing",
]


def __dir__() -> list[str]:
    """Names for completion: loaded names and lazy public names."""
    return sorted({*globals(), *__all__})
