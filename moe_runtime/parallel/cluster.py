"""Cost model of a cluster: links by latency and bandwidth (alpha-beta), compute by rates."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Share of the latency below which the bytes of the largest message are noise.
_LEAST_SHARE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Cost of sending for a rank: `alpha_s` a message and `1 / bytes_per_s` a byte.

    With `occupies_compute` moving bytes takes the rank's processor, as gloo's copies do on a
    machine with no core to spare; then nothing overlaps.
    """

    alpha_s: float
    bytes_per_s: float
    occupies_compute: bool = False

    def __post_init__(self) -> None:
        if not (self.alpha_s >= 0 and self.bytes_per_s > 0):
            raise ValueError(
                "alpha_s must not be negative and bytes_per_s must be positive, "
                f"got {self.alpha_s} and {self.bytes_per_s}"
            )

    def seconds(self, num_messages: float, num_bytes: npt.ArrayLike) -> np.ndarray:
        """Time of messages with these bytes together."""
        return num_messages * self.alpha_s + np.asarray(num_bytes) / self.bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Ranks, the links between them (inside a machine and between machines), and their rates.

    Attributes:
        launch_s: fixed cost of each call of the expert computation.
        copy_bytes_per_s: bytes read and written a second by sorting and combining rows.
        processors_per_node: ranks of a machine that compute at the same time, where ranks share
            processors; None for all of them.
        memory_bytes: of a rank; `memory_bytes_per_s` and `disk_bytes_per_s` are those at which it
            reads weights.
        host_bytes_per_s: between a rank's memory and that of its host, each direction; None if
            activations do not leave the rank.
    """

    num_ranks: int
    ranks_per_node: int
    intra: Link
    inter: Link
    flops_per_s: float
    launch_s: float = 0.0
    copy_bytes_per_s: float = float("inf")
    processors_per_node: int | None = None
    memory_bytes: float = float("inf")
    memory_bytes_per_s: float = float("inf")
    disk_bytes_per_s: float = float("inf")
    host_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.ranks_per_node < 1:
            raise ValueError(
                f"need ranks and ranks per node, got {self.num_ranks} and {self.ranks_per_node}"
            )
        if self.num_ranks > self.ranks_per_node and self.num_ranks % self.ranks_per_node:
            raise ValueError(
                f"{self.num_ranks} ranks do not divide into nodes of {self.ranks_per_node}"
            )
        rates = (self.flops_per_s, self.copy_bytes_per_s, self.memory_bytes)
        rates += (self.memory_bytes_per_s, self.disk_bytes_per_s)
        rates += () if self.host_bytes_per_s is None else (self.host_bytes_per_s,)
        if not (min(rates) > 0 and self.launch_s >= 0):
            raise ValueError("rates must be positive and launch_s must not be negative")
        if self.processors_per_node is not None and self.processors_per_node < 1:
            raise ValueError(
                f"processors_per_node must be at least 1, got {self.processors_per_node}"
            )

    @property
    def local_ranks(self) -> int:
        return min(self.num_ranks, self.ranks_per_node)

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.local_ranks

    def processor_of(self, rank: int) -> int:
        """The processor of a rank, by the number of the first rank that computes on it."""
        node, local = divmod(rank, self.local_ranks)
        return node * self.local_ranks + local % (self.processors_per_node or self.local_ranks)


def fit_link(
    message_bytes: npt.ArrayLike, seconds: npt.ArrayLike, *, occupies_compute: bool = False
) -> Link:
    """The link that fits timed messages best: least sum of relative deviations, which a minority of
    late messages does not shift. Neither alpha nor beta is negative.

    Args:
        message_bytes: `[N]` sizes, at least two different ones.
        seconds: `[N]` time of one message of each size.
    """
    sizes = np.asarray(message_bytes, dtype=np.float64)
    times = np.asarray(seconds, dtype=np.float64)
    if sizes.shape != times.shape or sizes.ndim != 1 or len(np.unique(sizes)) < 2:
        raise ValueError("needs the times of at least two different sizes")
    if not (np.isfinite(times).all() and times.min() > 0):
        raise ValueError("times must be positive")
    if sizes.min() < 0:
        raise ValueError(f"sizes must not be negative, got {sizes.min():g}")
    # The best line passes through two of the points, or through one and has no latency or no cost
    # of bytes. Relative deviations give weight to small messages, which determine alpha.
    one, other = np.nonzero(sizes[:, None] < sizes)
    slopes_C = (times[other] - times[one]) / (sizes[other] - sizes[one])
    is_some = sizes > 0
    slopes_C = np.concatenate([slopes_C, times[is_some] / sizes[is_some], np.zeros_like(times)])
    alphas_C = np.concatenate(
        [times[one] - slopes_C[: len(one)] * sizes[one], np.zeros(is_some.sum()), times]
    )
    deviations_C = np.abs((alphas_C[:, None] + slopes_C[:, None] * sizes) / times - 1).sum(axis=1)
    deviations_C[(alphas_C < 0) | (slopes_C < 0)] = np.inf
    best = np.argmin(deviations_C)
    per_byte = max(slopes_C[best], _LEAST_SHARE * alphas_C[best] / sizes.max())
    return Link(
        alpha_s=float(alphas_C[best]),
        bytes_per_s=1 / float(per_byte),
        occupies_compute=occupies_compute,
    )
