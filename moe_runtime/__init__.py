"""Run Mixture-of-Experts models whose experts do not fit in memory.

`load` returns an ordinary `transformers` model whose routed experts are read from the
checkpoint on demand and kept in a cache of bounded size.

Importing this package is cheap: public names are resolved on first use, so neither torch nor
transformers is imported before it is needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    from moe_runtime.layer import MoELayer as MoELayer
    from moe_runtime.training.offload.offloading import offload_training as offload_training

__version__ = "0.1.0"

# Public name -> the module that defines it.
_MODULES = {
    "AdamW": "moe_runtime.training.offload.adamw",
    "CapacityError": "moe_runtime.errors",
    "CheckpointError": "moe_runtime.errors",
    "MoELayer": "moe_runtime.layer",
    "MoERuntimeError": "moe_runtime.errors",
    "UnsupportedModelError": "moe_runtime.errors",
    "UnsupportedUseError": "moe_runtime.errors",
    "register_with_transformers": "moe_runtime.inference.hugging_face.backend",
    "load": "moe_runtime.inference.loading",
    "offload_training": "moe_runtime.training.offload.offloading",
    # of research, found here too
    "ZerothOrder": "moe_runtime.research.zeroth_order",
    "offload_zeroth_order": "moe_runtime.research.zeroth_order",
}

__all__ = [
    "AdamW",
    "CapacityError",
    "CheckpointError",
    "MoELayer",
    "MoERuntimeError",
    "UnsupportedModelError",
    "UnsupportedUseError",
    "load",
    "offload_training",
    "register_with_transformers",
]


def __getattr__(name: str) -> Any:
    """Import the module that defines a public name when the name is first used (PEP 562)."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Names offered by completion: what is loaded already, and the lazy public names."""
    return sorted({*globals(), *__all__})
