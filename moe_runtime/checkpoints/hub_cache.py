"""Models in the hub's cache on this disk: what they are, what they take, and how they go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_runtime.checkpoints.hub import gguf_models, label_of, parse_hub_name
from moe_runtime.checkpoints.strict_json import parse_object
from moe_runtime.errors import CheckpointError, blamed_on
from moe_runtime.files import read_bounded

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo

_MAX_CONFIG_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A repository in the cache.

    Attributes:
        name: ``owner/name``.
        revisions: commits, the latest last, with their branches and tags.
        num_bytes: of its files on the disk, and of those that are not whole yet.
        family: ``model_type`` of its configuration; empty where it has none.
        formats: of its weights, such as ``bfloat16``, ``mxfp4`` or ``Q4_K_M``.
        used_s: when a file of it was last read, seconds since the epoch.
        folder: where it lies.
    """

    name: str
    revisions: dict[str, list[str]]
    num_bytes: int
    unfinished_bytes: int
    family: str
    formats: list[str]
    used_s: float
    folder: Path


def cached_models() -> list[CachedModel]:
    """The models in the hub's cache, by name."""
    return [_described(one) for _, one in sorted(_models_of(_scan()).items())]


def damage() -> list[str]:
    """What of the hub's cache cannot be read, a line each; the hub's library leaves it out."""
    cache = _scan()
    return [" ".join(str(one).split()) for one in (() if cache is None else cache.warnings)]


def removal_of(names: list[str]) -> tuple[int, Any]:
    """Bytes that go with models or revisions, and what removes them when it is executed.

    Args:
        names: ``owner/name``, or ``owner/name@REVISION`` for one of several revisions.

    Raises:
        CheckpointError: one of them is not in the cache.
    """
    cache = _scan()
    repos = _models_of(cache)
    commits: set[str] = set()
    for text in names:
        name = parse_hub_name(text)
        if name is None or name.file or name.quantisation:
            raise CheckpointError(f"{text}: expected OWNER/NAME or OWNER/NAME@REVISION")
        if name.repository not in repos:
            there = ", ".join(sorted(repos)) or "no model"
            unread = "; what is damaged is removed by hand: ".join(["", *damage()][:2])
            raise CheckpointError(
                f"{text}: is not in the cache of the hub; there is {there}{unread}"
            )
        revisions = repos[name.repository].revisions
        own = {
            one.commit_hash
            for one in revisions
            if "@" not in text or name.revision in (one.commit_hash, *one.refs)
        }
        if not own:
            known = sorted(ref for one in revisions for ref in (*one.refs, one.commit_hash))
            raise CheckpointError(f"{text}: has no such revision in the cache; there is {known}")
        commits |= own
    assert cache is not None  # it has the names
    strategy = cache.delete_revisions(*commits)
    whole = [repo for repo in repos.values() if repo.repo_path in strategy.repos]
    unfinished_bytes = sum(_described(repo).unfinished_bytes for repo in whole)
    return strategy.expected_freed_size + unfinished_bytes, strategy


def _scan() -> HFCacheInfo | None:
    """What is in the cache; None where nothing was downloaded yet."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None


def _models_of(cache: HFCacheInfo | None) -> dict[str, CachedRepoInfo]:
    repos = () if cache is None else cache.repos
    return {one.repo_id: one for one in repos if one.repo_type == "model"}


def _described(repo: CachedRepoInfo) -> CachedModel:
    revisions = sorted(repo.revisions, key=lambda one: one.last_modified)
    files = {file.file_name: file for one in revisions for file in one.files}
    config: dict[str, Any] = {}
    if "config.json" in files:
        with blamed_on(f"{repo.repo_id}: config.json cannot be read"):
            raw = read_bounded(files["config.json"].file_path, max_bytes=_MAX_CONFIG_BYTES)
            config = parse_object(raw)
    parts = repo.repo_path.glob("blobs/*.incomplete")
    return CachedModel(
        name=repo.repo_id,
        revisions={one.commit_hash: sorted(one.refs) for one in revisions},
        num_bytes=repo.size_on_disk,
        unfinished_bytes=sum(part.stat().st_size for part in parts),
        family=str(config.get("model_type") or ""),
        formats=_formats(config, files),
        used_s=repo.last_accessed,
        folder=repo.repo_path,
    )


def _formats(config: dict[str, Any], files: dict[str, Any]) -> list[str]:
    """What a name on the hub may end with, or how the weights are stored."""
    labels = [label_of(stem) for stem in gguf_models(files)]
    if labels:
        return labels
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    inner = config.get("text_config")
    places = [config, inner] if isinstance(inner, dict) else [config]
    types = [one.get(key) for one in places for key in ("dtype", "torch_dtype")]
    return [one for one in (method, *types) if isinstance(one, str) and one][:1]
