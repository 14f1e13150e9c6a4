"""Settings of glibc's allocator, each in a process of its own."""

import platform
import subprocess
import sys

import pytest

HOLES = """
import psutil
from moe_runtime import allocator

allocator.use_one_heap()
kept, freed = [], []
for _ in range(1000):  # blocks of a size that is not mapped by itself, each between two that stay
    freed.append(bytearray(b"x" * (2**16 - 64)))
    kept.append(bytearray(b"x" * 1024))
full = psutil.Process().memory_info().rss
freed.clear()
allocator.give_back_free_pages()
print(full - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_free_pages_between_blocks_go_back_to_the_system():
    command = [sys.executable, "-c", HOLES]
    given = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    # a page at either end of a hole may be shared with what stays
    assert given >= 1000 * (2**16 - 3 * 4096)
