"""What `moe-runtime serve` says: its first screen, and an event for each request."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from moe_runtime.cli.console import print_json, print_rows, say_line
from moe_runtime.config import format_bytes

if TYPE_CHECKING:
    from moe_runtime.serving.http.starting import Ready, ServeSettings

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def announce(ready: Ready, settings: ServeSettings, *, as_json: bool) -> None:
    """The first screen: what is served, where, and how to call it."""
    if settings.host not in LOOPBACK and not settings.access.keys:
        warning = (
            f"whoever reaches {settings.host} may ask, and so may pages that browsers there open; "
            "give --api-keys"
        )
        if as_json:
            ServerLog(as_json=True)("warning", {"message": warning})
        else:
            say_line(f"warning: {warning}")
    models = ready.models
    stats = [loaded.moe.stats() for loaded in ready.loaded]
    if as_json:
        described = [
            {
                "model": model.name,
                "max_request_tokens": model.engine.most_request_tokens,
                "budget_bytes": some.budget_bytes,
                "adapter_bytes": model.engine.statistics().adapter_bytes,
            }
            for model, some in zip(models, stats, strict=True)
        ]
        adapters = {adapter.name: adapter.parent for adapter in ready.adapters}
        print_json(
            {
                "address": ready.address,
                **described[0],
                "models": described,
                "adapters": adapters,
            }
        )
        return
    from moe_runtime.inference.generation import sampling_words

    rows = [
        ("address", f"{ready.address}/v1" + ("" if settings.access.keys else " (no key needed)")),
        ("page, metrics", f"{ready.address}/  {ready.address}/metrics"),
    ]
    for model, some in zip(models, stats, strict=True):
        working = model.engine.statistics()
        kept = min(some.expert_slots * some.slot_bytes, some.expert_bytes)
        rows += [
            ("model", model.name),
            (
                "memory",
                f"{format_bytes(some.budget_bytes)}; {format_bytes(kept)} of "
                f"{format_bytes(some.expert_bytes)} of experts fit",
            ),
            (
                "requests",
                f"{model.engine.most_request_tokens} tokens each, {working.kv_capacity} together",
            ),
        ]
        chosen = sampling_words(model.defaults)
        rows.append(("choice of tokens", f"{chosen}, unless a request says otherwise"))
        if working.adapter_bytes:
            rows.append(("adapters", f"{format_bytes(working.adapter_bytes)} of memory beside it"))
    rows += [("adapter", f"{adapter.name} of {adapter.parent}") for adapter in ready.adapters]
    print_rows("serving", rows, to_stderr=True)
    path, asked = "completions", '"prompt": "Once upon a time", "max_tokens": 32'
    if models[0].template is not None:
        path, asked = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
    print(
        f"curl {ready.address}/v1/{path} -H 'content-type: application/json' \\\n"
        f"  -d '{{{asked}}}'",
        file=sys.stderr,
        flush=True,
    )


class ServerLog:
    """Writes events to stderr, as lines for people or in JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def line_of(self, message: str) -> str:
        """A line that says something to people, whenever it is printed."""
        return json.dumps({"event": "signal", "message": message}) if self._as_json else message

    def __call__(self, event: str, fields: Mapping[str, Any]) -> None:
        now = datetime.now(UTC)
        if self._as_json:
            line = json.dumps(
                {"time": now.isoformat(timespec="milliseconds"), "event": event, **fields}
            )
        else:
            words = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
            line = f"{now.astimezone():%H:%M:%S} {event} {words}".rstrip()
        print(line, file=sys.stderr, flush=True)


def _shown(value: Any) -> str:
    """A value as one word that a terminal can be shown."""
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)
