"""Transforms of torch that cannot follow a loaded model, refused before anything is computed."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from moe_runtime.errors import UnsupportedUseError

_FUNCTORCH: Any = torch._C._functorch  # type: ignore[attr-defined]
_INSTEAD = {
    "Vmap": "call it on a batch",
    "Grad": "use backward() or torch.autograd.grad",
    "Jvp": "use backward() or torch.autograd.grad",
}
"""By torch's name of a transform, what to do in its place."""

_TRACING_MODES = tuple(torch._C._TorchDispatchModeKey.__members__.values())  # type: ignore[attr-defined]
"""Under which torch passes around tensors without content."""


def require_plain_call() -> None:
    """Refuses a call whose tensors have no content that a kernel could read.

    Raises:
        UnsupportedUseError: torch traces, or a transform of ``torch.func`` is under way.
    """
    if torch._C._get_tracing_state() is not None:
        refuse_tracing("torch.jit.trace")
    if any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING_MODES):
        refuse_tracing("a tracer of torch (make_fx, fake tensors)")
    transform = _FUNCTORCH.peek_interpreter_stack()
    if transform is not None:
        name = transform.key().name
        instead = _INSTEAD.get(name, "call it outside of the transform")
        raise UnsupportedUseError(
            f"torch.func cannot transform a loaded model ({name.lower()}), since its experts come "
            f"and go: {instead}"
        )


def refuse_tracing(who: str) -> NoReturn:
    """Says that no graph of a loaded model can be made.

    Raises:
        UnsupportedUseError: always.
    """
    raise UnsupportedUseError(
        f"{who} cannot follow a loaded model, since its experts come and go: use torch.compile, "
        "which makes graphs between them, or give it the model that from_pretrained of "
        "transformers has in memory"
    )
