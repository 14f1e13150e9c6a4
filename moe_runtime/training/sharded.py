"""Checkpoints that several processes write together, and any number of processes reads.

A folder in the format of `torch.distributed.checkpoint`: every tensor under the name that it has in
one process, parts of fused products and experts under names of their own. `progress.pt`
has everything that is not a tensor of the model or the optimizer; each process writes digests. The
folder gets its name once it is whole.

A lost stage of a pipeline is replaced by the stages next to it (`LostStage`), without a copy of it.
Source: Blagoev et al., "All is Not Lost: LLM Recovery without Checkpoints" (CheckFree, 2025).
"""

import contextlib
import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_runtime.digests import check_digests, write_digests
from moe_runtime.errors import CheckpointError
from moe_runtime.files import partial_name, replace_folder
from moe_runtime.layer.experts import Experts
from moe_runtime.models.lm.config import LanguageModelConfig
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.models.lm.parallel import by_parts
from moe_runtime.parallel import ParallelExperts
from moe_runtime.parallel.parallel_experts import copy_part, logical_views
from moe_runtime.training.checkpoint import (
    BackgroundSave,
    RunProgress,
    TrainingState,
    load_content,
    name_of_step,
    remove_oldest,
    write_content,
)
from moe_runtime.training.optimizer import Optimizer
from moe_runtime.training.ranks import OneRank

PROGRESS_FILE = "progress.pt"
_TOKEN = "00000000"
"""In the name of the folder that all processes write to before it is whole."""
MOMENTS = ("exp_avg", "exp_avg_sq")
_LAYER = re.compile(r"^(.*\bblocks\.)(\d+)(\..*)$")
_MODEL, _GRADIENT = "model.", "exp_avg."
_LEAST_NORM = 1e-4


class LostStage:
    """Tensors of a snapshot that no machine has, and their replacements.

    A tensor becomes the mean of the same tensor in the nearest layers that are left, weighted by
    the norms of their gradients, for which AdamW's first moments stand. Moments begin with zeros.

    Args:
        lost: names of tensors, all of consecutive layers.
        names: all names of the snapshot.

    Raises:
        ValueError: a tensor is in the first or last stage, or the layers next to it differ.
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
            raise ValueError(f"the layers next to it differ: there is no {min(missing)}")

    def sources_for(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Memory for the sources of this process's lost tensors, by name."""
        pairs = [
            (name, source) for name in self.names & own.keys() for source in self._sources[name]
        ]
        return {source: torch.zeros_like(own[n]) for n, source in pairs if source not in own}

    @torch.no_grad()
    def fill(
        self, own: Mapping[str, Tensor], sources: Mapping[str, Tensor], ranks: OneRank
    ) -> None:
        """Computes the lost tensors from their sources; a collective call."""
        sources = {**sources, **own}
        squares = [0.0, 0.0]
        for name in self.names & own.keys():
            if name.startswith(_GRADIENT):
                for place, source in enumerate(self._sources[name]):
                    squares[place] += float(_local(sources[source]).double().square().sum())
        parts = [json.loads(text) for text in ranks.texts(json.dumps(squares))]
        first, second = (
            sum(part[place] for part in parts) ** 0.5 + _LEAST_NORM for place in (0, 1)
        )
        share = first / (first + second)
        for name in self.names & own.keys():
            before, after = (_local(sources[source]) for source in self._sources[name])
            target = _local(own[name])
            if not name.startswith(_MODEL):
                target.zero_()
            elif target.is_floating_point():
                target.copy_(share * before + (1 - share) * after)
            else:
                target.copy_(before)


def lost_tensors(path: Path, files: Collection[str]) -> tuple[set[str], set[str]]:
    """Names of a snapshot's tensors that have a part in lost files, and of all its tensors."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    stored = FileSystemReader(path).read_metadata().storage_data or {}
    lost = {index.fqn for index, info in stored.items() if info.relative_path in files}
    return lost, {index.fqn for index in stored}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardedCheckpoints:
    """Saves and loads this process's parts of a model and its optimizer.

    Args:
        names: of all parameters of the whole model, in the order of `state_order`.
    """

    def __init__(
        self, model: LanguageModel, optimizer: Optimizer, ranks: OneRank, names: Sequence[str]
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._ranks = ranks
        self._names = names
        self.saves = BackgroundSave()
        self._background = ranks.for_background()

    def save(self, folder: Path, progress: RunProgress, *, keep: int) -> None:
        """Writes a checkpoint from a copy on the host while training goes on, and removes the
        oldest beyond `keep`; a collective call."""
        self.saves.wait()  # one copy at a time
        part = {name: t.detach().to("cpu", copy=True) for name, t in self.tensors().items()}
        steps = self._optimizer_steps()
        self.saves.start(lambda: self._save(folder, part, steps, progress, keep))

    def _save(
        self, folder: Path, part: dict[str, Tensor], steps: float, progress: RunProgress, keep: int
    ) -> None:
        path, ranks = folder / name_of_step(progress.step), self._background
        is_first = ranks.rank == 0
        with contextlib.ExitStack() as stack:
            with fails_together(ranks):
                if is_first:
                    stack.enter_context(replace_folder(path, token=_TOKEN))
            _write(partial_name(path, _TOKEN), part, steps, progress, ranks)
            with fails_together(ranks), stack.pop_all():
                pass  # the folder gets its name
        with fails_together(ranks):
            if is_first:
                remove_oldest(folder, keep)

    def write(self, folder: Path, progress: RunProgress) -> list[str]:
        """Writes this process's part into an empty folder, and returns the names of its files; a
        collective call."""
        return _write(folder, self.tensors(), self._optimizer_steps(), progress, self._ranks)

    def _optimizer_steps(self) -> float:
        return max(float(state["step"]) for state in self._optimizer.dense.moments().values())

    def load(self, path: Path, lost: LostStage | None = None) -> None:
        """Reads this process's part of a checkpoint of any number of processes; a collective call.

        Args:
            lost: tensors that the checkpoint lacks, to be replaced.
        """
        own = self.tensors()
        here = own if lost is None else {n: t for n, t in own.items() if n not in lost.names}
        sources = {} if lost is None else lost.sources_for(own)
        read_tensors(path, {**here, **sources}, self._ranks)
        if lost is not None:
            lost.fill(own, sources, self._ranks)
        self._finish(steps_of(path))

    def _finish(self, steps: float) -> None:
        """Sets the step counts, and fills copies of experts."""
        moments = self._optimizer.dense.moments()
        for state in moments.values():
            state["step"].fill_(steps)
        for path, module in _experts_in(self._model).items():
            if isinstance(module, ParallelExperts) and module.has_copies:
                named = {f"{path}.{name}": p for name, p in module.named_parameters()}
                kept = [moments[name][kind] for name in named for kind in MOMENTS]
                module.fill_copies([*named.values(), *kept])

    def take(self, state: TrainingState) -> None:
        """Copies this process's part from the state of a run of one process."""
        saved = state.optimizer["state"]
        moments = {name: saved[i] for i, name in enumerate(self._names) if i in saved}
        whole = logical_tensors(self._model, state.model, moments, is_whole=True)
        own = self.tensors()
        missing = own.keys() - whole.keys()
        if missing and moments:
            raise ValueError(f"the checkpoint does not fit the model: it lacks {min(missing)}")
        with torch.no_grad():
            for name in own.keys() & whole.keys():
                copy_part(whole[name], own[name])
        # parts of fused products have their own names; all took the same steps
        steps = max((float(moment["step"]) for moment in moments.values()), default=0.0)
        self._finish(steps)

    def tensors(self) -> dict[str, Tensor]:
        moments = self._optimizer.dense.moments()
        return logical_tensors(self._model, self._model.state_dict(), moments)


def _write(
    folder: Path, part: dict[str, Tensor], steps: float, progress: RunProgress, ranks: OneRank
) -> list[str]:
    """Writes a process's part, and returns the names of its files; `steps` are the optimizer's."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    name = name_of_step(progress.step)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(ranks.watched(f"writing {name}"))
            if ranks.size == 1:
                stack.enter_context(_one_process())
            dcp.save(  # pyright: ignore[reportPrivateImportUsage]
                part, checkpoint_id=folder, process_group=ranks.group, no_dist=ranks.size == 1
            )
    except CheckpointException as error:
        reason = f"the checkpoint cannot be written: {_reason(error)}"
        raise OSError(f"{folder.with_name(name)}: {reason}") from error
    own: list[str] = []
    with fails_together(ranks):
        own += [file.name for file in folder.glob(f"__{ranks.rank}_*.distcp")]
        if ranks.rank == 0:
            content = {field.name: getattr(progress, field.name) for field in fields(progress)}
            write_content(folder / PROGRESS_FILE, {"optimizer_steps": steps, **content})
            own += [".metadata", PROGRESS_FILE]
        own.append(write_digests(folder, own, writer=ranks.rank))
    return own


@contextlib.contextmanager
def fails_together(ranks: OneRank) -> Iterator[None]:
    """A block that fails in all processes if it fails in one of them."""
    failure = None
    try:
        yield
    except OSError as error:
        failure = error
    reason = "" if failure is None else str(failure)
    reason = ranks.first_text(reason and f"rank {ranks.rank}: {reason}")
    if failure is not None:
        raise failure
    if reason:
        raise OSError(f"the checkpoint cannot be written: {reason}")


def steps_of(path: Path) -> float:
    """Steps of the optimizer in a checkpoint."""
    return load_content(path / PROGRESS_FILE, RunProgress).get("optimizer_steps", 0.0)


def read_progress(path: Path) -> RunProgress:
    content = load_content(path / PROGRESS_FILE, RunProgress)
    return RunProgress(**{field.name: content[field.name] for field in fields(RunProgress)})


def logical_tensors(
    model: LanguageModel,
    state: Mapping[str, Any],
    moments: Mapping[str, Mapping[str, Tensor]],
    *,
    is_whole: bool = False,
) -> dict[str, Tensor]:
    """Parameters, buffers and AdamW's moments by their names in checkpoints, in place.

    Args:
        is_whole: `state` and `moments` are of the whole model in one process.
    """
    kinds = {"model": dict(state)}
    for kind in MOMENTS if moments else ():
        kinds[kind] = {name: held[kind] for name, held in moments.items()}
    tensors: dict[str, Tensor] = {}
    experts = _experts_in(model)
    for kind, named in kinds.items():
        for path, module in experts.items():
            names = {leaf: f"{path}.{leaf}" for leaf, _ in module.named_parameters()}
            stack = {leaf: named.pop(name) for leaf, name in names.items() if name in named}
            if isinstance(module, ParallelExperts) and not is_whole:
                views = module.logical_state(stack)
            else:
                views = logical_views(stack, range(module.num_experts))
            tensors |= {f"{kind}.{path}.{name}": view for name, view in views.items()}
        dense = by_parts(model, named)
        tensors |= {f"{kind}.{name}": tensor for name, tensor in dense.items()}
    return tensors


def read_tensors(path: Path, tensors: dict[str, Tensor], ranks: OneRank) -> None:
    """Checks all files of a checkpoint, and reads tensors in place; a collective call."""
    damage = ""
    try:
        check_digests(path, part=ranks.rank, num_parts=ranks.size)
    except CheckpointError as error:
        damage = str(error)
    if damage := ranks.first_text(damage):
        raise CheckpointError(damage)
    with ranks.watched(f"reading {path.name}"):
        read_parts(path, tensors, ranks)


def read_parts(path: Path, tensors: dict[str, Tensor], ranks: OneRank | None = None) -> None:
    """Reads tensors of a checkpoint in place; a collective call of `ranks`, if given."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    ranks = ranks or OneRank()
    try:
        with _one_process():
            dcp.load(  # pyright: ignore[reportPrivateImportUsage]
                tensors, checkpoint_id=path, process_group=ranks.group, no_dist=ranks.size == 1
            )
    except (CheckpointException, RuntimeError, OSError, ValueError, KeyError, EOFError) as error:
        raise CheckpointError(
            f"{path}: the checkpoint is damaged or of another model ({_reason(error)}); remove it "
            "to go on from the one before"
        ) from error


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Silences torch's warning about reading and writing in one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _reason(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def whole_model(config: LanguageModelConfig, path: Path) -> LanguageModel:
    """The whole model of a checkpoint of several processes, in this process."""
    model = LanguageModel(config)
    read_tensors(path, logical_tensors(model, model.state_dict(), {}), OneRank())
    return model


def _experts_in(model: LanguageModel) -> dict[str, Experts | ParallelExperts]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Experts | ParallelExperts)
    }
