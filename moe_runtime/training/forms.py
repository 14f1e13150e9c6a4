"""A run's state from one form into another: with experts in memory, and with experts off memory.

A file of one process, the parts that several processes write and a file that names versions of
experts hold the same numbers, so a run goes on from any of them in any form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_runtime.checkpoints.absent import TrainedElsewhere
from moe_runtime.digests import check_digests
from moe_runtime.errors import CheckpointError
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.models.lm.parallel import by_parts
from moe_runtime.parallel.parallel_experts import logical_views
from moe_runtime.training.checkpoint import (
    MAPPING,
    RunProgress,
    TrainingState,
    require_kind,
    require_like,
)
from moe_runtime.training.offload.offloaded_training import OffloadedTraining
from moe_runtime.training.offload.records import RecordLayout, Sections, Version
from moe_runtime.training.optimizer import require_moments
from moe_runtime.training.run_config import TrainConfig
from moe_runtime.training.sharded import MOMENTS, read_parts, steps_of
from moe_runtime.training.train_plan import whole_run
from moe_runtime.types import ExpertKey

_SECTIONS = dict(zip(MOMENTS, (Sections.MEAN, Sections.VARIANCE), strict=True))


def is_off_memory(state: RunProgress) -> bool:
    """Whether a checkpoint names versions of experts, rather than having their numbers."""
    return isinstance(state, TrainingState) and "experts" in state.optimizer


def in_memory(
    config: TrainConfig, state: TrainingState, storage: Path, names: Sequence[str]
) -> TrainingState:
    """What a run with its experts in memory would have written.

    Args:
        storage: the folder of the experts' files.
        names: of all parameters, in the order of `state_order`.

    Raises:
        CheckpointError: a part is missing or damaged.
    """
    with whole_run(config, state, storage) as (model, training):
        named = model.state_dict().items()
        whole = {n: t.clone() for n, t in named if not isinstance(t, TrainedElsewhere)}
        moments = {
            name: {kind: held[kind].clone() for kind in MOMENTS}
            for name, held in training.dense.moments().items()
        }
        for name, stacks in _stacks(training):
            whole[name] = torch.stack(stacks.pop("model"))
            moments[name] = {kind: torch.stack(parts) for kind, parts in stacks.items()}
        step = torch.tensor(float(training.num_steps), dtype=torch.float32)
    numbered = {i: {"step": step, **moments[name]} for i, name in enumerate(names)}
    return replace(state, model=whole, optimizer={"state": numbered})


def _stacks(training: OffloadedTraining) -> Iterator[tuple[str, dict[str, list[Tensor]]]]:
    """The tensors of each expert parameter: weights, and the two moments."""
    for layer, site in enumerate(training.sites):
        found: dict[str, dict[str, list[Tensor]]] = {}
        for expert in range(site.num_experts):
            key = ExpertKey(layer, expert)
            layout = training.records.experts[key].layout
            record = training.optimizer.fetch(key, Sections.STATE)
            views = {"model": layout.views(record, Sections.PARAMETERS)}
            for kind, section in _SECTIONS.items():
                views[kind] = _moments(layout, record, section)
            for kind, named in views.items():
                for name, view in named.items():
                    found.setdefault(name, {}).setdefault(kind, []).append(view.clone())
            training.records.release(key)
        yield from ((f"{site.name}.{name}", kinds) for name, kinds in found.items())


def _moments(layout: RecordLayout, record: Tensor, section: Sections) -> dict[str, Tensor]:
    """A moment by the names of its tensors, as views; runs in memory have no other codec than the
    exact one."""
    flat = layout.codec.decode(layout.moment(record, section), 0, layout.num_moments, layout.dtype)
    return {
        tensor.name: flat[span.start : span.start + tensor.num_elements].view(tensor.shape)
        for tensor, span in zip(layout.trained, layout.spans, strict=True)
    }


class Saved(Protocol):
    """A checkpoint of a run whose experts were in memory: weights (`model`) and moments."""

    steps: int

    def fill(self, kind: str, named: Mapping[str, Tensor]) -> None:
        """Copies what is no expert's into tensors, by the names of the whole model."""
        ...

    def expert(self, kind: str, site: str, expert: int, layout: RecordLayout) -> dict[str, Tensor]:
        """An expert's tensors by the names of its stacks; `site` is the path of its module."""
        ...


class SavedFile:
    """What one process wrote.

    Args:
        model: with stacks of the whole shapes.
        names: of all parameters, in the order of `state_order`.
    """

    def __init__(self, state: TrainingState, model: LanguageModel, names: Sequence[str]) -> None:
        require_like(state.model, model.state_dict(), "the checkpoint does not fit the model: it")
        parameters = dict(model.named_parameters())
        held = state.optimizer.get("state")
        what = "the optimizer's state"
        require_kind(held, MAPPING, what)
        assert isinstance(held, Mapping), "its kind was required"
        self._kinds: dict[str, Mapping[str, Tensor]] = {"model": state.model}
        self.steps = 0
        if not held:
            return
        if held.keys() != set(range(len(names))):
            raise CheckpointError(f"{what} does not have the moments of {len(names)} parameters")
        for i, name in enumerate(names):
            require_moments(held[i], parameters[name], f"{what} of {name}")
        for kind in MOMENTS:
            self._kinds[kind] = {name: held[i][kind] for i, name in enumerate(names)}
        self.steps = round(max(float(one["step"]) for one in held.values()))

    def fill(self, kind: str, named: Mapping[str, Tensor]) -> None:
        for name, tensor in named.items():
            tensor.copy_(self._kinds[kind][name])

    def expert(self, kind: str, site: str, expert: int, layout: RecordLayout) -> dict[str, Tensor]:
        named = self._kinds[kind]
        return {t.name: named[f"{site}.{t.name}"][expert] for t in layout.tensors}


class SavedParts:
    """What several processes wrote; one expert after another is read."""

    def __init__(self, path: Path, model: LanguageModel) -> None:
        check_digests(path)
        self._path, self._model = path, model
        self.steps = round(steps_of(path))

    def fill(self, kind: str, named: Mapping[str, Tensor]) -> None:
        parts = by_parts(self._model, named)
        read_parts(self._path, {f"{kind}.{name}": tensor for name, tensor in parts.items()})

    def expert(self, kind: str, site: str, expert: int, layout: RecordLayout) -> dict[str, Tensor]:
        stacks = {t.name: torch.empty(1, *t.shape, dtype=layout.dtype) for t in layout.tensors}
        views = logical_views(stacks, [expert])
        read_parts(self._path, {f"{kind}.{site}.{name}": view for name, view in views.items()})
        return {name: stack[0] for name, stack in stacks.items()}


def take_off_memory(training: OffloadedTraining, model: LanguageModel, saved: Saved) -> None:
    """Takes up a run whose experts were in memory; each process its own experts.

    Raises:
        CheckpointError: a part is missing or damaged.
    """
    named = model.state_dict().items()
    dense = {name: t for name, t in named if not isinstance(t, TrainedElsewhere)}
    with torch.no_grad():
        saved.fill("model", dense)
        moments = training.dense.moments()
        for kind in MOMENTS if saved.steps else ():
            saved.fill(kind, {name: held[kind] for name, held in moments.items()})
        for held in moments.values():
            held["step"].fill_(saved.steps)
    for key, status in training.records.experts.items():
        layout = status.layout

        def read(record: Tensor, key: ExpertKey = key, layout: RecordLayout = layout) -> Version:
            place = training.sites[key.layer].name, key.expert, layout
            layout.clear(record, Sections.ALL)
            for name, tensor in saved.expert("model", *place).items():
                layout.views(record, Sections.PARAMETERS)[name].copy_(tensor)
            for kind, section in _SECTIONS.items() if saved.steps else ():
                tensors = saved.expert(kind, *place)
                for name, view in _moments(layout, record, section).items():
                    view.copy_(tensors[name])
            return Version(0, saved.steps, saved.steps)

        training.records.take_in(key, read)
    training.records.commit()
    past: dict[str, Any] = {
        "step": saved.steps,
        # of steps that no expert lacks
        "rates": [0.0] * saved.steps,
        "scales": [1.0] * saved.steps,
        "last_norm": 0.0 if saved.steps else None,
        "loss_scale": training.optimizer.loss_scale.state_dict(),
    }
    training.optimizer.load_state_dict(past)


def saved_in_memory(
    path: Path, state: RunProgress, model: LanguageModel, names: Sequence[str]
) -> Saved:
    """A checkpoint of either form that has the experts' numbers; `model` before they left it."""
    if isinstance(state, TrainingState):
        return SavedFile(state, model, names)
    return SavedParts(path, model)
