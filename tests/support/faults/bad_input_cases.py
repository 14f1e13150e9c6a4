"""Makers of cases: each one damages what one kind of input holds."""

import io
import json
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from bad_input_runner import Case, Maker
from bad_input_values import VALUES, WORDS, damaged_bytes, damaged_json, damaged_text, put_odd_file

_RUN_FOLDERS = ("trained", "tuned", "finetuned")
_BUDGET = ("--host-memory", "1GiB")
_TUNE = ("-o", "tuned", "--context", "16", "--sequences", "1", "--steps", "1")


def _model(place: Path, good: Path) -> Path:
    shutil.copytree(good / "model", place / "model")
    shutil.copy(good / "text.txt", place / "text.txt")
    return place / "model"


def _use_of_model(rng: Random, name: str = "model") -> Case:
    """A command that loads the checkpoint of that name."""
    prompt = ["-p", "The store reads", "-n", "2", *_BUDGET]
    fit = ["predictor", "fit", "--model", name, "--text", "text.txt", "-o", "new.npz", *_BUDGET]
    uses = (
        Case(["run", name, *prompt]),
        Case(["run", name, *prompt, "--json", "--chat"]),
        Case(["run", name, *prompt, "--trace", "new.npz"], outputs=["new.npz"]),
        Case(["inspect", name]),
        Case(["inspect", name, "--json", *_BUDGET]),
        Case(["finetune", name, "text.txt", *_TUNE, "--dry-run"], keeps=["tuned"]),
        Case(["finetune", name, "text.txt", *_TUNE, *_BUDGET, "--json"], keeps=["tuned"]),
        Case(fit, outputs=["new.npz"]),
    )
    return rng.choices(uses, (6, 2, 2, 4, 2, 2, 1, 1))[0]


def _damage_json_file(rng: Random, path: Path) -> None:
    """Other values in a file of JSON, or other bytes."""
    if rng.random() < 0.25:
        path.write_bytes(damaged_text(rng, path.read_bytes()))
    else:
        value = damaged_json(rng, json.loads(path.read_bytes()), rng.randrange(1, 4))
        path.write_text(json.dumps(value))


_GENERATION = (
    *("eos_token_id", "max_length", "num_beams", "temperature", "top_k", "use_cache"),
    *("cache_implementation", "bad_words_ids", "stop_strings", "num_return_sequences"),
    *("repetition_penalty", "max_time", "min_length", "pad_token_id", "do_sample"),
)


def settings(rng: Random, place: Path, good: Path) -> Case:
    """Odd values in a file of settings, also under names that it did not have."""
    files = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    (name,) = rng.choices(files, (22, 8, 4, 4))
    file = _model(place, good) / name
    if rng.random() < 0.4 or name.startswith("tokenizer"):
        _damage_json_file(rng, file)
    else:
        values = json.loads(file.read_text())
        names = _GENERATION if name.startswith("generation") else sorted(values)
        values |= {name: rng.choice(VALUES) for name in rng.sample(names, rng.randrange(1, 3))}
        file.write_text(json.dumps(values))
    return _use_of_model(rng)


def chat_template(rng: Random, place: Path, good: Path) -> Case:
    """Templates that raise, grow without end, or are not text."""
    file = _model(place, good) / "tokenizer_config.json"
    templates = (
        *("{{ raise_exception('no system\\nrole') }}", "{% if %}", "{{ messages[9].content }}"),
        *("{{ messages.foo.bar }}", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}", "", "{{ 'a' }}"),
        *("{% for i in range(10**9) %}a{% endfor %}", "{{ 'a' * 10**12 }}", "{{ undefined_f() }}"),
        *("{% include 'x' %}", "{{ strftime_now(3) }}", "{{ '\\ud800' }}"),
        *({"default": 3}, [{"name": "default"}], 7, None, ["a"], {"a": "{{ 1 }}"}),
    )
    values = json.loads(file.read_text()) | {"chat_template": rng.choice(templates)}
    file.write_text(json.dumps(values))
    return Case(["run", "model", "-p", "The store", "-n", "1", "--chat", *_BUDGET])


def header(rng: Random, place: Path, good: Path) -> Case:
    """A safetensors file whose header and data do not agree."""
    file = _model(place, good) / "model.safetensors"
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    fields, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    if rng.random() < 0.3:
        file.write_bytes(damaged_bytes(rng, raw))
        return _use_of_model(rng)
    name = rng.choice(sorted(fields.keys() - {"__metadata__"}))
    tensor = fields[name]
    if rng.random() < 0.5:
        fields[name] = damaged_json(rng, tensor, 1)
    else:
        _, start, end = tensor["dtype"], *tensor["data_offsets"]
        fields[name] = rng.choice(
            (
                tensor | {"data_offsets": [start + 4, end + 4]},
                tensor | {"data_offsets": [end, start]},
                tensor | {"data_offsets": [0, end - start]},
                tensor | {"data_offsets": [start, 2**62]},
                tensor | {"shape": tensor["shape"][::-1]},
                tensor | {"shape": [2**40, *tensor["shape"]]},
                *(tensor | {"dtype": kind} for kind in ("I32", "U8", "F8_E4M3", "f32", "F4")),
                tensor | {"dtype": "BF16", "shape": [*tensor["shape"], 2]},
            )
        )
    text = json.dumps(fields).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return _use_of_model(rng)


def shards(rng: Random, place: Path, good: Path) -> Case:
    """An index that names what is not there, or something odd in a file's place."""
    folder = _model(place, good)
    file = folder / "model.safetensors"
    if rng.random() < 0.4:
        file.unlink()
        put_odd_file(rng, file, good)
        return _use_of_model(rng)
    shard = folder / "model-00001-of-00001.safetensors"
    file.rename(shard)
    length = struct.unpack("<Q", shard.read_bytes()[:8])[0]
    names = json.loads(shard.read_bytes()[8 : 8 + length])
    index = {"metadata": {}, "weight_map": {n: shard.name for n in names if n != "__metadata__"}}
    if rng.random() < 0.5:
        name = rng.choice(sorted(index["weight_map"]))
        others = ("missing.safetensors", "../x.safetensors", "/dev/zero", "config.json", "")
        index["weight_map"][name] = rng.choice((*others, *VALUES))
    else:
        index = damaged_json(rng, index, 2)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return _use_of_model(rng)


def folder_file(rng: Random, place: Path, good: Path) -> Case:
    """Something odd in the place of any file of a checkpoint."""
    folder = _model(place, good)
    path = folder / rng.choice(sorted(file.name for file in folder.iterdir()))
    path.unlink()
    put_odd_file(rng, path, good)
    return _use_of_model(rng)


_FILE_ROLES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("trace.npz", ("replay", "trace.npz"), ()),
    ("plain.npz", ("replay", "plain.npz", "--policy", "lru"), ()),
    ("plain.npz", ("replay", "trace.npz", "--train", "plain.npz", "--policy", "static"), ()),
    ("plain_predictor.npz", ("replay", "plain.npz", "--predictor", "plain_predictor.npz"), ()),
    ("router.jsonl", ("replay", "router.jsonl"), ()),
    ("trace.npz", ("report", "trace.npz", "--max-accesses", "100"), ("report.html",)),
    ("stats.json", ("report", "stats.json"), ("report.html",)),
    ("trace.npz", ("place", "trace.npz", "--gpus", "2", "-o", "new.json"), ("new.json",)),
    ("map.json", ("place", "trace.npz", "--gpus", "2", "--from", "map.json"), ()),
    ("trace.npz", ("predictor", "fit", "trace.npz", "-o", "new.npz"), ("new.npz",)),
    ("trace.npz", ("predictor", "evaluate", "trace.npz"), ()),
    ("options.toml", ("run", "model", "-p", "The", "-n", "1", "--config", "options.toml"), ()),
    ("results.json", ("bench", "compare", "results.json", "results.json"), ()),
    ("results.json", ("bench", "report", "results.json"), ("bench.html",)),
    ("train.toml", ("train", "train.toml"), ()),
    ("train.toml", ("train", "train.toml", "--dry-run"), ()),
    ("sizes.toml", ("simulate", "train", "sizes.toml", "--ranks", "8"), ()),
    ("machine.toml", ("simulate", "layer", "--ranks", "8", "--machine", "machine.toml"), ()),
    (
        "predictor.npz",
        ("run", "model", "-p", "The", "-n", "2", "--predictor", "predictor.npz", *_BUDGET),
        (),
    ),
    ("map.json", ("run", "model", "-p", "The", "-n", "1", "--placement", "map.json", *_BUDGET), ()),
)
_TEXT_ROLES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("text.txt", ("run", "model", "--prompt-file", "text.txt", "-n", "1", *_BUDGET), ()),
    ("text.txt", ("finetune", "model", "text.txt", *_TUNE, "--dry-run"), ()),
    (
        "text.txt",
        ("predictor", "fit", "--model", "model", "--text", "text.txt", "-o", "new.npz", *_BUDGET),
        ("new.npz",),
    ),
    ("text.txt", ("train", "train.toml", "--dry-run"), ()),
)


def all_files(place: Path, good: Path) -> None:
    _model(place, good)
    for file in good.iterdir():
        if file.is_file():
            shutil.copy(file, place / file.name)


def odd_file(rng: Random, place: Path, good: Path) -> Case:
    """Something that is not a file, or a file of another kind, for every option that names one."""
    name, words, outputs = rng.choice((*_FILE_ROLES, *_TEXT_ROLES))
    all_files(place, good)
    (place / name).unlink(missing_ok=True)
    while put_odd_file(rng, place / name, good) and (name, words, outputs) in _TEXT_ROLES:
        (place / name).unlink()
    return Case([*words, *rng.choice(((), ("--json",)))], outputs=outputs, keeps=_RUN_FOLDERS)


def damaged_file(rng: Random, place: Path, good: Path) -> Case:
    """Files of every kind with other bytes."""
    name, words, outputs = rng.choice((*_FILE_ROLES, *_TEXT_ROLES))
    all_files(place, good)
    raw = (place / name).read_bytes()
    is_text = not name.endswith(".npz")
    if name.endswith(".json") and rng.random() < 0.7:
        (place / name).write_text(json.dumps(damaged_json(rng, json.loads(raw), 2)))
    else:
        (place / name).write_bytes((damaged_text if is_text else damaged_bytes)(rng, raw))
    return Case(list(words), outputs=outputs, keeps=_RUN_FOLDERS)


def arrays(rng: Random, place: Path, good: Path) -> Case:
    """Traces and predictors whose arrays or header are others."""
    roles = [role for role in _FILE_ROLES if role[0].endswith(".npz")]
    name, words, outputs = rng.choice(roles)
    all_files(place, good)
    with np.load(place / name) as archive:
        columns = dict(archive)
    if "header" in columns and rng.random() < 0.4:
        value = damaged_json(rng, json.loads(columns["header"].tobytes()), rng.randrange(1, 3))
        columns["header"] = np.frombuffer(json.dumps(value).encode(), np.uint8)
    else:
        column = rng.choice(sorted(columns))
        changed = _odd_array(rng, columns[column])
        columns.pop(column) if changed is None else columns.update({column: changed})
    (place / name).unlink()
    np.savez(place / name, **columns)
    return Case(list(words), outputs=outputs, keeps=_RUN_FOLDERS)


def _odd_array(rng: Random, array: np.ndarray) -> np.ndarray | None:
    """Another array in an array's place; None for none."""
    kind = array.dtype
    top = np.iinfo(kind).max if kind.kind in "iu" else np.inf
    low = np.iinfo(kind).min if kind.kind in "iu" else np.nan
    ways: tuple[Callable[[], Any], ...] = (
        lambda: None,
        lambda: array[:0],
        lambda: array[:-1],
        lambda: np.full_like(array, top),
        lambda: np.full_like(array, low),
        lambda: np.where(np.arange(array.size).reshape(array.shape) == 3, top, array).astype(kind),
        lambda: np.where(np.arange(array.size).reshape(array.shape) == 3, low, array).astype(kind),
        lambda: array.astype(np.float64),
        lambda: array.astype("<i8"),
        lambda: array[None],
        lambda: np.zeros_like(array),
        lambda: array[::-1].copy(),
        lambda: np.array(3),
    )
    return rng.choice(ways)()


def stdin(rng: Random, place: Path, good: Path) -> Case:
    """A prompt on standard input that is empty, not text, or long."""
    _model(place, good)
    texts = (b"", b"\n", b"\xff\xfe", b"The store\x00reads", b"word " * 3000, b"\xed\xa0\x80", b" ")
    words = ["run", "model", "--prompt-file", "-", "-n", "2", *_BUDGET]
    return Case(words, stdin=rng.choice(texts))


def prompt(rng: Random, place: Path, good: Path) -> Case:
    """Prompts that are odd words."""
    _model(place, good)
    extra = rng.choice(((), ("--chat",), ("--json",), ("--max-tokens", "3")))
    return Case(["run", "model", "-n", "2", *_BUDGET, "-p", rng.choice(WORDS), *extra])


def interrupted(rng: Random, place: Path, good: Path) -> Case:
    """A signal at any moment."""
    all_files(place, good)
    commands = (
        Case(
            ["run", "model", "-p", "The", "-n", "200", *_BUDGET, "--trace", "new.npz"],
            outputs=["new.npz"],
        ),
        Case(["run", "model", "-p", "The", "-n", "200", *_BUDGET, "--prefetch", "enforce"]),
        Case(["replay", "trace.npz", "--policy", "all"]),
        Case(["report", "trace.npz"], outputs=["report.html"]),
        Case(["inspect", "model"]),
        Case(["place", "trace.npz", "--gpus", "2", "-o", "new.json"], outputs=["new.json"]),
        Case(["train", "train.toml", "--set", "run.steps=30"], keeps=["trained"]),
        Case(["finetune", "model", "text.txt", *_TUNE, *_BUDGET], keeps=["tuned"]),
        Case(["predictor", "fit", "trace.npz", "-o", "new.npz"], outputs=["new.npz"]),
        Case(["simulate", "layer", "--ranks", "8,64"]),
    )
    case = rng.choice(commands)
    number = rng.choice((signal.SIGINT, signal.SIGINT, signal.SIGTERM))
    case.send = (number, rng.uniform(0.0, 0.6))
    return case


def little_room(rng: Random, place: Path, good: Path) -> Case:
    """Less address space than is asked for, as after `ulimit -v`."""
    all_files(place, good)
    case = _use_of_model(rng)
    case.room_bytes = int(2 ** rng.uniform(12, 30))
    return case


def npy_in_npz(rng: Random, place: Path, good: Path) -> Case:
    """A member that announces what it does not hold, or holds objects."""
    name, words, outputs = rng.choice([r for r in _FILE_ROLES if r[0].endswith(".npz")])
    all_files(place, good)
    buffer = io.BytesIO()
    np.savez(buffer, header=np.array([{"a": 1}], dtype=object), ids=np.zeros((4, 2, 2), np.uint8))
    raw = buffer.getvalue()
    shape = rng.choice((b"(9, 9, 9)", b"(-1, 2,2)", b"(1<<40,1)", b"(4, 2, 'a"))
    (place / name).write_bytes(raw.replace(b"(4, 2, 2)", shape))
    return Case(list(words), outputs=outputs, keeps=_RUN_FOLDERS)


MAKERS: dict[str, tuple[Maker, int]] = {
    "settings": (settings, 38),
    "chat_template": (chat_template, 4),
    "header": (header, 8),
    "shards": (shards, 5),
    "folder_file": (folder_file, 4),
    "odd_file": (odd_file, 10),
    "damaged_file": (damaged_file, 9),
    "arrays": (arrays, 9),
    "npy_in_npz": (npy_in_npz, 2),
    "stdin": (stdin, 2),
    "prompt": (prompt, 4),
    "interrupted": (interrupted, 5),
    "little_room": (little_room, 4),
}
"""Every kind of case and how many of a hundred or so are of it."""
