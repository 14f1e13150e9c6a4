"""What ``bench latency`` and ``bench throughput`` measure: a checkpoint or a shape, and prompts."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_runtime.cli.console import fetch_model, say_line
from moe_runtime.files import at_home, require_not_read

if TYPE_CHECKING:
    from moe_runtime.benchmarks.suite.peer_process import PeerProgram
    from moe_runtime.benchmarks.synthetic.checkpoint_writer import OwnShape
    from moe_runtime.benchmarks.synthetic.model_shapes import ModelShape

Ids = list[list[int]]
_START_S = 300.0
# A peer may compile what it needs when it is first imported.


class AskedModel(NamedTuple):
    """What is measured.

    Attributes:
        path: of the checkpoint.
        ids: of the prompts.
        cache: a folder of this run, where runs of this project keep what they learn of the model:
            no earlier run changes a number, and later ones know nothing of it.
        gguf: the same as a GGUF file, where that was written.
        facts: its name for a results file, and what random weights are of.
        failures: by the name of a peer that cannot run: why.
    """

    path: str
    ids: Ids
    cache: Path
    facts: dict[str, Any]
    gguf: Path | None = None
    failures: Mapping[str, str | None] = {}

    def with_files(self, programs: "Sequence[PeerProgram]") -> "list[PeerProgram]":
        """Peers that read GGUF files alone, and were given none, are given that of the shape.

        This project and other versions of it are given the cache.
        """
        from moe_runtime.benchmarks.suite.peer_files import GGUF_PEERS, OURS

        return [
            replace(
                one,
                failure=self.failures.get(one.name),
                cache=self.cache if one.file.stem == OURS else None,
                settings=one.settings | {"model": str(self.gguf)}
                if self.gguf and one.file.stem in GGUF_PEERS and one.settings["model"] == self.path
                else one.settings,
            )
            for one in programs
        ]


@contextmanager
def asked_model(
    model: str | None,
    shape: str | None,
    layers: int | None,
    peers: "Sequence[PeerProgram]",
    read_ids: Callable[[str], Ids],
    *,
    keep: bool,
    output: Path | None,
) -> Iterator[AskedModel]:
    """MODEL, or what ``--shape`` stands for, whose files are there within the block.

    Args:
        model: as on the command line.
        shape, layers, keep: see the options.
        peers: read without settings of the run. Before files of a shape are written each must run
            in its environment, so that none is written for a peer that cannot.
        read_ids: gives the ids of the prompts by the tokenizer of a checkpoint's folder; of a
            shape it is called before weights are written.
        output: the results file, which may be none of those that are kept of the shape.

    Raises:
        ValueError: there is no such shape, a peer has nothing to do with one, or the output would
            replace a file of it.
        CapacityError: the disk has too little room for it.
    """
    with tempfile.TemporaryDirectory(prefix="moe-benchmark-") as folder:
        cache = Path(folder)
        if shape is None:
            assert model is not None
            path = str(fetch_model(model))
            yield AskedModel(path, read_ids(path), cache, {"model": Path(model).name})
        else:
            with _written(shape, layers, peers, read_ids, cache, keep=keep, output=output) as asked:
                yield asked


@contextmanager
def _written(
    shape: str,
    layers: int | None,
    peers: "Sequence[PeerProgram]",
    read_ids: Callable[[str], Ids],
    cache: Path,
    *,
    keep: bool,
    output: Path | None,
) -> Iterator[AskedModel]:
    """What ``--shape`` stands for."""
    from moe_runtime.benchmarks.suite.peer_files import GGUF_PEERS, require_takes_shapes
    from moe_runtime.benchmarks.suite.peer_process import files_under
    from moe_runtime.benchmarks.synthetic.checkpoint_writer import write_settings
    from moe_runtime.benchmarks.synthetic.gguf_shape import FILE_NAME, GgufShape
    from moe_runtime.benchmarks.synthetic.shape_checkpoint import shape_checkpoint, shapes_folder

    asked = _shape_of(shape, layers)
    require_takes_shapes(peers)
    require_not_read(output, "results", files_under(shapes_folder() / asked.name))
    with tempfile.TemporaryDirectory(prefix="moe-benchmark-") as folder:
        write_settings(asked, Path(folder))
        ids = read_ids(folder)
    failures = {one.name: _why_unable(one) for one in peers}
    is_gguf = isinstance(asked, GgufShape)
    needs_gguf = not is_gguf and any(
        one.file.stem in GGUF_PEERS and "model" not in one.settings and not failures[one.name]
        for one in peers
    )
    facts = {
        "model": asked.name if shape.endswith(".json") else shape,
        "layers": asked.num_layers,
        "layers_of_shape": _shape_of(shape, None).num_layers,
        "weights": "random",
    }
    with shape_checkpoint(
        asked, shapes_folder(), keep=keep, needs_gguf=needs_gguf, say=say_line
    ) as files:
        gguf = files.gguf if needs_gguf else None
        path = files.checkpoint / FILE_NAME if is_gguf else files.checkpoint
        yield AskedModel(str(path), ids, cache, facts, gguf, failures)


def _shape_of(name: str, layers: int | None) -> "ModelShape | OwnShape":
    """What ``--shape`` and ``--layers`` name.

    Raises:
        ValueError: a file says how many layers there are.
        CheckpointError: the file is no configuration.
    """
    from moe_runtime.benchmarks.synthetic.config_shape import read_config_shape
    from moe_runtime.benchmarks.synthetic.gguf_shape import GGUF_SHAPES, gguf_shape_of_name
    from moe_runtime.benchmarks.synthetic.model_shapes import shape_of_name

    if name.endswith(".json"):
        if layers is not None:
            raise ValueError(f"--layers: how many layers there are, {name} says; change it there")
        return read_config_shape(Path(at_home(name)))
    if name in GGUF_SHAPES:
        return gguf_shape_of_name(name, layers)
    return shape_of_name(name, layers)


def _why_unable(program: "PeerProgram") -> str | None:
    """Why a peer cannot run here, found out before a model is written."""
    from moe_runtime.benchmarks.suite.peer_process import why_unable

    say_line(f"{program.name}: is started once, to see that it can run")
    nothing = {"model": "model.gguf", "num_threads": 1, "max_tokens": 1, "cap_bytes": None}
    tried = replace(program, settings=nothing | program.settings)
    if reason := why_unable(tried, _START_S):
        say_line(f"{program.name}: cannot run, and is left out: {reason}")
    return reason


def require_one_model(
    model: str | None, shape: str | None, layers: int | None, *, keep: bool
) -> None:
    """Refuses MODEL and ``--shape`` together, neither, and options of a shape without one.

    Raises:
        ValueError: there is no one thing to measure.
    """
    if (model is None) == (shape is None):
        raise ValueError("expected MODEL or --shape, one of them: what is measured?")
    if shape is None and (layers is not None or keep):
        raise ValueError(f"{'--keep-shape' if keep else '--layers'} belongs to --shape")


def split_off(ids: Ids, num_new: int) -> tuple[Ids, Ids]:
    """Prompts, and the last ids of each as the text that follows it."""
    return [one[:-num_new] for one in ids], [one[-num_new:] for one in ids]


def prompt_ids(
    model: str,
    texts: Sequence[str] | None,
    num_tokens: int,
    num_built_in: int,
    num_new: int,
    *,
    has_after: bool,
) -> Ids:
    """Token ids of prompts, or of built-in ones.

    Args:
        model: the checkpoint, whose tokenizer is taken.
        texts: of the prompts; None for built-in ones.
        num_tokens, num_built_in: of built-in prompts.
        num_new: tokens that a system says after each.
        has_after: as many ids of text follow each prompt.

    Raises:
        ValueError: the model knows too few positions for them.
    """
    from moe_runtime.benchmarks.suite.texts import cut_prompts
    from moe_runtime.checkpoints.model_files import read_config
    from moe_runtime.cli.commands.run import load_tokenizer
    from moe_runtime.inference.generation import check_length, encode_prompt

    tokenizer, config = load_tokenizer(model), read_config(Path(model))
    if texts is None:
        check_length(config, num_tokens, num_new)
        return cut_prompts(tokenizer, num_built_in, num_tokens + num_new * has_after)
    found = [encode_prompt(tokenizer, text)["input_ids"][0].tolist() for text in texts]
    check_length(config, max(map(len, found)), num_new)
    if not has_after:
        return found
    after = cut_prompts(tokenizer, len(found), num_new)
    return [ids + more for ids, more in zip(found, after, strict=True)]


def common_settings(
    model: str,
    threads: int | None,
    prompts: Sequence[list[int]],
    num_new: int,
    cap: int | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Settings of every system."""
    from moe_runtime.lab.this_machine import num_usable_cores

    return {
        "model": model,
        "num_threads": threads or num_usable_cores(),
        "max_tokens": max(map(len, prompts)) + num_new,
        "cap_bytes": cap,
        "device": device,
    }


def own_settings(of_all: Mapping[str, Any], **options: int | float | str) -> dict[str, Any]:
    """Settings of this project: those of every system that it takes, and its options.

    Args:
        of_all: as ``common_settings`` returns them.
        options: of ``moe_runtime.load``.
    """
    taken = ("model", "num_threads", "max_tokens", "device")
    return {**{name: of_all[name] for name in taken}, **options}
