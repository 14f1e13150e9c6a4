"""The options of ``load``: their types, names, and which of them go together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from moe_runtime.config import (
    ACTIVATIONS,
    CACHE_CODES,
    KV_CACHES,
    MISSES,
    SHARES,
    STAND_IN,
    check_draft,
    require_known,
)
from moe_runtime.inference.lossy import LossyRules
from moe_runtime.policies.eviction import require_live
from moe_runtime.policies.prediction import check_name, is_file_name

AUTO = "auto"
_NONE = type(None)
TYPES: dict[str, tuple[type, ...]] = {
    "path_or_id": (str, Path),
    "device": (str, int, torch.device),
    "dtype": (str, torch.dtype),
    **dict.fromkeys(("policy", "prefetch", "shares", "cache_code", "kv_cache"), (str,)),
    **dict.fromkeys(("activations", "misses", "routing"), (str,)),
    "skip_below": (float, int),
    **dict.fromkeys(("predictor", "draft"), (str, Path)),
    **dict.fromkeys(("trace", "timeline", "placement", "adapter"), (str, Path, _NONE)),
    "max_tokens": (int, _NONE),
    "io_threads": (int,),
    **dict.fromkeys(("warm_up", "teach"), (bool,)),
    "progress": (cast("type", Callable), _NONE),
}


def check_names(
    policy: str,
    shares: str,
    predictor: str | Path,
    cache_code: str,
    activations: str = "exact",
    kv_cache: str = "exact",
) -> None:
    """Refuses unknown names, before anything is loaded. Raises CheckpointError: the predictor's
    file is missing, or is not a predictor. Raises ValueError: no policy, predictor, code, kind of
    shares, of activations or of KV cache has the name."""
    require_live(policy)
    require_known("shares", shares, SHARES)
    require_known("cache_code", cache_code, CACHE_CODES)
    require_known("activations", activations, ACTIVATIONS)
    require_known("kv_cache", kv_cache, KV_CACHES)
    if predictor != AUTO:
        if is_file_name(predictor):
            from moe_runtime.lab.traces.learned import read_predictor_signature

            read_predictor_signature(predictor)
        else:
            check_name(str(predictor))


def check_place(
    place: torch.device,
    rules: LossyRules,
    draft: str | Path,
    misses: str,
    trace: str | Path | None,
    kv_cache: str,
    *,
    is_alone: bool,
) -> None:
    """Refuses options that models on this device, or experts divided among processes, do not have,
    and pairs that contradict each other. Raises ValueError: one of these, or a name is unknown."""
    check_draft(draft)
    require_known("misses", misses, MISSES)
    given = dict.fromkeys(rules.named, "cpu")
    if draft != "none":
        given[f"draft {draft}"] = "cpu"
    if kv_cache != "exact":
        given[f"kv_cache {kv_cache}"] = "cpu"
    if misses not in ("device", STAND_IN):
        given[f"misses {misses}"] = "cuda"
    kinds = {"cpu": "the CPU", "cuda": "a GPU"}
    for name, kind in given.items():
        if place.type != kind:
            raise ValueError(
                f"{name} is for models on {kinds[kind]}, got the device {place}: leave it out"
            )
        if not is_alone:
            raise ValueError(f"{name} is for one process: leave it out, or group and placement")
    if draft != "none" and rules.named:
        raise ValueError(
            f"draft {draft} changes no text, and what {' and '.join(rules.named)} changes depends "
            "on the drafts: leave one of them out"
        )
    if draft != "none" and trace is not None:
        raise ValueError(
            f"draft {draft} computes tokens that a trace must not have: leave one of the two out"
        )
