"""A lost stage of a pipeline out of the stages beside it, without a copy of it anywhere.

Each tensor of its layers becomes a mean of the same one in the nearest layers that are left; those
are weighted by how large their gradients were, and moments begin anew. The gradients' norm is that
of AdamW's first moments, which a snapshot has.

Source: Blagoev et al., "All is Not Lost: LLM Recovery without Checkpoints" (CheckFree, 2025).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_runtime.training.ranks import OneRank

_LAYER = re.compile(r"^(.*\bblocks\.)(\d+)(\..*)$")
_MODEL, _GRADIENT = "model.", "exp_avg."
_LEAST_NORM = 1e-4


class LostStage:
    """Tensors of a snapshot that no machine has, and where they are taken from.

    Args:
        lost: names of tensors, all of one run of layers.
        names: all names of the snapshot.

    Raises:
        ValueError: something of them is at an end of the model, or its neighbours differ from it.
    """

    def __init__(self, lost: Collection[str], names: Collection[str]) -> None:
        found = {name: _LAYER.match(name) for name in lost}
        layers = sorted({int(match[2]) for match in found.values() if match})
        kept = [int(match[2]) for match in map(_LAYER.match, names) if match]
        if None in found.values() or not layers or {min(kept), max(kept)} & {layers[0], layers[-1]}:
            raise ValueError("the first or last stage is lost, with the embedding")
        before, after = layers[0] - 1, layers[-1] + 1
        if layers != list(range(before + 1, after)):
            raise ValueError("more than one stage is lost")
        self.names = frozenset(lost)
        self._sources = {
            name: tuple(f"{match[1]}{layer}{match[3]}" for layer in (before, after))
            for name, match in found.items()
            if match
        }
        missing = {source for pair in self._sources.values() for source in pair} - set(names)
        if missing:
            raise ValueError(f"the layers beside it differ from it: there is no {min(missing)}")

    def beside(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Memory for what the lost tensors of this process are made from, by name."""
        pairs = [
            (name, source) for name in self.names & own.keys() for source in self._sources[name]
        ]
        return {source: torch.zeros_like(own[n]) for n, source in pairs if source not in own}

    @torch.no_grad()
    def fill(self, own: Mapping[str, Tensor], beside: Mapping[str, Tensor], ranks: OneRank) -> None:
        """Makes the lost tensors out of what was read; a collective call."""
        beside = {**beside, **own}
        squares = [0.0, 0.0]
        for name in self.names & own.keys():
            if name.startswith(_GRADIENT):
                for place, source in enumerate(self._sources[name]):
                    squares[place] += float(_local(beside[source]).double().square().sum())
        parts = [json.loads(text) for text in ranks.texts(json.dumps(squares))]
        first, second = (
            sum(part[place] for part in parts) ** 0.5 + _LEAST_NORM for place in (0, 1)
        )
        share = first / (first + second)
        for name in self.names & own.keys():
            before, after = (_local(beside[source]) for source in self._sources[name])
            target = _local(own[name])
            if not name.startswith(_MODEL):
                target.zero_()
            elif target.is_floating_point():
                target.copy_(share * before + (1 - share) * after)
            else:
                target.copy_(before)


def lost_tensors(path: Path, files: Collection[str]) -> tuple[set[str], set[str]]:
    """Names of the tensors of a snapshot that are (partly) in files that are lost, and of all."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    stored = FileSystemReader(path).read_metadata().storage_data or {}
    lost = {index.fqn for index, info in stored.items() if info.relative_path in files}
    return lost, {index.fqn for index in stored}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
