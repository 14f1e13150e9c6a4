"""Checkpoints of a run: whole or absent, and complete enough to resume to the same bits.

A file holds parameters, buffers, optimizer states, the position in the data, the random states and
the configuration. It is written next to its place, flushed and renamed. A reader compares every
tensor with its digest, and checks every value (`Kind`).
"""

import contextlib
import copy
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor

from moe_runtime.checkpoints.absent import TrainedElsewhere
from moe_runtime.digests import check_zip
from moe_runtime.errors import CheckpointError, blamed_on
from moe_runtime.files import make_folders, open_regular, remove_or_warn, write_atomically

_LONGEST_VALUE = 60


class Kind(NamedTuple):
    text: str
    fits: Callable[[Any], bool]

    def or_none(self) -> "Kind":
        return Kind(f"{self.text}, or None", lambda value: value is None or self.fits(value))

    def listed(self) -> "Kind":
        return Kind(
            f"a list, each {self.text}",
            lambda value: type(value) in (list, tuple) and all(map(self.fits, value)),
        )

    def named(self) -> "Kind":
        return Kind(
            f"a mapping of names, each to {self.text}",
            lambda value: (
                isinstance(value, Mapping)
                and all(isinstance(name, str) for name in value)
                and all(map(self.fits, value.values()))
            ),
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(part) for name, part in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


COUNT = Kind("an integer of at least 0", lambda value: type(value) is int and 0 <= value < 1 << 63)
NUMBER = Kind("a finite number", lambda value: type(value) in (int, float) and math.isfinite(value))
AMOUNT = Kind("a finite number of at least 0", lambda v: NUMBER.fits(v) and v >= 0)
TEXT = Kind("text", lambda value: isinstance(value, str))
TENSOR = Kind("a tensor", lambda value: isinstance(value, Tensor))
MAPPING = Kind("a mapping", lambda value: isinstance(value, Mapping))
PLAIN = Kind("plain values", _is_plain)


def require_kinds(
    values: Any, kinds: Mapping[str, Kind], what: str, *, optional: Mapping[str, Kind] | None = None
) -> None:
    """Refuses stored values of other names or kinds; `optional` names may be missing."""
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{what} must be a mapping, found {shown(values)}")
    known = {**kinds, **(optional or {})}
    if missing := kinds.keys() - values.keys():
        raise CheckpointError(f"{what} lacks {', '.join(sorted(missing))}")
    if unknown := values.keys() - known.keys():
        raise CheckpointError(f"{what} has unknown keys: {', '.join(sorted(map(shown, unknown)))}")
    for name, value in values.items():
        require_kind(value, known[name], f"{what}: {name}")


def require_kind(value: Any, kind: Kind, what: str) -> None:
    if not kind.fits(value):
        raise CheckpointError(f"{what} is {shown(value)}, expected {kind.text}")


def require_like(tensors: Mapping[str, Any], own: Mapping[str, Tensor], what: str) -> None:
    """Refuses stored tensors whose names, shapes or dtypes differ from our own."""
    require_kinds(tensors, dict.fromkeys(own, TENSOR), what)
    for name, tensor in own.items():
        found, expected = ((*t.shape, t.dtype) for t in (tensors[name], tensor))
        if found != expected:
            raise CheckpointError(f"{what}: {name} is {found}, expected {expected}")


def shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


FORMAT = 1
SHARDED_SUFFIX = ".shards"
"""Of checkpoints that several processes write together, which are folders."""
_NAME = re.compile(rf"step-(\d{{8}})(\.pt|{re.escape(SHARDED_SUFFIX)})")


def name_of_step(step: int, suffix: str = SHARDED_SUFFIX) -> str:
    return f"step-{step:08d}{suffix}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None for other names."""
    named = _NAME.fullmatch(path.name)
    return None if named is None else int(named[1])


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """The progress of a run, without its weights.

    Attributes:
        taken: windows taken from each source.
        settings: values that must be equal when the run resumes, by dotted name.
        records: digest of the run's records up to the step; empty if an older version wrote it.
    """

    step: int
    tokens: int
    elapsed_s: float
    taken: tuple[int, ...]
    random: Mapping[str, torch.Tensor]
    settings: Mapping[str, Any]
    records: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainingState(RunProgress):
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]


_KINDS = {
    "step": COUNT,
    "tokens": COUNT,
    "elapsed_s": AMOUNT,
    "taken": COUNT.listed(),
    "random": TENSOR.named(),
    "settings": PLAIN.named(),
}
_OPTIONAL = {"records": TEXT, "optimizer_steps": AMOUNT}
_STATE_KINDS = {"model": TENSOR.named(), "optimizer": MAPPING}


class BackgroundSave:
    """Writes one checkpoint at a time in another thread, while training goes on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[object] | None = None

    def start(self, job: Callable[[], object]) -> None:
        """Starts a job once the last one is done; raises that one's errors as `wait` does."""
        self.wait()
        self._under_way = self._thread.submit(job)

    @property
    def has_failed(self) -> bool:
        """Whether the last job has failed already, so that `wait` would raise."""
        job = self._under_way
        return job is not None and job.done() and job.exception() is not None

    def wait(self) -> None:
        """Waits for the last checkpoint; raises its error."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Waits for the last checkpoint; its error stays for `wait`."""
        self._thread.shutdown()


def save_checkpoint(folder: Path, state: TrainingState, *, keep: int) -> Path:
    path = folder / name_of_step(state.step, ".pt")
    content = {name: on_host(getattr(state, name)) for name in state.__dataclass_fields__}
    make_folders(folder)
    write_content(path, content)
    remove_oldest(folder, keep)
    return path


def write_content(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file that `load_content` reads; raises an `OSError` if it cannot."""
    with write_atomically(path) as file:
        output = _Output(file)
        try:
            torch.save({"format": FORMAT, **content}, cast(Any, output))
        except RuntimeError as error:
            # torch's writer hides the reason, such as a full disk
            reason = f"{path}: the checkpoint cannot be written: {error}"
            raise output.error or OSError(reason) from None


class _Output:
    """A file for torch's writer; keeps the error of a write."""

    def __init__(self, file: BinaryIO) -> None:
        self.error: OSError | None = None
        self.flush = file.flush
        self._file = file

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise


def remove_oldest(folder: Path, keep: int) -> None:
    for old in checkpoints_in(folder)[:-keep]:
        remove_or_warn(old, "there are newer checkpoints")


def checkpoints_in(folder: Path) -> list[Path]:
    """The folder's checkpoints, the oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if step_of(path) is not None)


def load_checkpoint(path: Path) -> TrainingState:
    return TrainingState(**load_content(path, TrainingState))


def load_content(path: Path, kind: type[RunProgress]) -> dict[str, Any]:
    """Reads a checkpoint file with the fields of a dataclass.

    Raises:
        CheckpointError: the file is damaged, or of another format.
    """
    damage = "the checkpoint is damaged; remove it to go on from the one before"
    with open_regular(path) as file, blamed_on(f"{path}: {damage}"):
        check_zip(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    found = content.pop("format", None) if isinstance(content, dict) else None
    if not COUNT.fits(found) or found != FORMAT:
        raise CheckpointError(f"{path}: not a training checkpoint of format {FORMAT}")
    kinds = {**_KINDS, **(_STATE_KINDS if kind is TrainingState else {})}
    require_kinds(content, kinds, f"{path}: the checkpoint", optional=_OPTIONAL)
    place = path if _NAME.fullmatch(path.name) else path.parent
    if step_of(place) not in (None, content["step"]):
        raise CheckpointError(f"{path}: is the checkpoint of step {content['step']}; rename it")
    return content


@contextlib.contextmanager
def named_checkpoint(path: Path) -> Iterator[None]:
    """Adds the name of a checkpoint to errors about its content."""
    try:
        yield
    except (ValueError, CheckpointError) as error:
        if str(path) in str(error):
            raise
        raise CheckpointError(f"{path}: {error}") from error


def check_settings(
    path: Path,
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    schedule: Collection[str] = (),
    reschedule: bool = False,
) -> None:
    """Refuses settings that differ from a checkpoint's.

    Args:
        schedule: settings that only affect further steps.
    """
    for name in sorted({*saved, *current}):
        old, new = saved.get(name), current.get(name)
        if old == new or (reschedule and name in schedule):
            continue
        way_on = ", add --reschedule" if name in schedule else ""
        raise CheckpointError(
            f"{path}: was made with {name} = {old!r}, the configuration now says {new!r}; "
            f"restore it{way_on}, or choose another output folder"
        )


def on_host(state: Any) -> Any:
    """Nested dictionaries and lists of a state, with a device's tensors copied to the host."""
    return _mapped(state, lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf)


def host_copy(state: Any) -> Any:
    """A copy of a state on the host, to be written while the original changes.

    Every tensor is copied once: a device has no room for a copy, nor the host for two. Offloaded
    experts are left out; the optimizer's state names their versions.
    """
    memo: dict[int, Any] = {}

    def copied(leaf: Any) -> Any:
        is_away = isinstance(leaf, torch.Tensor) and not leaf.is_cpu
        return leaf.cpu() if is_away else copy.deepcopy(leaf, memo)

    return _mapped(state, copied)


def _mapped(state: Any, take: Callable[[Any], Any]) -> Any:
    """The same nesting, with `take` of every leaf."""
    if isinstance(state, Mapping):
        here = [n for n, value in state.items() if not isinstance(value, TrainedElsewhere)]
        return {name: _mapped(state[name], take) for name in here}
    if type(state) in (list, tuple):
        return type(state)(_mapped(value, take) for value in state)
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        named = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        return dataclasses.replace(state, **_mapped(named, take))
    return take(state)


def random_states() -> dict[str, torch.Tensor]:
    """States of torch's generators: of the CPU and of every CUDA device in use."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for number, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"cuda:{number}"] = state
    return states


def restore_random_states(states: Mapping[str, torch.Tensor]) -> None:
    """Sets the generators to the states of `random_states`, without absent devices."""
    what = "the state of random numbers"
    own = {n: state for n, state in random_states().items() if n == "cpu" or n in states}
    require_like({name: states[name] for name in own if name in states}, own, what)
    with blamed_on(f"{what} is damaged"):
        torch.set_rng_state(states["cpu"])
        for name in own.keys() - {"cpu"}:
            torch.cuda.set_rng_state(states[name], name)
