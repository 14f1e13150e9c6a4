"""What a run asks of the machine, refused early where it is not there."""

import shutil

import torch


def resolve_device(name: str) -> torch.device:
    """The device of `run.device`.

    Raises:
        ValueError: there is none of that name here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"run.device must be auto, cpu, cuda or cuda:N, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"run.device is {name!r}, but torch sees no CUDA device here")
    return device


def require_compiler(device: torch.device) -> None:
    """Refuses early what `torch.compile` would say in the first step, at length."""
    if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise ValueError(
            "run.compile needs a C++ compiler on the CPU (g++ or clang++), and none is on the "
            "PATH; install one, or set run.compile = false"
        )


def autocast_of(precision: str, device_type: str) -> torch.autocast:
    """The context in which a run's matrix products have its `run.precision`."""
    return torch.autocast(device_type, dtype=torch.bfloat16, enabled=precision == "bfloat16")
