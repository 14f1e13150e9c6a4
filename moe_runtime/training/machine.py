"""What a run asks of the machine, refused early where it is not there."""

import shutil

import torch


def require_compiler(device: torch.device) -> None:
    """Refuses early what `torch.compile` would say in the first step, at length."""
    if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise ValueError(
            "run.compile needs a C++ compiler on the CPU (g++ or clang++), and none is on the "
            "PATH; install one, or set run.compile = false"
        )


def autocast_of(precision: str, device_type: str) -> torch.autocast:
    """The context in which a run's matrix products have its `run.precision`.

    It keeps no narrow copies of weights: torch drops those at the end of the outermost autocast
    alone, and inside of a caller's the next step would compute with weights from before the update.
    """
    return torch.autocast(
        device_type,
        dtype=torch.bfloat16,
        enabled=precision == "bfloat16",
        cache_enabled=False,
    )
