"""How often the first, second, ... of a list of guesses was right lately."""

PRIOR = 8.0
"""Lists of all layers together that weigh as much as one of the layer's own."""
REMEMBERED = 0.97
"""Weight that a list keeps with each further one of its layer: the last thirty or so count."""


class RankRecord:
    """Turns an order of experts into probabilities, by how right such orders were.

    A score that is not a probability still orders experts. How often the expert of each rank was
    visited is counted while the model runs, for each layer and distance; layers that have said
    little yet borrow from the others.

    Args:
        num_layers: layers of the model.
        num_ranks: length of the lists.
        top_k: experts that a token visits: where nothing is known, so many are believed.
    """

    def __init__(self, num_layers: int, num_ranks: int, top_k: int) -> None:
        self._all = [PRIOR * believed for believed in believed_at_first(num_ranks, top_k)]
        self._all_lists = PRIOR
        self._right = [[0.0] * num_ranks for _ in range(num_layers)]
        self._lists = [0.0] * num_layers

    def probabilities(self, layer: int) -> list[float]:
        """The share of visited experts at each rank of a layer's lists."""
        scale = PRIOR / self._all_lists
        total = self._lists[layer] + PRIOR
        right = zip(self._right[layer], self._all, strict=True)
        return [(own + scale * every) / total for own, every in right]

    def judge(self, layer: int, hits: list[bool]) -> None:
        """Takes note of which experts of a list were visited, rank by rank."""
        own, every = self._right[layer], self._all
        for rank, hit in enumerate(hits):
            own[rank] = own[rank] * REMEMBERED + hit
            every[rank] = every[rank] * REMEMBERED + hit
        self._lists[layer] = self._lists[layer] * REMEMBERED + 1.0
        self._all_lists = self._all_lists * REMEMBERED + 1.0


def believed_at_first(num_ranks: int, top_k: int) -> list[float]:
    """The probability of each rank while nothing is known: the first K are believed."""
    return [1.0 if rank < top_k else 0.0 for rank in range(num_ranks)]
