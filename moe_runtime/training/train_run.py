"""From a configuration to a run that can begin: text, tokens, model, optimizer, folders.

A run's folder holds `checkpoints/`, `metrics.jsonl`, `data/` (encoded text), `tokenizer/` (if it
was trained), `tensorboard/` (if asked for) and at the end `model/` (the Hugging Face checkpoint)
and `summary.json`.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.files import make_folders
from moe_runtime.kernels.operands import find_device
from moe_runtime.models.lm.blocks import check_experts
from moe_runtime.models.lm.export import export_hugging_face, import_hugging_face
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.training.checkpoint import (
    RunProgress,
    TrainingState,
    checkpoints_in,
    load_checkpoint,
    named_checkpoint,
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
from moe_runtime.training.forms import (
    in_memory,
    is_off_memory,
    saved_in_memory,
    take_off_memory,
)
from moe_runtime.training.loop import Trainer
from moe_runtime.training.offload.checkpoint import remove_left_behind, remove_own_files
from moe_runtime.training.offload.entry import find_sites
from moe_runtime.training.offload.offloaded_training import OffloadedTraining
from moe_runtime.training.optimizer import Optimizer, state_order
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
from moe_runtime.training.sharded import ShardedCheckpoints, whole_model
from moe_runtime.training.snapshots import Snapshots
from moe_runtime.training.tracing import TrainingTrace, open_trace, signature_of_config
from moe_runtime.training.train_plan import (
    StreamedInit,
    build_model,
    offloaded_optimizer,
    whole_run,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Preparation(PreparedRun):
    """A run of a new model.

    Attributes:
        config: with the vocabulary of the tokenizer.
        folder: what relative paths start from.
        first_experts: where the first weights of offloaded experts come from.
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
        on_stage: called with a word on what is being done.
        keeps_text: the tokenizer and what it encodes are written to the run's folder.
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
    # A run that goes on has its weights from its own checkpoint.
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
) -> Trainer:
    """A trainer at the beginning of the run, or at its last checkpoint.

    Args:
        resume: go on from the newest checkpoint; without one, begin.
        reschedule: the number of steps, the learning rate's course and the short sequences may be
            others than before; the steps to come follow the new ones.
        ranks: the processes that train together; their number may be another one than before.
    """
    ranks = ranks or OneRank()
    if ranks.size > 1:
        ranks.require_shared(preparation.output)
    trained = {name: p for name, p in preparation.model.named_parameters() if p.requires_grad}
    run = preparation.config.run
    shards = snapshots = newest = saved = take = None
    names = state_order(trained)
    if run.host_memory is None:
        ranks.spread(preparation.model)
        optimizer = Optimizer(preparation.model, preparation.config.optimizer, ranks)
        shards = ShardedCheckpoints(preparation.model, optimizer, ranks, names)
        makes = run.lost_stage == "neighbours"
        snapshots = Snapshots(preparation.output, shards, ranks, approximates=makes)
        if run.snapshot_every:
            snapshots.require_memory()
        newest = snapshots.find()
        last, state = preparation.find_state(resume=resume, reschedule=reschedule, snapshot=newest)
        if last is not None and state is not None and is_off_memory(state):
            whole = _into_memory(preparation, last, state, names, ranks)
            take = partial(shards.take, whole)
    else:
        last, state = preparation.find_state(resume=resume, reschedule=reschedule)
        if last is not None and state is not None and not is_off_memory(state):
            with named_checkpoint(last):
                saved = saved_in_memory(last, state, preparation.model, names)
        optimizer = _offloaded_optimizer(preparation, ranks, resumes=state is not None)
    first_step = 0 if state is None else state.step
    trainer = Trainer(
        preparation,
        preparation.model,
        optimizer,
        sinks=preparation.open_sinks(state) if ranks.rank == 0 else (),
        ranks=ranks,
        shards=shards if ranks.size > 1 else None,
        snapshots=snapshots,
        trace=_open_trace(preparation, ranks, first_step),
    )
    if last is not None and state is not None:
        if saved is not None:
            assert isinstance(optimizer, OffloadedTraining), "its experts are off memory"
            take = partial(take_off_memory, optimizer, preparation.model, saved)
        trainer.resume(last, state, shards, take=take)
    return trainer


def _into_memory(
    preparation: Preparation, last: Path, state: RunProgress, names: list[str], ranks: OneRank
) -> TrainingState:
    """A checkpoint that names versions of experts as one that has them; by one process after
    another, as each brings them together in files."""
    assert isinstance(state, TrainingState), "only files of one process name versions"
    found = state
    for rank in range(ranks.size):
        if rank == ranks.rank:
            with named_checkpoint(last):
                found = in_memory(preparation.config, state, preparation.storage, names)
        ranks.barrier()
    return found


def finish(preparation: Preparation, trainer: Trainer, *, export: bool) -> dict[str, Any]:
    """Exports the model into `model/`, if asked, and writes `summary.json`; returns the summary.

    Of several processes, the first one does it, after the last step.
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
    """Of a run that began with its experts off memory, once no checkpoint names them any more."""
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
        return is_off_memory(load_checkpoint(path))
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
