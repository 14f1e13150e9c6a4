"""Names of models on the hub, and which of a repository's files a name asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from moe_runtime.checkpoints.strict_json import clipped
from moe_runtime.config import format_bytes
from moe_runtime.errors import CheckpointError

_SITE = re.compile(r"(?:https?://)?(?:huggingface\.co|hf\.co)/|hf://")
_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_NAME = re.compile(rf"({_WORD}/{_WORD})(?:/([^:@]+))?((?:[:@][^:@\s]+)*)")
_PAGE = re.compile(r"(?:tree|blob|resolve)/([^/]+)(?:/(.+))?")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_QUANTISATION = re.compile(
    r"(?:^|[-_./])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32))$", re.IGNORECASE
)
_NO_MODELS = re.compile(r"(?:.*/)?mmproj|.*imatrix", re.IGNORECASE)
"""GGUF files that hold no language model."""


@dataclass(frozen=True, slots=True)
class HubName:
    """What a name on the hub asks for.

    Attributes:
        repository: ``owner/name``.
        revision: a branch, tag or commit.
        quantisation: of a GGUF repository, such as ``Q4_K_M``; empty where none is named.
        file: a GGUF file of the repository; empty where none is named.
    """

    repository: str
    revision: str = "main"
    quantisation: str = ""
    file: str = ""


def parse_hub_name(text: str) -> HubName | None:
    """Reads ``owner/name``, with ``:QUANTISATION``, ``/FILE.gguf`` or ``@REVISION`` behind it.

    A name may begin with the hub's site, and pages of a branch or file there are names too.

    Returns:
        None where the text is none of these.

    Raises:
        CheckpointError: it names a file and a quantisation.
    """
    site = _SITE.match(text)
    text = text[site.end() :].partition("?")[0].rstrip("/") if site else text
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    repository, path, rest = found[1], found[2] or "", found[3]
    marks = re.findall(r"([:@])([^:@]+)", rest)
    given = dict(marks)
    page = _PAGE.fullmatch(path)
    if page is not None:
        marks.append(("@", page[1]))
        given["@"], path = page[1], page[2] or ""
    is_model = not path or path.endswith(".gguf")
    if len(marks) != len(given) or not is_model or ".." in given.get("@", ""):
        return None
    if path and ":" in given:
        raise CheckpointError(
            f"{text}: expected a file or a quantisation, got both; leave :{given[':']} out"
        )
    return HubName(repository, given.get("@", "main"), given.get(":", ""), path)


def gguf_files(name: HubName, sizes: Mapping[str, int]) -> list[str]:
    """The GGUF file that a name asks for, or the files that it was split into, in order.

    Args:
        name: of the model.
        sizes: bytes of each file of the repository, by its name.

    Returns:
        None of them where the repository is to be read as safetensors files.

    Raises:
        CheckpointError: there is no such file, or several could be meant.
    """
    models: dict[str, list[str]] = {}
    for file in sorted(sizes):
        if file.endswith(".gguf") and (file == name.file or not _NO_MODELS.match(file)):
            part = _PART.fullmatch(file)
            models.setdefault(part[1] if part else file.removesuffix(".gguf"), []).append(file)
    if name.file:
        chosen = [stem for stem, files in models.items() if name.file in files]
    elif name.quantisation:
        wanted = name.quantisation.lower()
        chosen = [stem for stem in models if _label(stem).lower() == wanted]
        ending = re.compile(rf"(?:.*[-_./])?{re.escape(wanted)}", re.IGNORECASE)
        chosen = chosen or [stem for stem in models if ending.fullmatch(stem)]
    elif "config.json" in sizes and any(file.endswith(".safetensors") for file in sizes):
        return []
    else:
        chosen = [*models]
    if not models and not name.file and not name.quantisation:
        return []
    if len(chosen) != 1:
        _refuse_choice(name, models, chosen, sizes)
    files = models[chosen[0]]
    part = _PART.fullmatch(files[0])
    if part is not None and len(files) != int(part[3]):
        found = f"{len(files)} of the {int(part[3])} files"
        raise CheckpointError(f"{name.repository}: expected all of {chosen[0]}, found {found}")
    return files


def _label(stem: str) -> str:
    found = _QUANTISATION.search(stem)
    return found[1] if found else stem


def _refuse_choice(
    name: HubName,
    models: Mapping[str, Sequence[str]],
    chosen: Sequence[str],
    sizes: Mapping[str, int],
) -> NoReturn:
    labels = [_label(stem) for stem in models]
    shown = [
        f"{label if labels.count(label) == 1 else files[0]} "
        f"({format_bytes(sum(sizes[file] for file in files))})"
        for label, files in zip(labels, models.values(), strict=True)
    ]
    asked = clipped(name.file or name.quantisation)
    what = "has several models" if len(chosen) > 1 else f"has no {asked}"
    advice = f"name one: {name.repository}:QUANTISATION, or {name.repository}/FILE.gguf"
    there = ", ".join(shown) or "no GGUF files"
    raise CheckpointError(f"{name.repository} {what}; it has {there}; {advice}")
