"""`ParallelLayout`: one set of ranks, factorised in two ways (MoE Parallel Folding, Megatron-Core).

Attention and experts use the same ranks with different degrees; only pipeline stages coincide.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

Side = Literal["dense", "expert"]
DENSE_DIMENSIONS = ("tp", "cp", "dp", "pp")
EXPERT_DIMENSIONS = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Degrees of parallelism of attention (dense) and experts over the same ranks.

    Neighbouring ranks differ in the first dimension: tensor parallelism, then context or expert
    parallelism, then data parallelism, then pipeline stages.

    Attributes:
        tp: tensor parallelism of attention; its ranks split the tokens between them (sequence
            parallelism) outside of matrix products.
        cp: context parallelism: parts of one sequence.
        pp: pipeline stages, common to both sides.
        etp: slices of the hidden dimension of an expert.
        ep: parts into which the experts of a layer are divided.
        dp: data parallelism of attention; what is left of the ranks by default.
        edp: copies of each expert; what is left by default.

    Raises:
        ValueError: A product does not match the number of ranks; says which one.
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    etp: int = 1
    ep: int = 1
    dp: int = 0
    edp: int = 0

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "cp", "pp", "etp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        self._fill("dp", ("tp", "cp", "pp"))
        self._fill("edp", ("etp", "ep", "pp"))

    def _fill(self, name: str, others: tuple[str, ...]) -> None:
        given = prod(getattr(self, other) for other in others)
        text = " * ".join(others)
        numbers = " * ".join(str(getattr(self, other)) for other in others)
        if getattr(self, name) == 0:
            if self.world_size % given:
                raise ValueError(
                    f"{text} = {numbers} = {given} does not divide the {self.world_size} ranks"
                )
            object.__setattr__(self, name, self.world_size // given)
        product = given * getattr(self, name)
        if product != self.world_size:
            raise ValueError(
                f"{text} * {name} = {numbers} * {getattr(self, name)} = {product}, but there are "
                f"{self.world_size} ranks; leave {name} out to have it filled in"
            )

    @property
    def loss_parts(self) -> int:
        """Micro-batch parts over which the loss is averaged: `dp * cp`."""
        return self.dp * self.cp

    def degrees(self, side: Side) -> dict[str, int]:
        """Degree of each dimension of a side, the fastest varying first."""
        names = DENSE_DIMENSIONS if side == "dense" else EXPERT_DIMENSIONS
        return {name: getattr(self, name) for name in names}

    def coordinates(self, rank: int, side: Side) -> dict[str, int]:
        """Place of a rank in each dimension of a side."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in 0..{self.world_size - 1}, got {rank}")
        places = {}
        for name, degree in self.degrees(side).items():
            places[name] = rank % degree
            rank //= degree
        return places

    def groups(self, side: Side, *dimensions: str) -> list[list[int]]:
        """The groups of ranks that differ only in the given dimensions of a side, ascending."""
        known = self.degrees(side)
        for name in dimensions:
            if name not in known:
                raise ValueError(
                    f"the {side} side has the dimensions {', '.join(known)}, got {name!r}"
                )
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            places = self.coordinates(rank, side)
            key = tuple(place for name, place in places.items() if name not in dimensions)
            groups.setdefault(key, []).append(rank)
        return list(groups.values())

    def __str__(self) -> str:
        sides = (self.degrees("dense"), self.degrees("expert"))
        return " | ".join(" ".join(f"{n}{d}" for n, d in side.items()) for side in sides)
