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

    Args:
        mesh: the processes that divide a sequence, in the order of their parts.

    Attributes:
        index: number of this part.
        size: number of parts.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self.index, self.size = mesh.get_local_rank(), mesh.size()

    def own(self, whole: Tensor) -> Tensor:
        """`[B, c, ...]` of `[B, C, ...]`.

        Raises:
            ValueError: the tokens do not divide into equal parts.
        """
        context = whole.shape[1]
        if context % self.size:
            raise ValueError(
                f"sequences of {context} tokens do not divide into {self.size} equal parts "
                "(parallel.tp * parallel.cp)"
            )
        width = context // self.size
        return whole.narrow(1, self.index * width, width)

    def gather(self, part: Tensor) -> Tensor:
        """`[B, C, ...]` of every process's `[B, c, ...]`; a collective call.

        The gradient of a part is the sum over the gradients that the processes have for it.
        """
        divided = DTensor.from_local(part, self._mesh, [Shard(1)], run_check=False)
        return divided.full_tensor(grad_placements=[Partial()])

    def own_choices(self, routing: Routing, num_sequences: int) -> Routing:
        """What a gate decided for the tokens here, of what it decided for all.

        Losses and scores stay those of all tokens.
        """

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


def causal_mask(num_queries: int, first: int, device: torch.device) -> Tensor:
    """`[q, first + q]` bool: which tokens those of a part may look at.

    Args:
        num_queries: tokens of the part.
        first: position of the first of them.
        device: where the mask is needed.
    """
    shape = (num_queries, first + num_queries)
    return torch.ones(shape, dtype=torch.bool, device=device).tril(first)
