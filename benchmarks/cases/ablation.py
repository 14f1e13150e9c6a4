"""The case ``ablation``: variants of a training configuration, trained with the same seeds.

A repetition trains a variant with the next seed in a temporary folder, as ``moe-runtime train``
does. All variants are checked before the first training.
"""

import contextlib
import dataclasses
import json
import math
import tempfile
import tomllib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from moe_runtime.benchmarks import suite
from moe_runtime.errors import MoERuntimeError, named_failure
from moe_runtime.files import read_toml, remove_or_warn
from moe_runtime.research.runs import equip
from moe_runtime.training import config_tree
from moe_runtime.training.metrics import EvaluationRecord, Record, StepRecord
from moe_runtime.training.offload.checkpoint import remove_own_files
from moe_runtime.training.offload.entry import expert_parameters, find_sites
from moe_runtime.training.ranks import OneRank
from moe_runtime.training.run_config import TrainConfig
from moe_runtime.training.train_plan import offload_plan
from moe_runtime.training.train_run import Preparation, prepare, start

BASE = "as configured"
_OVERWRITTEN = {
    **dict.fromkeys(
        ("run.output", "run.tensorboard", "run.trace"), "nothing is kept of a training"
    ),
    "run.evaluate_every": "held-out text is measured after the last step alone",
    "run.checkpoint_every": "no training goes on from a checkpoint",
    "parallel": "one process trains",
}
"""Keys that are equal in all trainings, and why."""
_STEP_METRICS = ("loss", "max_load", "dropped_share", "read_bytes", "written_bytes")
METRICS = {
    "loss": suite.Metric("nats"),
    "held_out_loss": suite.Metric("nats"),
    "max_load": suite.Metric("share"),
    "dropped_share": suite.Metric("share"),
    "state_bytes_per_parameter": suite.Metric("bytes"),
    "activation_bytes": suite.Metric("bytes"),
    "read_bytes": suite.Metric("bytes"),
    "written_bytes": suite.Metric("bytes"),
    "tokens_per_s": suite.Metric("tokens/s", "more"),
}
"""Step metrics are means over the last fifth of the steps; states are those of offloaded experts.

Activations are the most that a backward pass of these steps needs, with experts in memory.
"""


@dataclass(frozen=True, kw_only=True)
class Variant:
    name: str
    config: TrainConfig
    changes: Mapping[str, Any]


def read_variants(
    path: Path, vary: Sequence[str] = (), *, steps_of: Callable[[int], int] | None = None
) -> list[Variant]:
    """Read a configuration with one variant per table ``[variants.NAME]`` and per value."""
    tree = read_toml(path)
    tables = tree.pop("variants", {})
    with _blamed(BASE, path):
        configured = config_tree.build_tree(TrainConfig, tree).run.steps
        config_tree.set_key(
            tree, "run.steps", configured if steps_of is None else steps_of(configured)
        )
    if not isinstance(tables, dict):
        raise ValueError(f"{path}: variants must be tables [variants.NAME], got {tables!r}")
    asked = [*tables.items(), *(one for words in vary for one in _changes(words))]
    if not asked:
        raise ValueError(
            f"{path}: nothing to compare with; give --vary KEY=VALUE,VALUE or tables "
            "[variants.NAME] in the file"
        )
    found: dict[str, Variant] = {}
    for name, changes in [(BASE, {}), *asked]:
        if not isinstance(changes, dict):
            raise ValueError(f"{path}: variants.{name} must be a table, got {changes!r}")
        if name in found:
            raise ValueError(f"{path}: variant {name!r} is asked for twice")
        with _blamed(name, path):
            config = config_tree.build_tree(TrainConfig, config_tree.lay_over(tree, changes))
            _check_changes(changes, has_steps=steps_of is not None)
        found[name] = Variant(name=name, config=config, changes=changes)
    return list(found.values())


def _check_changes(changes: Mapping[str, Any], *, has_steps: bool) -> None:
    """Refuse keys that have no effect here."""
    run = [f"run.{key}" for key in changes.get("run", {})]
    for key in [*changes, *run]:
        if key in _OVERWRITTEN:
            raise ValueError(f"{key} changes nothing here: {_OVERWRITTEN[key]}; leave it out")
    if has_steps and "run.steps" in run:
        raise ValueError("run.steps varies: leave out --steps and --quick, or this variant")


def _changes(words: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The names and tables of the variants that one ``--vary`` names."""
    key, text = config_tree.split_setting(words)
    try:
        values = tomllib.loads(f"value = [{text}]")["value"]
    except tomllib.TOMLDecodeError:
        values = [config_tree.toml_value(one) for one in text.split(",")]
    if not values:
        raise ValueError(f"--vary: expected KEY=VALUE,VALUE, got {words!r} without a value")
    for value in values:
        table: dict[str, Any] = {}
        config_tree.set_key(table, key, value)
        shown = value if isinstance(value, str) else json.dumps(value, default=str)
        yield f"{key}={shown}", table


@contextlib.contextmanager
def _blamed(name: str, path: Path | None = None) -> Iterator[None]:
    """Add the names of the file and the variant to a configuration error."""
    try:
        yield
    except (ValueError, MoERuntimeError) as error:
        file = "" if path is None else f"{path}: "
        variant = "" if name == BASE else f"variant {name!r}: "
        raise ValueError(f"{file}{variant}{error}") from None


class _Kept:
    """A tensor that autograd keeps; counted until it is freed."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # the graph that keeps it must not be kept by it


class KeptActivations:
    """Counts bytes that autograd keeps for backward passes: whole storages, each once.

    Attributes:
        most: bytes at any time, without the model's parameters and buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        own = [*model.parameters(), *model.buffers()]
        self._own = {tensor.untyped_storage()._cdata for tensor in own}
        self._held = Counter[int]()
        self._now = self.most = 0

    def counting(self) -> contextlib.AbstractContextManager[object]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor: Tensor) -> _Kept:
        kept, storage = _Kept(tensor), tensor.untyped_storage()
        if storage._cdata not in self._own:
            self._add(storage._cdata, storage.nbytes(), 1)
            weakref.finalize(kept, self._add, storage._cdata, storage.nbytes(), -1).atexit = False
        return kept

    def _add(self, storage: int, num_bytes: int, times: int) -> None:
        before = self._held[storage] > 0
        self._held[storage] += times
        self._now += num_bytes * ((self._held[storage] > 0) - before)
        self.most = max(self.most, self._now)


class TrainedVariant(suite.BenchSystem):
    """A variant under training; its losses are compared with the base configuration's."""

    def __init__(
        self,
        variant: Variant,
        place: Path,
        output: Path,
        storage: Path | None,
        num_threads: int,
        is_stopping: Callable[[], bool],
    ) -> None:
        """Check that a run can be prepared, as `moe-runtime train --dry-run` does."""
        super().__init__(variant.name)
        self._variant, self._place = variant, place
        self.losses: list[list[float | None]] = []
        self._output, self._storage, self._is_stopping = output, storage, is_stopping
        self._num_threads = num_threads
        with _blamed(self.name):
            preparation, _ = equip(self._prepare(0))
            self._state_bytes = _state_bytes(preparation)
        self.device = preparation.device

    def repeat(self) -> Mapping[str, suite.Number]:
        records: list[Record] = []
        with suite.peer_failures(MoERuntimeError, OSError):
            is_complete, activation_bytes = self._train(records)
        if not is_complete:
            raise suite.StoppedRepetitionError(f"{self.name}: stopped")
        steps = [one for one in records if isinstance(one, StepRecord)]
        held_out = [one.held_out_mean for one in records if isinstance(one, EvaluationRecord)]
        self.losses.append([one.loss for one in steps])
        last = steps[-_num_last(len(steps)) :]
        found = {
            **{name: _mean_of(last, name) for name in _STEP_METRICS},
            "held_out_loss": held_out[-1] if held_out else None,
            "state_bytes_per_parameter": self._state_bytes,
            "activation_bytes": activation_bytes,
            "tokens_per_s": steps[-1].tokens / sum(one.step_s for one in steps),
        }
        return {name: value for name, value in found.items() if value is not None}

    def compare(self, base: "TrainedVariant") -> None:
        """Count the losses that equal another variant's, over the seeds that both have."""
        for own, others in zip(self.losses, base.losses, strict=False):
            pairs = list(zip(own, others, strict=False))
            self.compared += len(pairs)
            self.equal += sum(one == other for one, other in pairs)

    def _prepare(self, number: int) -> Preparation:
        config = self._variant.config
        # Another variant may have set them for the whole process.
        torch.set_num_threads(self._num_threads)
        run = replace(
            config.run,
            output=self._output,
            storage_dir=self._storage,
            seed=config.run.seed + number,
            evaluate_every=0,
            checkpoint_every=0,
            tensorboard=False,
            trace=None,
        )
        return prepare(replace(config, run=run), self._place)

    def _train(self, records: list[Record]) -> tuple[bool, int | None]:
        """Train one run and append its records; return whether it completed, and activations."""
        preparation, make = equip(self._prepare(len(self.losses)))
        run = preparation.config.run
        uncounted = run.steps - _num_last(run.steps)
        try:
            with (
                contextlib.closing(
                    start(preparation, resume=False, make_optimizer=make)
                ) as trainer,
                contextlib.ExitStack() as counted,
            ):
                kept = KeptActivations(preparation.model) if run.host_memory is None else None

                def count_from(step: int) -> None:
                    if step == uncounted and kept is not None:
                        counted.enter_context(kept.counting())

                def note(record: Record) -> None:
                    records.append(record)
                    if isinstance(record, StepRecord):
                        count_from(record.step)

                count_from(0)
                is_complete = trainer.train(should_stop=self._is_stopping, on_record=note)
                return is_complete, kept and kept.most
        finally:
            # The next run reads the same encoded text, and nothing else.
            remove_or_warn(preparation.checkpoints, "no run goes on from it")
            if self._storage is not None:
                remove_own_files(self._storage)


def _state_bytes(preparation: Preparation) -> float | None:
    """Bytes of state per parameter in its tier; None unless experts are offloaded."""
    config, model = preparation.config, preparation.model
    if config.run.host_memory is None:
        return None
    plan = offload_plan(config, model, OneRank(), preparation.device)
    return plan["disk_bytes"] / sum(p.numel() for p in expert_parameters(find_sites(model)))


def _num_last(num_steps: int) -> int:
    """The last fifth of the steps, of which metrics are."""
    return max(1, num_steps // 5)


def _mean_of(records: Sequence[StepRecord], name: str) -> float | None:
    values = [value for one in records if (value := getattr(one, name)) is not None]
    return fmean(values) if values else None


def _kept(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by dotted name; values without a JSON form become strings."""
    return json.loads(
        json.dumps(dict(config_tree.leaves(tree, "")), default=str), parse_constant=str
    )


@contextlib.contextmanager
def _systems(
    variants: Sequence[Variant], place: Path, is_stopping: Callable[[], bool]
) -> Iterator[list[TrainedVariant]]:
    systems: list[TrainedVariant] = []
    texts: list[Any] = []
    num_threads = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, num_threads)
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for variant in variants:
            if systems and is_stopping():
                break
            config, storage = variant.config, None
            # Variants of one text share its encoding.
            text = config.tokenizer, config.data
            if text not in texts:
                texts.append(text)
            if config.run.host_memory is not None:
                disk = place / (config.run.storage_dir or root)
                with _blamed(variant.name), named_failure(disk, "offloaded experts' folder"):
                    storage = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=disk)))
            output = root / f"text-{texts.index(text)}"
            one = TrainedVariant(variant, place, output, storage, num_threads, is_stopping)
            systems.append(one)
        yield systems


def measure_ablation(
    variants: Sequence[Variant], place: Path, rules: suite.Rules, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Train every variant with every seed; return the content of a results file."""
    # Every seed runs, however close the losses are.
    rules = replace(rules, least=rules.most, precision=0.0, max_s=math.inf)
    with _systems(variants, place, rules.is_stopping) as systems:
        found, ended = suite.run_in_turn(systems, rules)
    for one in systems[1:]:
        one.compare(systems[0])
    config = variants[0].config
    about = {
        "steps": config.run.steps,
        "sequences": config.data.sequences_per_step,
        "context": config.data.context,
        "seeds": [config.run.seed + number for number in range(rules.most)],
        "device": str(systems[0].device),
        "num_threads": config.run.threads or torch.get_num_threads(),
        "configuration": _kept(dataclasses.asdict(config)),
        "variants": {one.name: _kept(one.changes) for one in variants[1:]},
    }
    measured = [suite.describe_compared(one, found[one.name], METRICS) for one in systems]
    return suite.make_results("ablation", {**settings, **about}, ended, measured)
