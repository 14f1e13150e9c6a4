"""Reads the prompts of a command from its words, files or standard input."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from moe_runtime.files import decode_text, read_stream

_MAX_BYTES = 64 << 20


def read_prompts(
    prompts: Sequence[str] | None, prompt_file: Path | None, prompts_file: Path | None
) -> list[str]:
    """Prompts from one of the three: texts, a file that is one prompt, or a file with one a line.

    A line that is not blank is text, or in a `.jsonl` file a JSON string or an object with a
    `prompt`.

    Raises:
        ValueError: none or several are given, a file is not UTF-8, or a line is no prompt.
        OSError: a file cannot be read.
    """
    if sum((bool(prompts), prompt_file is not None, prompts_file is not None)) != 1:
        raise ValueError(
            "expected one of --prompt TEXT, --prompt-file FILE and --prompts FILE; give --prompt "
            "several times, or --prompts, for several prompts"
        )
    if prompt_file is not None:
        return [read_text(prompt_file)]
    if prompts_file is not None:
        return list(_one_a_line(read_text(prompts_file), prompts_file))
    return list(prompts or ())


def read_text(file: Path) -> str:
    """The text of a UTF-8 file of at most 64 MiB; `-` is standard input."""
    is_stdin = str(file) == "-"
    with contextlib.nullcontext(sys.stdin.buffer) if is_stdin else file.open("rb") as opened:
        raw = read_stream(opened, str(file), max_bytes=_MAX_BYTES)
    try:
        return decode_text(raw, "utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{file}, line {line}: is not UTF-8 text: {error}") from None


def _one_a_line(text: str, file: Path) -> Iterator[str]:
    lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise ValueError(f"{file}: holds no prompts, expected one a line")
    for number, line in lines:
        yield _prompt_of(line, f"{file}, line {number}") if file.suffix == ".jsonl" else line


def _prompt_of(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON: {error}") from None
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise ValueError(
            f"{place}: expected a JSON string, or an object with a text 'prompt', got {line:.60}"
        )
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        half = ascii(prompt[error.start])[1:-1]
        raise ValueError(
            f"{place}: {half} is half a surrogate pair, which is not text; give the whole character"
        ) from None
    return prompt
