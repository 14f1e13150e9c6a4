"""Pictures in prompts: a model's own processor makes tensors and placeholder tokens from files.

Shape suffixes: T tokens, P pictures.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import inspect
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_runtime.checkpoints.strict_json import clipped
from moe_runtime.checkpoints.transformers_private import picture_processor
from moe_runtime.errors import CheckpointError, UnsupportedModelError, blamed_on
from moe_runtime.files import at_home, read_bounded

MOST_PICTURES = 32
MOST_BYTES = 20 << 20
MOST_PIXELS = 40_000_000
"""Most pixels of a picture: a small file may decode to gigabytes."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_WORD_BYTES, _WORDS = 8, 8
_OWN_TYPE = frozenset({"aria"})
"""Families whose vision towers need pixels in the type of their weights."""
_FILES = ("preprocessor_config.json", "processor_config.json")
_OF_TOKENS = ("mm_token_type_ids", "token_type_ids", "attention_mask", "input_ids")
"""Outputs of a processor about tokens, not about pictures."""


class PictureError(ValueError):
    """A picture cannot be read, or does not match the prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A processed picture.

    Attributes:
        tensors: arguments of the model's ``forward``; several pictures are joined along the first
            dimension.
        text: its text in a prompt.
        ids: the tokens of ``text``.
        kinds: 1 for tokens of the picture, 0 for text, for each of ``ids``.
        digest: of the pixels.
        kinds_by_id: other token types that the model takes, by argument and token; 0 for others.
    """

    tensors: Mapping[str, Tensor]
    text: str
    ids: tuple[int, ...]
    kinds: tuple[int, ...]
    digest: bytes
    kinds_by_id: Mapping[str, Mapping[int, int]]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True, eq=False)
class PlacedPicture:
    """A picture at the tokens ``first`` to ``end - 1`` of a prompt."""

    first: int
    picture: Picture

    @property
    def end(self) -> int:
        return self.first + len(self.picture.ids)


class PictureReader:
    """Reads pictures for one model."""

    def __init__(self, folder: Path, config: Any, tokenizer: Any, beside: Path) -> None:
        self._folder, self._config, self._tokenizer = folder, config, tokenizer
        self._beside = beside

    @classmethod
    def of(
        cls, folder: Path, config: Any, tokenizer: Any, *, beside: Path = Path()
    ) -> PictureReader | None:
        """A reader, or None if the checkpoint has no processor of pictures. File names are relative
        to the folder ``beside``."""
        has_files = any((folder / name).exists() for name in _FILES)
        is_seeing = getattr(config, "vision_config", None) is not None
        return cls(folder, config, tokenizer, beside) if has_files and is_seeing else None

    @functools.cached_property
    def _processor(self) -> Any:
        """Raises CheckpointError: its files are damaged. Raises UnsupportedModelError: a package is
        missing, or transformers has no processor for this model."""
        try:
            with blamed_on(f"{self._folder}: the processor of pictures cannot be used"):
                found = picture_processor(self._folder, self._config, self._tokenizer)
        except CheckpointError as error:
            if not isinstance(error.__cause__, ImportError):
                raise
            raise UnsupportedModelError(
                "pictures need packages that are not installed: pip install "
                "'moe-runtime[pictures]', and torchvision where this model's processor needs it"
            ) from None
        if found is None:
            kind = self._config.model_type
            raise UnsupportedModelError(f"transformers has no processor of pictures for {kind}")
        return found

    @property
    def mark(self) -> str:
        """The mark of a picture in a chat template's text."""
        return self._processor.image_token

    def open_all(self, names: Sequence[str | Path]) -> list[Picture]:
        """The pictures of files or data URLs. Raises OSError or PictureError: one is not valid."""
        if len(names) > MOST_PICTURES:
            raise PictureError(
                f"a conversation may have {MOST_PICTURES} pictures, got {len(names)}"
            )
        return [self._open(str(name)) for name in names]

    def _open(self, name: str) -> Picture:
        if name.startswith("data:"):
            return self.read(bytes_of_data_url(name))
        if name.startswith(("http://", "https://")):
            raise PictureError(f"{clipped(name)}: expected a file or a data URL")
        return self.read(read_bounded(self._beside / at_home(name), max_bytes=MOST_BYTES), name)

    def read(self, data: bytes, name: str = "the picture") -> Picture:
        """A picture from a file's bytes. Raises PictureError, which begins with ``name``: it is not
        in `FORMATS`, is damaged, or has too many bytes or pixels."""
        processor = self._processor  # raises for missing packages, such as Pillow
        pixels = _decode(data, name)
        size = f"{pixels.width} {pixels.height} ".encode()
        digest = hashlib.blake2b(size + pixels.tobytes(), digest_size=_WORD_BYTES * _WORDS).digest()
        with blamed_on(f"{name}: this model's processor refuses the picture", PictureError):
            found = processor(
                text=[self.mark],
                images=[pixels],
                return_tensors="pt",
                add_special_tokens=False,
                padding=False,  # the shared tokenizer would keep this setting
                return_text_replacement_offsets=True,
            )
            text = found.pop("text_replacement_offsets")[0][0]["replacement"]
        by_id = {}
        for key in found:
            if not key.endswith("type_ids") or key in _OF_TOKENS:
                continue
            kinds_of_each = getattr(processor, f"create_{key}", None)
            if kinds_of_each is None:
                raise UnsupportedModelError(f"how this model's {key} are made is not known")
            marks = self._tokenizer.all_special_ids
            by_id[key] = dict(zip(marks, kinds_of_each([marks])[0], strict=True))
        ids = found["input_ids"][0].tolist()
        kinds = processor.create_mm_token_type_ids([ids])[0]
        tensors = {
            key: value
            for key, value in found.items()
            if isinstance(value, Tensor) and key not in (*_OF_TOKENS, *by_id)
        }
        return Picture(tensors, text, tuple(ids), tuple(kinds), digest, by_id)

    def write(self, prompt: str, pictures: Sequence[Picture]) -> str:
        """Replaces the marks in a prompt by the texts of pictures. Raises PictureError: there are
        more or fewer marks than pictures."""
        parts = prompt.split(self.mark)
        if len(parts) != len(pictures) + 1:
            raise PictureError(
                f"the prompt has {len(parts) - 1} times {self.mark} for {len(pictures)} pictures; "
                "leave it out of texts"
            )
        for name in pictures[0].tensors:
            if len({one.tensors[name].shape[1:] for one in pictures}) > 1:
                raise PictureError(
                    "this model takes several pictures of one size only; resize them"
                )
        rest = zip(pictures, parts[1:], strict=True)
        return parts[0] + "".join(picture.text + part for picture, part in rest)


@dataclass(frozen=True, slots=True, eq=False)
class Pictures:
    """The pictures of one conversation, and their reader."""

    reader: PictureReader
    pictures: Sequence[Picture]

    def write(self, prompt: str) -> str:
        return self.reader.write(prompt, self.pictures)

    def inputs(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """The model's further inputs for a prompt of these tokens."""
        kinds = kinds_of(len(ids), place(ids, self.pictures))
        others = other_kinds_of(ids, self.pictures)
        return {**tensors_of(self.pictures), "mm_token_type_ids": kinds, **others}


def place(ids: Sequence[int], pictures: Iterable[Picture]) -> tuple[PlacedPicture, ...]:
    """Finds pictures in the tokens of their prompt, in order. Raises CheckpointError: one is
    missing."""
    placed, at, ids = [], 0, tuple(ids)
    for picture in pictures:
        size = len(picture.ids)
        starts = range(at, len(ids) - size + 1)
        first = next((n for n in starts if ids[n : n + size] == picture.ids), None)
        if first is None:
            raise CheckpointError("the tokenizer does not keep the marks of a picture together")
        placed.append(PlacedPicture(first, picture))
        at = first + size
    return tuple(placed)


def keys_of(ids: Sequence[int], placed: Iterable[PlacedPicture]) -> list[int]:
    """Numbers that identify a prompt: its tokens, and negative numbers for picture contents."""
    keys = list(ids)
    for one in placed:
        digest = one.picture.digest
        words = [
            int.from_bytes(digest[at : at + _WORD_BYTES], "little") >> 1
            for at in range(0, len(digest), _WORD_BYTES)
        ]
        for at, word in zip(range(one.first, one.end), itertools.cycle(words), strict=False):
            keys[at] = -1 - word
    return keys


def tensors_of(pictures: Sequence[Picture]) -> dict[str, Tensor]:
    """Arguments of a model's ``forward`` for several pictures."""
    names = pictures[0].tensors if pictures else ()
    return {name: torch.cat([one.tensors[name] for one in pictures]) for name in names}


def for_model(model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs that a model's ``forward`` takes, on its device and in its type."""
    known = {"attention_mask", *inspect.signature(model.forward).parameters}
    own = model.dtype if model.config.model_type in _OWN_TYPE else None
    return {
        name: value.to(model.device, own if value.is_floating_point() else None)
        for name, value in inputs.items()
        if name in known
    }


def kinds_of(num_tokens: int, placed: Iterable[PlacedPicture]) -> Tensor:
    """``[1, T]`` int64: 1 for tokens of pictures, 0 for text."""
    kinds = torch.zeros((1, num_tokens), dtype=torch.int64)
    for one in placed:
        kinds[0, one.first : one.end] = torch.tensor(one.picture.kinds)
    return kinds


def other_kinds_of(ids: Sequence[int], pictures: Sequence[Picture]) -> dict[str, Tensor]:
    """``[1, T]`` int64 by argument, from `Picture.kinds_by_id`."""
    by_id = pictures[0].kinds_by_id if pictures else {}
    return {name: torch.tensor([[of.get(one, 0) for one in ids]]) for name, of in by_id.items()}


class Positions:
    """Positions of a sequence with pictures in time, height and width. After the prompt each grows
    by one per token."""

    def __init__(self, rows_3T: Tensor) -> None:
        self._rows_3T = rows_3T
        self._shift = int(rows_3T.max()) + 1 - rows_3T.shape[1]

    @classmethod
    def of(
        cls, model: Any, ids: Sequence[int], placed: Sequence[PlacedPicture]
    ) -> Positions | None:
        """From the model's ``get_rope_index``; None if it has none or there are no pictures."""
        owner: Any = next((m for m in model.modules() if hasattr(m, "get_rope_index")), None)
        if owner is None or not placed:
            return None
        tensors = tensors_of([one.picture for one in placed])
        rows_31T, _ = owner.get_rope_index(
            input_ids=torch.tensor([ids]),
            mm_token_type_ids=kinds_of(len(ids), placed),
            image_grid_thw=tensors.get("image_grid_thw"),
        )
        return cls(rows_31T[:, 0])

    def rows(self, first: int, num_tokens: int) -> Tensor:
        """``[4, T]`` int64: the numbers of tokens, and their three positions."""
        known_3T = self._rows_3T[:, first : first + num_tokens]
        numbers_T = torch.arange(first, first + num_tokens)
        after_T = numbers_T[known_3T.shape[1] :] + self._shift
        rows_3T = torch.cat([known_3T, after_T.expand(3, -1)], dim=1)
        return torch.cat([numbers_T[None], rows_3T])


def bytes_of_data_url(url: str) -> bytes:
    """The bytes in ``data:image/png;base64,...``. Raises PictureError: it has another form."""
    head, _, data = url.partition(",")
    if not head.endswith(";base64"):
        raise PictureError("expected data:image/png;base64,... or another kind of image")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise PictureError("expected base64 after the comma of the data URL") from None


def _decode(data: bytes, name: str) -> Any:
    from PIL import Image, ImageOps, UnidentifiedImageError

    if len(data) > MOST_BYTES:
        raise PictureError(
            f"{name}: has {len(data):,} bytes, a picture may have {MOST_BYTES:,}; "
            "give a smaller one"
        )
    complaint = f"{name}: is not a whole picture in {', '.join(FORMATS)}"
    with blamed_on(complaint, PictureError):
        try:
            found = Image.open(io.BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError:  # its message names an object of this process
            raise PictureError(complaint) from None
        if found.width * found.height > MOST_PIXELS:
            raise PictureError(
                f"{name}: is {found.width} x {found.height} pixels, a picture may have "
                f"{MOST_PIXELS:,}; give a smaller one"
            )
        return ImageOps.exif_transpose(found).convert("RGB")
