"""Slots that have their memory before the first expert is read into them.

The first write to a page of fresh memory waits for the system to find and clear it, which in a
virtual machine may take longer than reading a page's worth from a disk.
"""

import contextlib
import threading
from collections.abc import Iterator

from moe_runtime.kernels.native.pages import populate
from moe_runtime.memory.slab import Slab

PART_BYTES = 16 * 2**20
"""Asked for at once: more would keep whoever is done waiting, less would make many calls."""


@contextlib.contextmanager
def touched_meanwhile(slab: Slab) -> Iterator[None]:
    """Takes memory for a host slab's slots, in the order of their use, while something else runs.

    As much as that leaves time for: when the block ends, however it ends, nothing more is taken.
    """
    stop = threading.Event()
    thread = threading.Thread(target=_touch, args=(slab, stop), name="moe-touch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _touch(slab: Slab, stop: threading.Event) -> None:
    for part in slab.parts(PART_BYTES):
        if stop.is_set() or not populate(part):
            return
