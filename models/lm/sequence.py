"""A sequence divided among processes: each has a part of its tokens, in their order.

Tensor and context parallelism divide the tokens of a micro-batch, so that everything between the
products of attention is computed once for each token: Megatron's sequence parallelism (Korthikanti
et al., 2022) within the parts of context parallelism. Attention itself needs the keys and values of
the tokens before: they are gathered over the parts (as for Llama 3, Dubey et al., 2024).

Shapes: B sequences, C tokens of context, c of them here, T = B * C.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from moe_runtime.routing import Routing, ZeroRouting


class SequencePart:
    """The part of each sequence that this process has.

    A token attends to those before it, so the back of a sequence is more work than the front. Where
    a sequence is divided for attention it is therefore folded first: into `2 * folds` chunks, taken
    in turn from the front and from the back, so that every part has as many pairs of tokens
    (the head-tail order of Llama 3's context parallelism and of torch's).

    Args:
        mesh: the processes that divide a sequence, in the order of their parts.
        folds: parts that attention divides it into; 1 leaves the order as it is.

    Attributes:
        index: number of this part.
        size: number of parts.
    """

    def __init__(self, mesh: DeviceMesh, *, folds: int = 1) -> None:
        self._mesh = mesh
        self._folds = folds
        self.index, self.size = mesh.get_local_rank(), mesh.size()

    def own(self, whole: Tensor) -> Tensor:
        """`[B, c, ...]` of `[B, C, ...]`."""
        context = whole.shape[1]
        for number, name in ((self.size, "tp * parallel.cp"), (self._num_chunks, "cp * 2")):
            if context % number:
                raise ValueError(
                    f"sequences of {context} tokens do not divide into {number} equal parts "
                    f"(parallel.{name})"
                )
        width = context // self.size
        folded = _chunks_in(whole, fold_order(self._folds))
        return folded.narrow(1, self.index * width, width)

    def gather(self, part: Tensor) -> Tensor:
        """`[B, C, ...]` of every process's `[B, c, ...]`, in order; a collective call."""
        divided = DTensor.from_local(part, self._mesh, [Shard(1)], run_check=False)
        folded = divided.full_tensor(grad_placements=[Partial()])
        order = fold_order(self._folds)
        return _chunks_in(folded, [order.index(chunk) for chunk in range(len(order))])

    def runs(self, num_tokens: int) -> list[range]:
        """Positions of the tokens here, as runs of consecutive ones."""
        assert self.size == self._folds, "other divisions cut through runs"
        width = num_tokens // 2
        own = fold_order(self._folds)[2 * self.index : 2 * self.index + 2]
        return [range(chunk * width, (chunk + 1) * width) for chunk in own]

    @property
    def _num_chunks(self) -> int:
        return len(fold_order(self._folds))

    def own_choices(self, routing: Routing, num_sequences: int) -> Routing:
        """What a gate decided for the tokens here, of what it decided for all."""

        def rows(all_T: Tensor) -> Tensor:
            return self.own(all_T.unflatten(0, (num_sequences, -1))).flatten(0, 1)

        zero = routing.zero
        return replace(
            routing,
            ids_TK=rows(routing.ids_TK),
            weights_TK=rows(routing.weights_TK),
            slots_TK=None if routing.slots_TK is None else rows(routing.slots_TK),
            zero=None
            if zero is None
            else ZeroRouting(rows(zero.ids_TK), rows(zero.weights_TK), zero.num_experts),
        )


def fold_order(folds: int) -> list[int]:
    """The chunks of a sequence, two for each part: the first and the last, the second and so on."""
    if folds == 1:
        return [0]
    return [chunk for part in range(folds) for chunk in (part, 2 * folds - 1 - part)]


def _chunks_in(whole: Tensor, order: list[int]) -> Tensor:
    """The equal chunks of dimension 1 in another order."""
    if len(order) == 1:
        return whole
    chunks = whole.chunk(len(order), 1)
    return torch.cat([chunks[number] for number in order], dim=1)


def causal_mask(num_queries: int, first: int, device: torch.device) -> Tensor:
    """`[q, first + q]` bool: which tokens those of a run may look at."""
    shape = (num_queries, first + num_queries)
    return torch.ones(shape, dtype=torch.bool, device=device).tril(first)
