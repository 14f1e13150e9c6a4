"""Asserts of the test files, rewritten once for all processes of a test run.

Each process imports every test file, and pytest would rewrite it in each of them: half of what
collecting takes. Here each rewrites a share of them first, and finds those of the others where
pytest looks for what an earlier run has left.
"""

from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def rewrite_share(config: pytest.Config, share: int, num_shares: int) -> None:
    """Rewrites the test files that belong to one of the processes, where nobody has yet."""
    state = config.stash[rewrite.assertstate_key]
    tops = {Path(word.split("::")[0]) for word in config.args}
    found = sorted(path.resolve() for top in tops for path in top.rglob("test_*.py"))
    for path in found[share::num_shares]:
        folder = rewrite.get_cache_dir(path)
        kept = folder / (path.stem + rewrite.PYC_TAIL)
        if rewrite.try_makedirs(folder) and rewrite._read_pyc(path, kept) is None:
            origin, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, origin, kept)
