"""Which tokens each step sees: a function of the seed and of how many windows came before.

Every source is cut into windows; an epoch visits each once, in an order of its own, with the cuts
moved by a random offset, so that no token is always last. Sources take turns by weight.

Shapes: N windows, C tokens of context.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_runtime.training.data.tokens import Ids, TokenStreams
from moe_runtime.training.run_config import DataConfig, LoopConfig


class WindowStream:
    """The windows of one source, epoch after epoch.

    Args:
        ids: the token stream.
        context: C; a window is C + 1 tokens, inputs and targets overlap.
        seed: seed of the orders; different for each source.

    Raises:
        ValueError: the stream is shorter than a window.
    """

    def __init__(self, ids: Ids, *, context: int, seed: Sequence[int]) -> None:
        if len(ids) < context + 1:
            raise ValueError(
                f"expected at least {context + 1} tokens (context and the token after it), "
                f"got {len(ids)}"
            )
        self._ids = ids
        self._context = context
        self._seed = tuple(seed)
        # With any offset below C the last window must still be whole.
        self.windows_per_epoch = max(1, (len(ids) - context) // context)
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._offset = 0

    def window(self, number: int) -> npt.NDArray[np.int64]:
        """The window of this number, counted over all epochs: `[C + 1]` ids."""
        epoch, place = divmod(number, self.windows_per_epoch)
        self._begin(epoch)
        start = self._offset + int(self._order[place]) * self._context
        return self._ids[start : start + self._context + 1].astype(np.int64)

    def _begin(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        random = np.random.default_rng([*self._seed, epoch])
        spare = len(self._ids) - self.windows_per_epoch * self._context - 1
        self._offset = int(random.integers(min(spare, self._context - 1) + 1))
        self._order = random.permutation(self.windows_per_epoch)
        self._epoch = epoch


@dataclass(frozen=True, slots=True)
class DataPosition:
    """How far a run has come in its data: windows taken from each source."""

    taken: tuple[int, ...]


class Batches:
    """Windows of all sources, mixed by weight.

    The next window is of the source that is furthest behind its share; equal ones in the order
    given. No randomness decides it, so the mixture is exact after every step.

    Args:
        streams: token streams by source name.
        weights: share of each source, by name; a source without one (0) counts by its size. Either
            all sources have a weight or none.
        context: tokens that a window predicts.
        seed: seed of the orders.

    Raises:
        ValueError: a source is too short, or only some sources have a weight.
    """

    def __init__(
        self,
        streams: Mapping[str, Ids],
        weights: Mapping[str, float],
        *,
        context: int,
        seed: int,
    ) -> None:
        weighted = [name for name in streams if weights.get(name, 0) > 0]
        if weighted and len(weighted) < len(streams):
            missing = next(name for name in streams if name not in weighted)
            raise ValueError(
                f"source {missing!r} has no weight while {weighted[0]!r} has one; give every "
                "source a weight, or none to mix them by size"
            )
        self._windows: list[WindowStream] = []
        for number, (name, ids) in enumerate(streams.items()):
            try:
                self._windows.append(WindowStream(ids, context=context, seed=(seed, number)))
            except ValueError as error:
                raise ValueError(f"source {name!r} is too short: {error}") from None
        shares = [weights[name] if weighted else len(ids) for name, ids in streams.items()]
        self._shares = [share / sum(shares) for share in shares]
        self._taken = [0] * len(self._windows)

    @property
    def position(self) -> DataPosition:
        """How far the batches have come."""
        return DataPosition(tuple(self._taken))

    def seek(self, position: DataPosition) -> None:
        """Goes on from a position.

        Raises:
            ValueError: it counts another number of sources.
        """
        if len(position.taken) != len(self._windows):
            raise ValueError(
                f"expected the position of {len(self._windows)} sources, got {len(position.taken)}"
            )
        self._taken = list(position.taken)

    @property
    def windows_per_epoch(self) -> int:
        """Windows of all sources together, each once."""
        return sum(stream.windows_per_epoch for stream in self._windows)

    def draw(self, num_windows: int) -> npt.NDArray[np.int64]:
        """The next windows, `[N, C + 1]` ids."""
        return np.stack([self._next() for _ in range(num_windows)])

    def _next(self) -> npt.NDArray[np.int64]:
        total = sum(self._taken) + 1
        behind = [
            share * total - taken for share, taken in zip(self._shares, self._taken, strict=True)
        ]
        source = behind.index(max(behind))
        window = self._windows[source].window(self._taken[source])
        self._taken[source] += 1
        return window


def shorten(windows: npt.NDArray[np.int64], context: int) -> npt.NDArray[np.int64]:
    """Cuts windows into shorter ones that predict the same tokens.

    Args:
        windows: `[N, C + 1]`.
        context: c, a divisor of C.

    Returns:
        `[N * C / c, c + 1]`; neighbours share the token at which they were cut.
    """
    full = windows.shape[1] - 1
    starts = np.arange(0, full, context)
    columns = starts[:, None] + np.arange(context + 1)
    return windows[:, columns].reshape(-1, context + 1)


def held_out_windows(ids: Ids, *, context: int, most_tokens: int) -> npt.NDArray[np.int64]:
    """Consecutive windows of held-out text, each token predicted at most once: `[N, C + 1]`.

    Fewer than `context + 1` tokens give no window.
    """
    num_windows = min(max(0, len(ids) - 1) // context, max(1, most_tokens // context))
    starts = np.arange(num_windows) * context
    columns = starts[:, None] + np.arange(context + 1)
    return ids[columns.reshape(-1)].astype(np.int64).reshape(num_windows, context + 1)


def windows_of(
    streams: Mapping[str, TokenStreams], config: LoopConfig
) -> tuple[Batches, dict[str, npt.NDArray[np.int64]]]:
    """What a run trains on, and held-out windows by source."""
    batches = Batches(
        {name: stream.training for name, stream in streams.items()},
        {name: source.weight for name, source in config.data.sources.items()},
        context=config.data.context,
        seed=config.run.seed,
    )
    held_out = {
        name: held_out_windows(
            stream.held_out, context=config.data.context, most_tokens=config.run.evaluate_tokens
        )
        for name, stream in streams.items()
    }
    return batches, held_out


def check_groups(
    num_groups: int, data: DataConfig, held_out: Mapping[str, npt.NDArray[np.int64]]
) -> None:
    """Refuses groups of tokens (GShard) that would not divide some batch of the run.

    Args:
        num_groups: into which a batch is divided.
        data: how batches are made.
        held_out: windows by source, which are measured in batches as large and a smaller last one.

    Raises:
        ValueError: the number does not divide the tokens of a batch, which is named.
    """
    rows = data.windows_per_micro_batch
    batches = {"a micro-batch": rows}
    for name, windows in held_out.items():
        batches[f"the last part of the held-out text of {name!r}"] = len(windows) % rows
    for what, num_windows in batches.items():
        num_tokens = num_windows * data.context
        if num_tokens % num_groups:
            raise ValueError(
                f"num_groups ({num_groups}) must divide the {num_tokens} tokens of {what}; "
                f"a divisor of data.context ({data.context}) always does"
            )
