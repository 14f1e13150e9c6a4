"""Which peers there are, and which environment each runs in."""

import ast
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks.suite.peer_process import PeerProgram, this_python
from moe_runtime.config import require_known
from moe_runtime.files import at_home

_FOLDER = Path(__file__).resolve().parents[1] / "peers"
_NOT_PEERS = ("__init__", "host")
OURS = "moe_runtime"
GGUF_PEERS = ("llama_cpp",)
"""Peers that read GGUF files alone."""
EXPORTED_PEERS = ("openvino",)
"""Peers that read a folder which another program makes of a checkpoint."""
TEXT_CASES = ("latency", "throughput")
"""What a peer takes part in that names nothing else."""
_OPTIONAL: dict[str, Any] = {
    "VARIANTS": (),
    "CASES": TEXT_CASES,
    "FORMATS": ("bf16",),
    "DEVICES": ("cpu",),
}
_WORD = re.compile(r"[\w.-]+")


def peer_names() -> list[str]:
    """The peers of the package."""
    return sorted(file.stem for file in _FOLDER.glob("*.py") if file.stem not in _NOT_PEERS)


def peer_file(name: str, case: str | None = None) -> Path:
    """The file of a peer: of the package by its name, anybody's by a path that ends in ``.py``.

    Args:
        name: of the peer.
        case: what it shall take part in; the message about an unknown name lists peers of it.

    Raises:
        ValueError: there is none.
    """
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise ValueError(f"--peer {name}: no such file")
        return Path(name).resolve()
    plain = name.replace(".", "_").replace("-", "_")
    if plain not in (known := peer_names()):
        takes_part = [
            one
            for one in known
            if case is None or case in describe_peer(_FOLDER / f"{one}.py")["CASES"]
        ]
        require_known("peer", name, takes_part)
    return _FOLDER / f"{plain}.py"


def describe_peer(file: Path) -> dict[str, Any]:
    """``INSTALL``, ``PACKAGES`` and other constants of a peer's file, which is not run.

    ``VARIANTS``, ``CASES``, ``FORMATS`` (of experts) and ``DEVICES`` (``cpu``, ``cuda``) are what
    it has where it says nothing.

    Also ``METHODS``, the names of its methods; empty where it inherits some.

    Raises:
        ValueError: it is not Python, ``INSTALL`` or ``PACKAGES`` is missing, or another constant
            than ``INSTALL`` is no tuple of texts.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), file.name)
        found = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id in ("INSTALL", "PACKAGES", *_OPTIONAL)
        }
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{file}: not the file of a peer: {error}") from None
    if missing := [name for name in ("INSTALL", "PACKAGES") if name not in found]:
        raise ValueError(f"{file}: not the file of a peer: it says no {' and no '.join(missing)}")
    for name, value in found.items():
        texts = [value] if name == "INSTALL" else value
        if not isinstance(texts, list | tuple) or not all(isinstance(one, str) for one in texts):
            expected = "a text" if name == "INSTALL" else "a tuple of texts"
            raise ValueError(f"{file}: {name} must be {expected}, got {value!r}")
    made = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Peer"]
    parts = [part for peer in made for part in peer.body if not peer.bases]
    methods = [part.name for part in parts if isinstance(part, ast.FunctionDef)]
    assigned = [target for part in parts if isinstance(part, ast.Assign) for target in part.targets]
    methods += [target.id for target in assigned if isinstance(target, ast.Name)]
    reads_batches = not methods or "prefill_batch" in methods
    cases = TEXT_CASES if reads_batches else ("latency",)
    return {**_OPTIONAL, "CASES": cases, **found, "METHODS": methods}


def find_peer(asked: str, settings: dict[str, Any], case: str = "latency") -> PeerProgram:
    """Reads ``NAME[:VARIANT][@PYTHON][=MODEL]``, as in ``llama_cpp@peers/bin/python=olmoe.gguf``.

    Args:
        asked: the peer's name or file, a variant that its file names, its interpreter, and the
            same model in the form that it reads.
        settings: of the run; the variant is added, and the model is replaced.
        case: what it shall take part in.

    Raises:
        ValueError: there is no such peer, variant, interpreter or model, or it does not compute
            on the device of the run.
    """
    name, variant, python, model = split_peer(asked)
    file = peer_file(name, case)
    described = describe_peer(file)
    if case not in described["CASES"]:
        cases = " and ".join(f"bench {one}" for one in described["CASES"])
        why = " (it reads one sequence at a time)" if case == "throughput" else ""
        raise ValueError(f"--peer {asked}: takes part in {cases}, not in bench {case}{why}")
    if lacking := _lacking(described["METHODS"], case):
        raise ValueError(f"--peer {asked}: its class Peer has no {' and no '.join(lacking)}")
    if variant:
        require_known(f"variant of {file.stem}", variant, described["VARIANTS"])
    device = settings.get("device")
    if device and device.partition(":")[0] not in described["DEVICES"]:
        raise ValueError(
            f"--peer {asked}: computes on {' and '.join(described['DEVICES'])} alone (its DEVICES),"
            f" and all systems of this run on {device}; leave it out, or give another --device"
        )
    if python and not Path(python).is_file():
        raise ValueError(f"--peer {asked}: no interpreter {python}")
    if python and not os.access(python, os.X_OK):
        raise ValueError(f"--peer {asked}: {python} is no interpreter: it cannot be run")
    if model and not Path(model).exists():
        raise ValueError(f"--peer {asked}: {model} is not there")
    own = {"model": str(Path(model).absolute())} if model else {}
    return PeerProgram(
        name=file.stem + (f":{variant}" if variant else ""),
        file=file,
        python=Path(python).absolute() if python else this_python(),
        settings={**settings, **own, "variant": variant or None},
        cap_bytes=settings.get("cap_bytes"),
    )


def _lacking(methods: Sequence[str], case: str) -> list[str]:
    """Methods that a case calls and a peer does not have, as far as its file says."""
    if not methods or case not in TEXT_CASES:
        return []
    ways = [["stream"], ["prefill_batch", "step_batch"], ["prefill", "step"]]
    meant = next((way for way in ways if way[0] in methods), ways[-1])
    return [name for name in ("load", *meant, "close") if name not in methods]


def find_peers(
    asked: Sequence[str], settings: dict[str, Any], case: str = "latency", names: Sequence[str] = ()
) -> list[PeerProgram]:
    """Reads all of ``--peer``; of several of one name each is called after what sets it apart.

    That is the folder of its environment and the name of its model, as in ``moe_runtime=packed``
    or ``vllm@old``; who is called as another, then, has a number.

    Args:
        asked: as `find_peer` takes it, each.
        settings: of the run.
        case: what they shall take part in.
        names: of other systems in the same run.
    """
    programs = [find_peer(one, settings, case) for one in asked]
    taken = {OURS, *names}
    of_name = Counter([*taken, *(program.name for program in programs)])
    found = []
    for one, program in zip(asked, programs, strict=True):
        plain = program.name + (_difference(one) if of_name[program.name] > 1 else "")
        numbered = (f"{plain}#{number}" for number in count(2))
        name = next(name for name in chain([plain], numbered) if name not in taken)
        taken.add(name)
        found.append(replace(program, name=name))
    return found


def _difference(asked: str) -> str:
    """What is said of a peer's environment and of its model, without the folders they lie in."""
    _, _, python, model = split_peer(asked)
    place = Path(python).absolute()
    environment = place.parent.parent if place.parent.name == "bin" else place
    return (f"@{environment.name}" if python else "") + (
        f"={Path(model).absolute().name}" if model else ""
    )


def require_takes_shapes(programs: Sequence[PeerProgram]) -> None:
    """Refuses peers that random weights are written in no form for.

    Args:
        programs: as asked for, read without settings of the run.

    Raises:
        ValueError: one reads what is made of a checkpoint elsewhere.
    """
    for one in programs:
        if one.file.stem in EXPORTED_PEERS and "model" not in one.settings:
            raise ValueError(
                f"--peer {one.name}: reads a folder that is exported from a checkpoint, and "
                "--shape writes none; export what --keep-shape kept, and name it: "
                f"--peer {one.name}=FOLDER"
            )


def writes_own_text(program: PeerProgram) -> bool:
    """Whether a peer generates by itself, so that no text can be given to it."""
    return "stream" in describe_peer(program.file)["METHODS"]


def split_peer(asked: str) -> tuple[str, str, str, str]:
    """Name, variant, interpreter and model of ``NAME[:VARIANT][@PYTHON][=MODEL]``.

    Paths may hold the signs that divide the parts. Of all ways to divide, the first counts whose
    files are there; without one, the first of all, so that the complaint is about what was meant.
    """
    ways = [
        (at_home(name), variant, at_home(python), at_home(model))
        for words, model in _ways(asked, "=")
        for named, python in _ways(words, "@")
        for name, variant in _ways(named, ":")
    ]
    return next((way for way in ways if _is_there(*way)), ways[0])


def _ways(text: str, sign: str) -> Iterator[tuple[str, str]]:
    """Every way to divide a text at a sign, the first one first; undivided last."""
    for place in (place for place, char in enumerate(text) if char == sign):
        yield text[:place], text[place + 1 :]
    yield text, ""


def _is_there(name: str, variant: str, python: str, model: str) -> bool:
    is_peer = Path(name).is_file() if name.endswith(".py") else _WORD.fullmatch(name) is not None
    return (
        is_peer
        and (not variant or _WORD.fullmatch(variant) is not None)
        and (not python or Path(python).is_file())
        and (not model or Path(model).exists())
    )


def our_program(settings: dict[str, Any], cap_bytes: int | None = None) -> PeerProgram:
    """This project as a peer among the others, its memory capped if need be."""
    file, python = _FOLDER / f"{OURS}.py", this_python()
    return PeerProgram(name=OURS, file=file, python=python, settings=settings, cap_bytes=cap_bytes)
