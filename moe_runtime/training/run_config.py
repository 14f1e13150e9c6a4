"""The configuration of a training run: a frozen tree, read from one TOML file."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from moe_runtime.models.lm.config import LanguageModelConfig
from moe_runtime.parallel.communication.wire import WireName
from moe_runtime.training.config_tree import FILE_NAME
from moe_runtime.training.offload.activations import Activations
from moe_runtime.training.offload.adamw import AdamW, Untouched
from moe_runtime.training.offload.records import MomentStorage

Precision = Literal["float32", "bfloat16"]
PipelineSchedule = Literal["1f1b", "gpipe", "zero_bubble", "zbv"]
ExchangeName = Literal["flat", "hierarchical", "panels", "auto"]
ExpertPlaces = Literal["static", "rebalanced", "sparse", "switching", "auto"]

MOST_THREADS, MOST_WORDS = 4096, 1 << 24
"""More threads do not start, and a larger vocabulary's tables do not fit in memory."""


def _at_least(least: int, config: Any, *names: str) -> None:
    for name in names:
        if not getattr(config, name) >= least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(config, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """A body of text and its share of the training tokens.

    Attributes:
        files: paths or glob patterns of text files, relative to the configuration file.
        weight: share of the training windows, relative to the other sources; 0 in all sources
            mixes them by size.
        held_out_files: files that are measured and never trained on. Without any,
            `held_out_share` of the documents is held out.
    """

    files: tuple[str, ...]
    weight: float = 0.0
    held_out_files: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("files must name at least one file or pattern")
        if not (self.weight >= 0 and math.isfinite(self.weight)):
            raise ValueError(f"weight must be at least 0, got {self.weight}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """The tokenizer: from a folder, or trained on the text of the run.

    Attributes:
        path: folder of a Hugging Face tokenizer, relative to the configuration file.
        vocab_size: without a path: entries of a byte-level BPE trained on the training text.
    """

    path: Path | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.vocab_size is None):
            raise ValueError("give either path (a tokenizer's folder) or vocab_size (to train one)")
        if self.vocab_size is not None and not 260 <= self.vocab_size <= MOST_WORDS:
            raise ValueError(
                "vocab_size must be at least 260 (256 bytes and the special tokens) and at most "
                f"{MOST_WORDS}, got {self.vocab_size}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Text, its division into documents, and the batches of a step.

    Attributes:
        sources: the bodies of text, by name.
        context: tokens that a sequence predicts.
        tokens_per_step: tokens of one optimizer step; a multiple of `context`.
        micro_batches: parts of a step, computed one after another.
        held_out_share: share of the documents that is not trained on.
        document_separator: text between the documents of a file; without it, a file is one.
        short_context: length of sequences in the first steps, a divisor of `context`; 0 for none.
        short_share: share of the steps with short sequences.
    """

    sources: Mapping[str, SourceConfig]
    context: int
    tokens_per_step: int
    micro_batches: int = 1
    held_out_share: float = 0.05
    document_separator: str | None = None
    short_context: int = 0
    short_share: float = 0.0

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources must name at least one body of text")
        _at_least(1, self, "context", "tokens_per_step", "micro_batches")
        if self.tokens_per_step % self.context:
            raise ValueError(
                f"tokens_per_step ({self.tokens_per_step}) must be a multiple of context "
                f"({self.context})"
            )
        if self.sequences_per_step % self.micro_batches:
            raise ValueError(
                f"micro_batches must divide the {self.sequences_per_step} sequences of a step, "
                f"got {self.micro_batches}"
            )
        if not 0 <= self.held_out_share < 1:
            raise ValueError(f"held_out_share must lie in [0, 1), got {self.held_out_share}")
        if self.document_separator == "":
            raise ValueError("document_separator must not be empty")
        if self.short_context < 0 or (self.short_context and self.context % self.short_context):
            raise ValueError(
                f"short_context must divide context ({self.context}), got {self.short_context}"
            )
        if not 0 <= self.short_share <= 1:
            raise ValueError(f"short_share must lie in [0, 1], got {self.short_share}")

    @property
    def sequences_per_step(self) -> int:
        return self.tokens_per_step // self.context

    @property
    def windows_per_micro_batch(self) -> int:
        """Sequences of full length in a micro-batch."""
        return self.sequences_per_step // self.micro_batches

    def context_at(self, step: int, num_steps: int) -> int:
        """Tokens of a sequence at a step: the short context first, then the full one."""
        is_short = self.short_context and step < self.short_share * num_steps
        return self.short_context if is_short else self.context


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW, its schedule and its clipping.

    Attributes:
        peak_rate: learning rate at the end of the warm-up.
        warmup_steps: steps of linear warm-up.
        final_share: share of the peak at the end of the cosine, after the last step.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of matrices; norms and biases do not decay.
        clip_norm: largest global norm of the gradients; 0 does not clip.
    """

    peak_rate: float
    warmup_steps: int = 0
    final_share: float = 0.1
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        if not (self.peak_rate > 0 and math.isfinite(self.peak_rate)):
            raise ValueError(f"peak_rate must be positive, got {self.peak_rate}")
        _at_least(0, self, "warmup_steps", "weight_decay", "clip_norm")
        if not 0 <= self.final_share <= 1:
            raise ValueError(f"final_share must lie in [0, 1], got {self.final_share}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {list(self.betas)}")
        if not self.eps > 0:
            raise ValueError(f"eps must be positive, got {self.eps}")


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """Training of experts off memory; all but `activations` change the results.

    Attributes:
        moments: format of experts' moments: full, bf16 or fp8 (COAT).
        galore_rank: rank of the subspace of the moments of experts' matrices; 0 for none.
        galore_scale: factor of the steps from a subspace.
        galore_refresh: an expert's updates after which its subspaces are chosen again.
        delayed_update_after: steps after which experts' updates are one step late; omitted, never.
        activations: keep, recompute or swap the experts' activations between forward and backward
            pass; model follows `model.moe.recompute`, auto takes the fastest by the measured first
            step. Not with `run.recompute`.
        untouched: experts without tokens: dense_exact moves them as AdamW does, sparse_skip leaves
            them alone.
    """

    moments: MomentStorage = "full"
    galore_rank: int = 0
    galore_scale: float = 0.25
    galore_refresh: int = 200
    delayed_update_after: int | None = None
    activations: Activations = "model"
    untouched: Untouched = "dense_exact"

    def __post_init__(self) -> None:
        # AdamW checks its settings
        AdamW(**self.optimizer_options())

    def optimizer_options(self) -> dict[str, Any]:
        options = dataclasses.asdict(self)
        del options["activations"]
        return options


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Length, places and settings of the run.

    Attributes:
        output: folder of the run, relative to the configuration file.
        steps: optimizer steps.
        start_from: folder of a Hugging Face checkpoint of the model's architecture with the first
            weights; relative to the configuration file.
        seed: of the initial weights, the order of the data and the noise of gates.
        precision: dtype of the matrix products; weights and optimizer states stay float32.
        device: auto, cpu, cuda or cuda:N. When omitted, auto for `train` and cpu for
            `finetune`.
        threads: threads of torch; 0 for torch's choice.
        recompute: keep a block's input instead of its activations, and compute the block twice.
        host_memory: budget for experts, their optimizer states and everything else: a size such as
            4GiB, a share of free memory, or auto. Experts beyond it live in `storage_dir`.
        device_memory: budget on the GPU, for a model there.
        storage_dir: existing folder on a fast disk for the experts; the run's own when omitted.
        offload: training of the experts off memory; only with a `host_memory`.
        compile: fuse the blocks by `torch.compile`; the first steps take longer.
        log_every: steps between progress lines.
        evaluate_every: steps between measurements on held-out text; 0 measures at the end only.
        evaluate_tokens: most held-out tokens measured of each source.
        patience: the run ends after so many measurements in a row without a better one; 0 never.
        checkpoint_every: steps between checkpoints; 0 writes one at the end only.
        keep_checkpoints: number of newest checkpoints to keep.
        snapshot_every: steps between snapshots in memory; 0 takes none. `--resume` uses a snapshot
            that is newer than the last checkpoint. With several machines, each process's part is
            in the memory of two.
        lost_stage: for a lost machine's stage of a pipeline: refuse keeps a copy of each snapshot
            on another machine. The lossy neighbours keeps none: each lost layer becomes a mean of
            the nearest layers (CheckFree). It cannot replace the first and last stages, nor the
            machine of rank 0, which has the snapshot's index. For a `pp` of at least 3, not zbv.
        tensorboard: also write TensorBoard's event files.
        trace: file for the gates' choices, for `moe-runtime report` and `replay`; relative to the
            configuration file.
        trace_steps: steps to record from the beginning of this run or its resumption; 0 for all.
        export_dtype: dtype of the exported Hugging Face checkpoint.
    """

    output: Path
    steps: int
    start_from: Path | None = None
    seed: int = 0
    precision: Precision = "float32"
    device: str | None = None
    threads: int = 0
    recompute: bool = False
    compile: bool = False
    host_memory: str | None = None
    device_memory: str = "auto"
    storage_dir: Path | None = None
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    log_every: int = 10
    evaluate_every: int = 0
    evaluate_tokens: int = 16_384
    patience: int = 0
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    snapshot_every: int = 0
    lost_stage: Literal["refuse", "neighbours"] = "refuse"
    tensorboard: bool = False
    trace: Annotated[Path, FILE_NAME] | None = None
    trace_steps: int = 100
    export_dtype: Precision = "bfloat16"

    def __post_init__(self) -> None:
        _at_least(1, self, "steps", "log_every", "evaluate_tokens", "keep_checkpoints")
        _at_least(0, self, "seed", "threads", "evaluate_every", "checkpoint_every", "trace_steps")
        _at_least(0, self, "patience", "snapshot_every")
        if self.patience and not self.evaluate_every:
            raise ValueError("patience counts measurements of held-out text; give evaluate_every")
        for name, most in (("seed", 2**63 - 1), ("threads", MOST_THREADS)):
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be at most {most}, got {getattr(self, name)}")
        if self.host_memory is not None and (self.compile or self.start_from is not None):
            other = "compile" if self.compile else "start_from"
            raise ValueError(f"host_memory cannot be combined with {other}; leave one of them out")
        if self.trace is not None and self.compile:
            raise ValueError("trace listens at modules that compile fuses; leave one of them out")
        if self.host_memory is not None and self.snapshot_every:
            raise ValueError(
                "snapshot_every is for runs in memory: with a host_memory, checkpoints name the "
                "versions of experts and cost little; give checkpoint_every instead"
            )
        if self.lost_stage != "refuse" and not self.snapshot_every:
            raise ValueError("lost_stage is for runs with snapshots; give snapshot_every")
        if self.host_memory is None and self.storage_dir is not None:
            raise ValueError("storage_dir is for runs with a host_memory; give one")
        if self.host_memory is None and self.offload != OffloadConfig():
            raise ValueError("offload is for runs with a host_memory; give one")
        if self.recompute and self.offload.activations != "model":
            raise ValueError(
                "recompute computes whole blocks again, experts included; leave it out, or "
                "offload.activations"
            )


class LoopConfig(Protocol):
    """The configuration of a training loop; `TrainConfig` is one."""

    @property
    def run(self) -> RunConfig: ...

    @property
    def data(self) -> DataConfig: ...

    @property
    def optimizer(self) -> OptimizerConfig: ...


_REBALANCE_EVERY = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Division of the model among the processes of `torchrun`; one process has the whole model.

    Only a lossy `wire` changes the results: a run may resume with another number of processes.

    Attributes:
        ep: parts of a layer's experts; 0 for as many as fit. With fewer parts than processes,
            several processes have a copy of each.
        etp: slices of every expert, each on its own process; divides
            `model.moe.intermediate_size`.
        tp: processes that divide the heads of attention and the width of dense feed-forward
            networks; divides `model.num_kv_heads`. They share micro-batches.
        cp: processes that divide each sequence; they share micro-batches too.
        pp: stages of a pipeline: consecutive layers, each stage with its own processes, which the
            keys above divide further; at most `model.num_layers`.
        schedule: order of a pipeline's micro-batches: 1f1b (one forward, one backward: a stage
            keeps the activations of at most `pp` of them) or gpipe (all forward, then all
            backward). Two others compute gradients of weights instead of waiting: zero_bubble
            (ZB1P), and zbv, which gives a process two stages, equally far from both ends.
        offload: share of a stage's micro-batches whose activations lie in a file of the run's
            folder until their backward pass, first those that wait longest (PipeOffload). For
            1f1b and gpipe, without `tp` and `zero`.
        zero: parts of the dense model that FSDP2 shards over the processes, besides `tp` and `pp`:
            0 nothing, 1 the optimizer's states, 2 gradients too (reduced for each micro-batch; with
            `pp`, 1 does this too), 3 parameters too.
        overlap: chunks of the rows to experts, one in transfer while another is computed; auto
            takes 1, 2, 4 or 8 by a simulation with measured links, products and loads.
        transport: flat, one exchange of all processes; hierarchical, within a machine first and
            then between machines; panels, like flat, but results return in groups of columns, as
            many as `overlap` but at least two; auto, one of the first two by the same simulation.
        ranks_per_node: processes of a machine for `hierarchical`; 0 counts them.
        wire: format of rows in transfer: exact, or the lossy bf16 and fp8.
        placement: map of `moe-runtime place` with the experts of each process, for as many devices
            as `ep`; relative to the configuration file. Omitted, each has an equal run of experts.
        experts: places of experts: static; rebalanced moves them and their states by load (EPLB);
            sparse copies hot ones for one pass (Hecate); switching gathers experts or sends rows,
            whichever is cheaper on the measured link (Tutel); auto takes switching if gathering is
            faster, and otherwise rebalanced if a move saves more time than it takes. With `copies`,
            auto never takes switching.
        copies: additional slots for a layer's experts (rebalanced), or experts of which a process
            may get copies (sparse).
        rebalance_every: steps between checks of the loads, also for auto. No checks with switching,
            sparse or placed experts, with `etp` above 1, or with compile.
        timeout_s: seconds to wait for another process before an error names it.
    """

    ep: int = 0
    etp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    schedule: PipelineSchedule = "1f1b"
    offload: float = 0.0
    zero: int = 0
    overlap: int | Literal["auto"] = 1
    transport: ExchangeName = "flat"
    ranks_per_node: int = 0
    wire: WireName = "exact"
    placement: Path | None = None
    experts: ExpertPlaces = "static"
    copies: int = 0
    rebalance_every: int = _REBALANCE_EVERY
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        _at_least(0, self, "ep", "zero", "ranks_per_node", "copies")
        _at_least(1, self, "etp", "tp", "cp", "pp", "rebalance_every")
        if self.overlap != "auto":
            _at_least(1, self, "overlap")
        if self.zero > 3:
            raise ValueError(f"zero must be at most 3, got {self.zero}")
        if not 0 <= self.offload <= 1:
            raise ValueError(f"offload must lie in [0, 1], got {self.offload}")
        is_plain = self.pp > 1 and self.schedule in ("1f1b", "gpipe") and self.tp == 1
        if self.offload and not (is_plain and self.zero == 0):
            raise ValueError(
                "offload is for a pipeline: give pp above 1 and the schedule 1f1b or gpipe, and "
                "leave tp and zero out"
            )
        self._refuse_exchanges()
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")

    @property
    def is_auto(self) -> bool:
        return "auto" in (self.overlap, self.transport, self.experts)

    def resolved(
        self, degree: int, is_hierarchical: bool, experts: ExpertPlaces
    ) -> "ParallelConfig":
        """The same with the choices of "auto"."""
        changes: dict[str, Any] = {"experts": experts}
        if self.overlap == "auto":
            changes["overlap"] = degree
        if self.transport == "auto":
            changes["transport"] = "hierarchical" if is_hierarchical else "flat"
        if experts not in ("rebalanced", "sparse"):
            changes["copies"] = 0
        if experts != "rebalanced":
            changes["rebalance_every"] = _REBALANCE_EVERY
        return dataclasses.replace(self, **changes)

    def refuse_alone(self) -> None:
        """Refuses keys that divide a model, for one process."""
        given = ("ep", "etp", "tp", "cp", "pp")
        divided = [f"{n} ({getattr(self, n)})" for n in given if getattr(self, n) > 1]
        if self.placement is not None:
            divided.append(f"placement ({self.placement})")
        if divided:
            raise ValueError(
                f"parallel.{divided[0]} divides a model between processes, and this is one: start "
                "it with torchrun, or leave it out"
            )

    def _refuse_exchanges(self) -> None:
        kind = self.experts
        if self.transport == "panels" and self.overlap == "auto":
            raise ValueError("overlap auto is for the transports flat and hierarchical, not panels")
        if self.transport == "panels" and kind in ("sparse", "switching"):
            raise ValueError(
                f"transport panels needs experts that stay where they are, not {kind} ones; leave "
                "one of them out"
            )
        if kind == "switching" and self.wire != "exact":
            raise ValueError(
                f"experts that are switching send rows as they are, got the wire {self.wire}"
            )
        if kind != "static" and self.placement is not None:
            raise ValueError(
                f"placement says where experts lie, and {kind} ones lie elsewhere from step to "
                "step; leave one of them out"
            )
        if kind in ("rebalanced", "sparse") and self.etp > 1:
            raise ValueError(
                f"experts that are {kind} are whole, etp ({self.etp}) cuts them; leave one out"
            )
        if self.placement is not None and self.etp > 1:
            raise ValueError(
                f"placement places whole experts, etp ({self.etp}) cuts them; leave one out"
            )
        if self.copies and kind not in ("rebalanced", "sparse", "auto"):
            raise ValueError(f"copies are for experts that are rebalanced or sparse, not {kind}")
        looks = self.is_auto and kind in ("static", "auto")
        looks = looks and self.placement is None and self.etp == 1
        if self.rebalance_every != _REBALANCE_EVERY and not (kind == "rebalanced" or looks):
            raise ValueError(
                f"rebalance_every is for experts that are rebalanced, not {kind}, or for auto "
                f"without placement and etp; leave it out, got {self.rebalance_every}"
            )
        if kind == "sparse" and not self.copies:
            raise ValueError("experts that are sparse get copies: give copies, such as 2")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """Memory layers in the place of dense feed-forward networks; they share rows off memory.

    Attributes:
        layers: numbers of dense layers.
        keys: of each half; there are as many rows as pairs.
        heads: queries of a token.
        top_k: rows of a query.
        key_size: width of a query; even.
    """

    layers: tuple[int, ...]
    keys: int = 64
    heads: int = 2
    top_k: int = 8
    key_size: int = 32

    def __post_init__(self) -> None:
        _at_least(1, self, "keys", "heads", "top_k")
        _at_least(2, self, "key_size")
        if not self.layers or len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers must name some layers once, got {list(self.layers)}")
        if self.key_size % 2:
            raise ValueError(f"key_size must be even, got {self.key_size}")
        if self.top_k > self.keys:
            raise ValueError(f"top_k ({self.top_k}) must be at most keys ({self.keys})")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecompileConfig:
    """Alterations of the model between steps; as it is, experts run in buffers of one size.

    Attributes:
        adapt_capacity: each layer's buffers follow what its gate needs, from
            `model.moe.capacity_factor` on.
        reuse_at: share of tokens whose experts are those of the last epoch, from which on tokens go
            where they went then; 0 never. Every epoch then has the same windows of text.
    """

    adapt_capacity: bool = False
    reuse_at: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.reuse_at <= 1:
            raise ValueError(f"reuse_at must lie in [0, 1], got {self.reuse_at}")
        if self.reuse_at and self.adapt_capacity:
            raise ValueError(
                "reuse_at and adapt_capacity do not go together; leave one of them out"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ResearchConfig:
    """Reproductions of papers (`moe_runtime.research`), for one process with experts in memory.

    All of them change what is trained. A run has one of them.

    Attributes:
        frozen_share: share of the weights of each kind that a step leaves alone: those that changed
            least when they were last trained (SlimFit). Their inputs are not kept. 0 trains all.
        memory: layers that look rows up (Memory Layers).
        recompile: triggers that alter the model between steps (DynaMoE).
    """

    frozen_share: float = 0.0
    memory: MemoryConfig | None = None
    recompile: RecompileConfig | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.__slots__ if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} do not go together; leave one of them out")
        if not 0 <= self.frozen_share < 1:
            raise ValueError(f"frozen_share must lie in [0, 1), got {self.frozen_share}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """A whole training run.

    Attributes:
        model: its architecture; `vocab_size` is the tokenizer's.
        parallel: division of the model among processes.
        research: reproductions of papers.
    """

    run: RunConfig
    model: LanguageModelConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    research: ResearchConfig = field(default_factory=ResearchConfig)

    def __post_init__(self) -> None:
        if self.data.context > self.model.max_positions:
            raise ValueError(
                f"data.context ({self.data.context}) must be at most model.max_positions "
                f"({self.model.max_positions})"
            )
        own = self.parallel
        if own.offload and self.run.recompute:
            raise ValueError(
                "run.recompute keeps no activations that parallel.offload could move; leave one of "
                "them out"
            )
        is_counted = own.experts == "rebalanced" or not self.run.compile
        if own.rebalance_every != _REBALANCE_EVERY and not is_counted:
            raise ValueError(
                "parallel.rebalance_every is for loads, which compile does not let auto count; "
                "leave one of them out"
            )
        if self.run.lost_stage != "refuse" and (own.pp < 3 or own.schedule == "zbv"):
            raise ValueError(
                "run.lost_stage rebuilds a stage between two others: give parallel.pp of at least "
                f"3 and a schedule other than zbv, got pp {own.pp} and {own.schedule}"
            )
        for name in ("host_memory", "compile", "snapshot_every") if self.is_research else ():
            if getattr(self.run, name):
                raise ValueError(f"run.{name} cannot be combined with the keys of [research]")
        memory, model = self.research.memory, self.model
        if self.research.recompile is not None and (model.moe is None or self.run.recompute):
            raise ValueError(
                "research.recompile is for models with experts, and run.recompute repeats calls of "
                "the gates; leave one of them out"
            )
        pairs = model.moe is not None and model.moe.shortcut is not None
        for layer in () if memory is None else memory.layers:
            if pairs or not 0 <= layer < model.num_layers or model.is_routed(layer):
                raise ValueError(
                    f"research.memory.layers must name dense layers of model.dense_layers, or of a "
                    f"model without experts; got {layer}"
                )

    @property
    def is_research(self) -> bool:
        return self.research != ResearchConfig()

    def may_move(self, size: int) -> bool:
        """Whether experts that `size` ranks divide can move by load."""
        own, moe = self.parallel, self.model.moe
        if size == 1 or moe is None or (moe.num_experts + own.copies) % size:
            return False
        return own.etp == 1 and not self.run.compile and own.placement is None

    def refuse_idle_copies(self, size: int) -> None:
        """Refuses copies that "auto" cannot use."""
        own = self.parallel
        if own.experts == "auto" and own.copies and not self.may_move(size):
            raise ValueError(
                f"parallel.copies ({own.copies}) need experts that move, and auto leaves them "
                "static: leave copies out, or give an ep above 1 that divides experts and copies "
                "together, etp 1 and no compile"
            )
