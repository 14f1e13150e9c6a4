"""Pictures of requests: data URLs, and addresses where the server may fetch them."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_runtime.checkpoints.strict_json import clipped
from moe_runtime.errors import MoERuntimeError, blamed_on
from moe_runtime.inference.pictures import (
    MOST_BYTES,
    MOST_PICTURES,
    Picture,
    PictureError,
    bytes_of_data_url,
)
from moe_runtime.serving.http.api_errors import FieldError, too_long, unsupported
from moe_runtime.serving.http.schema import ImagePart, Message

if TYPE_CHECKING:
    from moe_runtime.serving.http.served_model import ServedModel

_FETCH_S = 10.0
"""For the addresses of a request together: texts of all other requests wait meanwhile."""
_PART_BYTES = 1 << 16
_MOST_SHOWN = 60


def pictures_of(messages: Sequence[Message], model: ServedModel) -> list[Picture]:
    """The pictures of a conversation, in their order; a `FieldError` names one that is none."""
    found, most = [], model.engine.most_request_tokens
    end_s = time.monotonic() + _FETCH_S
    for at, message in enumerate(messages):
        parts = message.content if isinstance(message.content, list) else ()
        for number, part in enumerate(parts):
            if not isinstance(part, ImagePart):
                continue
            place = f"messages.{at}.content.{number}.image_url"
            if model.pictures is None:
                raise unsupported(place, "this model takes no pictures; leave them out")
            if message.role != "user":
                raise FieldError(place, f"may be in a message of the user, got {message.role}")
            if len(found) == MOST_PICTURES:
                raise FieldError(place, f"a request may have {MOST_PICTURES} pictures")
            try:
                data = _bytes_of(part.image_url.url, place, model, end_s)
                found.append(model.pictures.read(data))
            except PictureError as error:
                raise FieldError(place, str(error)) from None
            except MoERuntimeError as error:  # of the checkpoint, or of this installation
                raise unsupported(place, str(error)) from None
            num_tokens = sum(len(picture.ids) for picture in found)
            if num_tokens > most:  # before memory is taken for more of them
                raise too_long(f"{num_tokens} tokens of pictures", most, "messages")
    return found


def _bytes_of(url: str, place: str, model: ServedModel, end_s: float) -> bytes:
    if url.startswith("data:"):
        return bytes_of_data_url(url)
    if not url.startswith(("http://", "https://")):
        raise FieldError(place, f"expected a data URL, got {clipped(url)}")
    if not model.fetches_pictures:
        raise FieldError(
            place,
            "this server fetches no pictures: send a data URL, or start it with "
            "--allow-remote-images",
        )
    with (
        blamed_on(f"cannot fetch {url[:_MOST_SHOWN]}", PictureError),
        urllib.request.urlopen(url, timeout=_FETCH_S) as answer,
    ):
        data = bytearray()
        while len(data) <= MOST_BYTES and (part := answer.read1(_PART_BYTES)):
            data += part
            if time.monotonic() > end_s:
                raise TimeoutError(f"not whole after {_FETCH_S:g} s")
        return bytes(data)
