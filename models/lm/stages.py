"""Pipeline stages of the language model: consecutive blocks, and what a schedule calls of them.

Names stay those of the whole model, so that checkpoints know nothing of stages. A tied embedding is
in the first stage and, as the output projection, in the last.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_runtime.models.lm.config import LanguageModelConfig
from moe_runtime.models.lm.model import LanguageModel, Losses
from moe_runtime.routing import MoEPlusPlus, Reinforce
from moe_runtime.routing.base import score_dtype


@dataclass(frozen=True, slots=True)
class Stage:
    """Which stage of how many.

    Attributes:
        index: number of this stage.
        count: number of stages.
    """

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        """Whether the tokens enter here."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.index == self.count - 1

    def blocks(self, num_blocks: int) -> range:
        """The blocks of this stage; the first stages have one more where they do not divide.

        The last stages have the output projection and the loss besides.

        Raises:
            ValueError: There are fewer blocks than stages.
        """
        if num_blocks < self.count:
            raise ValueError(f"{num_blocks} blocks cannot be divided into {self.count} stages")
        each, more = divmod(num_blocks, self.count)
        start = self.index * each + min(self.index, more)
        return range(start, start + each + (self.index < more))


def check_stages(config: LanguageModelConfig, num_stages: int) -> None:
    """Refuses a division into stages that cannot be.

    Raises:
        ValueError: there are too few layers; says how many there are.
    """
    pairs = config.moe is not None and config.moe.shortcut is not None
    num_blocks = config.num_layers // 2 if pairs else config.num_layers
    if num_stages > num_blocks:
        blocks = "pairs of layers that model.moe.shortcut makes" if pairs else "model.num_layers"
        raise ValueError(f"parallel.pp ({num_stages}) must be at most the {blocks} ({num_blocks})")


class StageModule(nn.Module):
    """One stage of a model as `torch.distributed.pipelining` calls it.

    What travels is the residual stream and, where gates read the scores of the gate before
    (MoE++), those. The losses of gates are added to the gradients where they arise, because what
    they depend on does not reach the last stage.

    Attributes:
        model: The blocks of this stage.
        stage: Which one it is.
        found: The losses of every call so far, as this stage's shares, without their graphs. The
            cross-entropy is 0 in all stages but the last.
    """

    def __init__(
        self,
        model: LanguageModel,
        stage: Stage,
        *,
        loss_scale: float,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Leaves the model the blocks of this stage, in place.

        Args:
            model: The whole model.
            stage: Which stage to keep.
            loss_scale: Factor of the losses that are trained on, such as 1 over the micro-batches.
            autocast: Makes the context that the forward pass runs in.

        Raises:
            ValueError: There are fewer blocks than stages, or a gate needs to know what only the
                last stage knows, or calls in another order.
        """
        super().__init__()
        self.model = model
        self.stage = stage
        self.found: list[Losses] = []
        self._autocast = autocast
        own = stage.blocks(len(model.blocks))
        _refuse(model)
        for layer in model.routed_layers():
            layer.attach_losses = True
            layer.loss_scale = loss_scale / model.num_routed
        self._scores_in, self._scores_out = (
            _scores_before(model, n) for n in (own[0], own[-1] + 1)
        )
        for number in range(len(model.blocks)):
            if number not in own:
                model.blocks[number] = nn.Identity()  # the others keep their numbers
        if not stage.is_last:
            del model.norm, model.output
        if not (stage.is_first or (stage.is_last and model.config.tie_embeddings)):
            del model.embedding
        model.is_whole = False

    def forward(self, *received: Tensor, windows: Tensor) -> tuple[Tensor, ...] | Tensor:
        """What the next stage receives; of the last stage the cross-entropy, a scalar.

        Args:
            received: As `received_of` says.
            windows: `[B, C + 1]` token ids.
        """
        ids_BC, targets_BC = windows[:, :-1], windows[:, 1:]
        model = self.model
        with self._autocast():
            x, *scores = (model.embed(ids_BC),) if self.stage.is_first else received
            x, logits = model.through_blocks(x, ids_BC, scores[0] if scores else None)
            if self.stage.is_last:
                losses = model.losses_after(x, targets_BC)
            else:
                losses = model.gate_losses(x.new_zeros((), dtype=score_dtype(x)))
        self.found.append(losses.detach())
        if self.stage.is_last:
            return losses.cross_entropy
        return (x, logits) if self._scores_out and logits is not None else (x,)

    def received_of(self, windows: Tensor) -> tuple[Tensor, ...]:
        """What the stage before sends for windows `[B, C + 1]`, without values (device `meta`)."""
        return () if self.stage.is_first else self._passed(windows, self._scores_in)

    def sent_of(self, windows: Tensor) -> tuple[Tensor, ...]:
        """What this stage returns for windows `[B, C + 1]`, without values."""
        if self.stage.is_last:
            return (torch.empty((), device="meta", dtype=score_dtype(self._weight)),)
        return self._passed(windows, self._scores_out)

    @property
    def _weight(self) -> Tensor:
        """A parameter; all have one dtype, which the residual stream has as well."""
        return next(self.model.parameters())

    def _passed(self, windows: Tensor, num_scores: int) -> tuple[Tensor, ...]:
        batch, context = windows.shape[0], windows.shape[1] - 1
        parts = 1 if self.model.part is None else self.model.part.size
        shape = (batch, context // parts, self.model.config.hidden_size)
        # What wants no gradient gets none sent back.
        wanted = {"device": "meta", "requires_grad": True}
        stream = torch.empty(shape, dtype=self._weight.dtype, **wanted)
        if not num_scores:
            return (stream,)
        # Gates see all tokens.
        shape = (batch * context, num_scores)
        return stream, torch.empty(shape, dtype=score_dtype(stream), **wanted)


def _refuse(model: LanguageModel) -> None:
    for layer in model.routed_layers():
        if isinstance(layer.gate, Reinforce):
            raise ValueError(
                f"{layer.gate.name} learns from each token's loss, which only the last stage of a "
                "pipeline knows; leave parallel.pp out, or take another gate"
            )
        if model.recompute and layer.gate.step_counts_E is not None:
            raise ValueError(
                "the loss global_balance counts the calls before, and run.recompute repeats calls "
                "in another order within a pipeline; leave run.recompute or parallel.pp out"
            )


def _scores_before(model: LanguageModel, number: int) -> int:
    """How many scores a token has that gates before a block leave to those after it; 0 for none."""
    before = [block.routed for block in list(model.own_blocks())[:number]]
    gates = [layer.gate for layer in before if layer is not None]
    residuals = [gate.residual for gate in gates if isinstance(gate, MoEPlusPlus)]
    return len(residuals[-1]) if residuals and residuals[-1] is not None else 0
