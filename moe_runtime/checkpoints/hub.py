"""Checkpoints that are not on this machine yet, or not under the name that was given."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from moe_runtime.checkpoints.strict_json import one_line
from moe_runtime.errors import CheckpointError, blamed_on

# A hub that is there answers within a second; without a limit a dead one is waited for in silence.
_HUB_LIMIT_S = 10.0


def download(repository: str, patterns: Sequence[str]) -> Path:
    """Downloads a repository, as far as it is not here already.

    Args:
        repository: its name on the hub.
        patterns: names of the files that are needed.

    Returns:
        The folder of its files.

    Raises:
        CheckpointError: there is no such repository, or it cannot be reached.
    """
    from huggingface_hub import HfApi, snapshot_download

    unreachable = None
    try:
        # The download itself asks six times, waiting longer each time.
        with blamed_on("the hub"):
            HfApi().model_info(repository, timeout=_HUB_LIMIT_S)
    except CheckpointError as error:
        unreachable = str(error)
    try:
        with blamed_on(repository):
            # What was downloaded before serves where the hub cannot be reached.
            return Path(
                snapshot_download(
                    repository, allow_patterns=[*patterns], local_files_only=bool(unreachable)
                )
            )
    except CheckpointError as error:
        raise CheckpointError(
            f"{one_line(repository)} is neither a directory nor a repository to download: "
            f"{unreachable or error}{suggestion(Path(repository))}"
        ) from None


def suggestion(folder: Path) -> str:
    """The folder beside it whose name is nearest, for the end of a message."""
    try:
        names = [path.name for path in folder.parent.iterdir() if path.is_dir()]
    except OSError:
        return ""
    nearest = difflib.get_close_matches(folder.name, names, n=1)
    return f"; did you mean {folder.parent / nearest[0]}?" if nearest else ""
