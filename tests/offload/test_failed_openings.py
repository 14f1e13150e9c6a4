"""A step of `offload_training` that fails leaves no file open and no thread running."""

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from accelerator import NAME
from computing_devices import computing_on
from offloaded_models import budget_for, stack

import moe_runtime
from moe_runtime.training.offload import activations as activation_swap
from moe_runtime.training.offload import disk, entry, record_store


class Struck(RuntimeError):
    """The failure of a step."""


def fail(*_: Any, **__: Any) -> None:
    raise Struck


def second_time(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that works once."""
    calls = [0]

    def called(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return call(*args, **kwargs) if calls[0] == 1 else fail()

    return called


STEPS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "a file of records": (disk.RecordFile, "_grow", lambda _: fail),
    "the threads of the disk": (disk, "ReadQueue", lambda _: fail),
    "memory for records": (entry, "RecordStore", lambda _: fail),
    "the link": (entry, "open_link", lambda _: fail),
    "first weights": (record_store.RecordStore, "write_state", second_time),
    "their versions": (record_store.RecordStore, "commit", lambda _: fail),
    "the file of the swap": (activation_swap, "RecordFile", lambda _: fail),
    "the swap": (entry, "ActivationSwap", lambda _: fail),
    "the policy of activations": (entry, "ActivationPolicy", lambda _: fail),
    "saves that refuse": (entry, "require_whole_saves", lambda _: fail),
    "the handle": (entry, "OffloadedTraining", lambda _: fail),
}


def open_files() -> set[str]:
    """Paths of this process's open files."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return found


@pytest.mark.parametrize("name", ["cpu", NAME])
@pytest.mark.parametrize("step", STEPS)
def test_everything_that_was_opened_is_closed(tmp_path, monkeypatch, step, name):
    owner, attribute, broken = STEPS[step]
    settings = moe_runtime.AdamW()
    with computing_on(NAME) as place:
        model = stack(impl="torch", num_layers=2, num_experts=4)
        budget = budget_for(model, settings, experts_in_memory=0.5) + 2**18
        model = model if name == "cpu" else model.to(place)
        before = {thread.ident for thread in threading.enumerate()}
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, broken(getattr(owner, attribute)))
            with pytest.raises(Struck):
                moe_runtime.offload_training(
                    model, host_memory=budget, activation_memory=2**16, storage_dir=tmp_path,
                    optimizer=settings, activations="swap", update_stride=None,
                )  # fmt: skip
        assert not [path for path in open_files() if path.startswith(str(tmp_path))]
        assert {thread.ident for thread in threading.enumerate()} == before
        assert not list(tmp_path.glob("activations.scratch"))
