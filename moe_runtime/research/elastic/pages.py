"""Experts as pages: each in memory of its own, found by a table.

Which experts a rank holds can change while it computes: pages arrive beside those in use, the table
is turned, and what is no longer wanted is given back. A page that stays is neither moved nor copied
(ElasticMoE's remap of virtual pages; here the kernels take the address of each expert). It is no
cache: the placement says which experts are here, and none is evicted or fetched on demand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.inference.expert_weights import bind_weights
from moe_runtime.kernels.expert_mlp import ExpertWeights
from moe_runtime.memory.slab import aligned_bytes
from moe_runtime.memory.source import ExpertSource
from moe_runtime.types import ExpertKey


class ExpertPages:
    """The experts that one rank holds.

    Attributes:
        num_bytes: of all pages in use.
        peak_bytes: the most that pages took, with those that arrive while the old ones still serve.
    """

    def __init__(self, experts: ExpertMap) -> None:
        """Starts without a page."""
        self._layouts = experts.layouts
        self._bind = bind_weights(experts)
        self._pages: dict[ExpertKey, torch.Tensor] = {}
        self._weights: dict[ExpertKey, ExpertWeights] = {}
        self.num_bytes = 0
        self.peak_bytes = 0

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._pages

    def page(self, key: ExpertKey) -> torch.Tensor:
        """The bytes of an expert that is here: ``uint8``."""
        return self._pages[key]

    def weights(self, key: ExpertKey) -> ExpertWeights:
        """An expert that is here, as the kernels take it."""
        return self._weights[key]

    def allocate(self, key: ExpertKey) -> torch.Tensor:
        """Memory for an expert that is to arrive: ``uint8``; ``switch_epoch`` puts it into use.

        Raises:
            CapacityError: the memory cannot be had.
        """
        return aligned_bytes(self._layouts[key].slot_bytes)

    def read(self, keys: Collection[ExpertKey]) -> dict[ExpertKey, torch.Tensor]:
        """Reads experts from the checkpoint into new pages, which ``switch_epoch`` puts into use.

        Raises:
            CheckpointError: one cannot be read.
            CapacityError: the memory cannot be had.
        """
        if not keys:
            return {}
        source = ExpertSource({key: self._layouts[key] for key in keys})
        try:
            pages = {key: self.allocate(key) for key in keys}
            source.read(pages)
        finally:
            source.close()
        return pages

    def switch_epoch(
        self, keys: Collection[ExpertKey], arrivals: Mapping[ExpertKey, torch.Tensor]
    ) -> None:
        """Makes these experts the ones that are here; the memory of all others is given back.

        Raises:
            ValueError: one of them is neither here nor among the arrivals; then nothing changes.
        """
        wanted = set(keys)
        missing = wanted - self._pages.keys() - arrivals.keys()
        if missing:
            raise ValueError(f"{len(missing)} experts have not arrived, {min(missing)} among them")
        coming = {key: page for key, page in arrivals.items() if key not in self._pages}
        arriving_bytes = sum(page.numel() for page in coming.values())
        self.peak_bytes = max(self.peak_bytes, self.num_bytes + arriving_bytes)
        for key in coming.keys() & wanted:
            self._pages[key] = coming[key]
            self._weights[key] = self._bind(key, coming[key])
        for key in self._pages.keys() - wanted:
            del self._pages[key], self._weights[key]
        self.num_bytes = sum(page.numel() for page in self._pages.values())
