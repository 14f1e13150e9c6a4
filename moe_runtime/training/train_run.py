"""Training of a language model: from a configuration to a run, and its export.

A run's folder holds `checkpoints/`, `metrics.jsonl`, `data/` (encoded text), `tokenizer/` (if it
was trained), `tensorboard/` (if asked for) and at the end `model/` (the Hugging Face checkpoint)
and `summary.json`.

A checkpoint with experts in memory and one that names versions of experts off memory hold the same
numbers, so a run resumes from either in either form.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_runtime.checkpoints.absent import TrainedElsewhere
from moe_runtime.digests import check_digests
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.files import make_folders
from moe_runtime.kernels.operands import find_device
from moe_runtime.models.lm.blocks import check_experts
from moe_runtime.models.lm.export import export_hugging_face, import_hugging_face
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.models.lm.parallel import by_parts
from moe_runtime.parallel.parallel_experts import logical_views
from moe_runtime.training.checkpoint import (
    MAPPING,
    RunProgress,
    TrainingState,
    checkpoints_in,
    load_checkpoint,
    named_checkpoint,
    require_kind,
    require_like,
)
from moe_runtime.training.data import (
    check_groups,
    data_files,
    encode_corpora,
    obtain_tokenizer,
    read_corpora,
    save_tokenizer,
    windows_of,
)
from moe_runtime.training.loop import Trainer
from moe_runtime.training.offload.checkpoint import remove_left_behind, remove_own_files
from moe_runtime.training.offload.entry import find_sites
from moe_runtime.training.offload.offloaded_training import OffloadedTraining
from moe_runtime.training.offload.records import RecordLayout, Sections, Version
from moe_runtime.training.optimizer import Optimizer, require_moments, state_order
from moe_runtime.training.prepared import (
    DATA,
    EXPERTS,
    TOKENIZER,
    PreparedRun,
    check_inputs_stay,
    check_outputs,
)
from moe_runtime.training.ranks import OneRank, require_compiler
from moe_runtime.training.run_config import TrainConfig
from moe_runtime.training.sharded import (
    MOMENTS,
    ShardedCheckpoints,
    read_parts,
    steps_of,
    whole_model,
)
from moe_runtime.training.snapshots import Snapshots
from moe_runtime.training.tracing import TrainingTrace, open_trace, signature_of_config
from moe_runtime.training.train_plan import (
    StreamedInit,
    build_model,
    offloaded_optimizer,
    whole_run,
)
from moe_runtime.types import ExpertKey

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Preparation(PreparedRun):
    """A run of a new model.

    Attributes:
        config: with the vocabulary of the tokenizer.
        folder: what relative paths start from.
        first_experts: source of the first weights of offloaded experts.
    """

    config: TrainConfig
    folder: Path
    tokenizer: "PreTrainedTokenizerBase"
    model: LanguageModel
    first_experts: StreamedInit


def prepare(
    config: TrainConfig,
    folder: Path,
    *,
    on_stage: Callable[[str], None] = lambda stage: None,
    keeps_text: bool = True,
) -> Preparation:
    """Reads and encodes the text and builds the model.

    Args:
        folder: what relative paths start from: that of the configuration file.
        on_stage: called with the name of each stage.
        keeps_text: write the tokenizer and the encoded text to the run's folder.
    """
    device = find_device(config.run.device or "auto", "run.device")
    check_experts(config.model)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    output = folder / config.run.output
    trace = config.run.trace and folder / config.run.trace
    first = config.run.start_from and folder / config.run.start_from
    check_inputs_stay(output, trace, data_files(config.data, folder), first)
    check_outputs(output, trace)
    on_stage("reading the text")
    corpora = read_corpora(config.data, folder)
    on_stage("preparing the tokenizer")
    tokenizer = obtain_tokenizer(
        config.tokenizer, corpora, folder=folder, saved=output / TOKENIZER, keeps=keeps_text
    )
    on_stage("encoding the text")
    streams = encode_corpora(corpora, tokenizer, cache=output / DATA, keeps=keeps_text)
    config = _with_vocabulary(config, tokenizer)
    batches, held_out = windows_of(streams, config)
    on_stage("building the model")
    torch.manual_seed(config.run.seed)
    is_offloaded = config.run.host_memory is not None
    model, first_experts = build_model(config, is_offloaded=is_offloaded)
    if is_offloaded:
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    else:
        model = model.to(device)
    for layer in model.routed_layers():
        check_groups(layer.gate.num_groups, config.data, held_out)
    preparation = Preparation(
        config=config,
        folder=folder,
        output=output,
        storage=folder / (config.run.storage_dir or output / EXPERTS),
        tokenizer=tokenizer,
        streams=streams,
        batches=batches,
        held_out=held_out,
        model=model,
        first_experts=first_experts,
        device=device,
        num_parameters=model.num_parameters(),
        num_active_parameters=model.num_active_parameters(),
    )
    if config.run.compile:
        require_compiler(device)
        model.compile_blocks()
    # a resumed run loads the weights of its own checkpoint
    if config.run.start_from is not None and not checkpoints_in(preparation.checkpoints):
        on_stage("reading the first weights")
        import_hugging_face(model, folder / config.run.start_from)
    return preparation


def start(
    preparation: Preparation,
    *,
    resume: bool,
    reschedule: bool = False,
    ranks: OneRank | None = None,
    make_optimizer: Callable[..., Optimizer] = Optimizer,
) -> Trainer:
    """A trainer at the beginning of the run, or at its last checkpoint.

    Args:
        resume: continue from the newest checkpoint; without one, begin.
        reschedule: the number of steps, the course of the learning rate and the short sequences may
            differ from the checkpoint's; further steps follow the new ones.
        ranks: the processes that train together; their number may differ from the checkpoint's.
        make_optimizer: makes that of a model in memory, of the arguments of `Optimizer`. For the
            keys of `[research]` it is the second result of `moe_runtime.research.runs.equip`.
    """
    ranks = ranks or OneRank()
    if preparation.config.is_research and make_optimizer is Optimizer:
        raise ValueError("the keys of [research] need a make_optimizer that follows them")
    if ranks.size > 1:
        ranks.require_shared(preparation.output)
    model, config = preparation.model, preparation.config
    names = state_order({n: p for n, p in model.named_parameters() if p.requires_grad})
    run, find = config.run, partial(preparation.find_state, resume=resume, reschedule=reschedule)
    shards = snapshots = take = None
    if run.host_memory is None:
        ranks.spread(model)
        optimizer = make_optimizer(model, config.optimizer, ranks)
        shards = ShardedCheckpoints(model, optimizer, ranks, names)
        makes = run.lost_stage == "neighbours"
        snapshots = Snapshots(preparation.output, shards, ranks, approximates=makes)
        if run.snapshot_every:
            snapshots.require_memory()
        found = find(snapshot=snapshots.find())
        if found is not None and _is_off_memory(found[1]):
            take = partial(shards.take, _into_memory(preparation, *found, names, ranks))
    else:
        found, saved = find(), None
        if found is not None and not _is_off_memory(found[1]):
            last, state = found
            with named_checkpoint(last):
                if isinstance(state, TrainingState):
                    saved = SavedFile(state, model, names)
                else:
                    saved = SavedParts(last, model)
        optimizer = _offloaded_optimizer(preparation, ranks, resumes=found is not None)
        if saved is not None:
            take = partial(_take_off_memory, optimizer, model, saved)
    with contextlib.ExitStack() as refused:
        refused.callback(optimizer.close)
        trainer = Trainer(
            preparation,
            model,
            optimizer,
            sinks=preparation.open_sinks(found) if ranks.rank == 0 else (),
            ranks=ranks,
            shards=shards if ranks.size > 1 else None,
            snapshots=snapshots,
            trace=_open_trace(preparation, ranks, 0 if found is None else found[1].step),
        )
        if found is not None:
            trainer.resume(*found, shards, take=take)
        refused.pop_all()
    return trainer


def _into_memory(
    preparation: Preparation, last: Path, state: RunProgress, names: list[str], ranks: OneRank
) -> TrainingState:
    """A checkpoint that names versions of experts, with the experts' numbers.

    Processes take turns, as each collects the experts in files.
    """
    assert isinstance(state, TrainingState), "only files of one process name versions"
    found = state
    for rank in range(ranks.size):
        if rank == ranks.rank:
            with named_checkpoint(last):
                found = _in_memory(preparation.config, state, preparation.storage, names)
        ranks.barrier()
    return found


def finish(preparation: Preparation, trainer: Trainer, *, export: bool) -> dict[str, Any]:
    """Exports the model into `model/`, if asked, writes `summary.json` and returns the summary.

    The first process calls it after the last step.
    """
    if preparation.config.run.host_memory is None:
        _remove_old_experts(preparation)
    folder = preparation.output / "model" if export else None
    if folder is not None:
        tokenizer: Any = preparation.tokenizer
        ids = {
            f"{name}_token_id": getattr(tokenizer, f"{name}_token_id")
            for name in ("bos", "eos", "pad")
        }
        dtype = getattr(torch, preparation.config.run.export_dtype)
        write = partial(
            export_hugging_face,
            folder=folder,
            dtype=dtype,
            special_tokens=ids,
            also=partial(save_tokenizer, tokenizer),
        )
        _with_whole_model(preparation, write)
    return trainer.write_summary(folder)


def _remove_old_experts(preparation: Preparation) -> None:
    """Removes the files of experts off memory once no checkpoint names them."""
    storage = preparation.storage
    if not storage.is_dir():
        return
    files = [path for path in checkpoints_in(preparation.checkpoints) if path.is_file()]
    if not any(map(_names_experts, files)):
        remove_left_behind(storage, 1)
        remove_own_files(storage)
        with contextlib.suppress(OSError):  # something else lies there
            storage.rmdir()


def _names_experts(path: Path) -> bool:
    try:
        return _is_off_memory(load_checkpoint(path))
    except CheckpointError:
        return True  # it may have, before it was damaged


def _with_whole_model(preparation: Preparation, use: Callable[[LanguageModel], None]) -> None:
    config, model = preparation.config, preparation.model
    if model.is_whole:
        use(model)
        return
    last = checkpoints_in(preparation.checkpoints)[-1]
    if config.run.host_memory is None:
        use(whole_model(config.model, last))
    else:
        with whole_run(config, load_checkpoint(last), preparation.storage) as (whole, _):
            use(whole)


def _offloaded_optimizer(
    preparation: Preparation, ranks: OneRank, *, resumes: bool
) -> OffloadedTraining:
    folder = preparation.storage
    if preparation.config.run.storage_dir is None:
        make_folders(folder)
    initial = partial(preparation.first_experts.tensors_of, find_sites(preparation.model))
    ranks.spread(preparation.model)
    return offloaded_optimizer(
        preparation.config, preparation.model, initial, folder, resumes=resumes, ranks=ranks
    )


def _open_trace(preparation: Preparation, ranks: OneRank, first_step: int) -> TrainingTrace | None:
    run, model = preparation.config.run, preparation.model
    if run.trace is None:
        return None
    if ranks.size > 1:
        raise UnsupportedModelError(
            f"run.trace records a run of one process, this one has {ranks.size}; leave it out"
        )
    layers = set(model.routed_layers())
    signature = signature_of_config(preparation.config.model)
    return open_trace(
        preparation.folder / run.trace,
        signature,
        model,
        [f"{name}.experts" for name, module in model.named_modules() if module in layers],
        first_step=first_step,
        num_steps=run.trace_steps,
        expert_bytes=max(
            sum(parameter.numel() for parameter in layer.experts.parameters())
            for layer in model.routed_layers()
        )
        * getattr(torch, run.export_dtype).itemsize
        // signature.num_experts,
    )


def _with_vocabulary(config: TrainConfig, tokenizer: "PreTrainedTokenizerBase") -> TrainConfig:
    size = len(tokenizer)
    if config.model.vocab_size is not None:
        if config.model.vocab_size < size:
            raise ValueError(
                f"model.vocab_size must be at least the tokenizer's {size}, "
                f"got {config.model.vocab_size}"
            )
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))


_SECTIONS = dict(zip(MOMENTS, (Sections.MEAN, Sections.VARIANCE), strict=True))


def _is_off_memory(state: RunProgress) -> bool:
    """Whether a checkpoint names versions of experts, rather than having their numbers."""
    return isinstance(state, TrainingState) and "experts" in state.optimizer


def _in_memory(
    config: TrainConfig, state: TrainingState, storage: Path, names: Sequence[str]
) -> TrainingState:
    """The checkpoint that a run with its experts in memory would have written.

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
    return dataclasses.replace(state, model=whole, optimizer={"state": numbered})


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
    """A moment by the names of its tensors, as views: runs in memory have the exact codec."""
    flat = layout.codec.decode(layout.moment(record, section), 0, layout.num_moments, layout.dtype)
    return {
        tensor.name: flat[span.start : span.start + tensor.num_elements].view(tensor.shape)
        for tensor, span in zip(layout.trained, layout.spans, strict=True)
    }


class SavedFile:
    """A checkpoint of one process with its experts in memory: weights (`model`) and moments.

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
        """Copies all but experts into tensors, by the names of the whole model."""
        for name, tensor in named.items():
            tensor.copy_(self._kinds[kind][name])

    def expert(self, kind: str, site: str, expert: int, layout: RecordLayout) -> dict[str, Tensor]:
        """An expert's tensors by the names of its stacks; `site` is the path of its module."""
        named = self._kinds[kind]
        return {t.name: named[f"{site}.{t.name}"][expert] for t in layout.tensors}


class SavedParts:
    """As `SavedFile`, of several processes; reads one expert after another."""

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


def _take_off_memory(
    training: OffloadedTraining, model: LanguageModel, saved: SavedFile | SavedParts
) -> None:
    """Loads a checkpoint with experts in memory; each process loads its own experts.

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
        # every expert has taken these steps
        "rates": [0.0] * saved.steps,
        "scales": [1.0] * saved.steps,
        "last_norm": 0.0 if saved.steps else None,
        "loss_scale": training.optimizer.loss_scale.state_dict(),
    }
    training.optimizer.load_state_dict(past)
