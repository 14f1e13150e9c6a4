"""By which names requests ask for models and adapters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_runtime.files import at_home


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """An adapter that requests can name.

    Attributes:
        name: by which they ask for it.
        model: name of the model that it is for.
        folder: as PEFT writes it.
    """

    name: str
    model: str
    folder: Path


def names_of(models: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names by which requests ask for models, in their order.

    Raises:
        ValueError: there are not as many names as models, or one is given to two of them.
    """
    if names and len(names) != len(models):
        raise ValueError(
            f"--name: expected one for each of {len(models)} models in their order, or none, "
            f"got {len(names)}"
        )
    found = list(names) or [Path(model).resolve().name for model in models]
    twice = _twice(found)
    if twice is not None:
        raise ValueError(
            f"--name: two models are called {twice!r}; give each model a name of its own"
        )
    return found


def adapters_of(words: Sequence[str], models: Sequence[str]) -> list[AdapterChoice]:
    """Reads ``NAME=FOLDER``, or ``MODEL:NAME=FOLDER`` where there are several models.

    Args:
        words: of the command line.
        models: names of the models.

    Raises:
        ValueError: one is neither, or two have one name.
    """
    found = []
    for word in words:
        name, equals, folder = word.partition("=")
        model = next((model for model in models if name.startswith(f"{model}:")), None)
        if model is not None:
            name = name.removeprefix(f"{model}:")
        is_other = model is None and (len(models) > 1 or ":" in name)
        if not (name and equals and folder) or is_other:
            form = "NAME=FOLDER" if len(models) == 1 else "MODEL:NAME=FOLDER"
            other, colon, _ = name.partition(":")
            no_model = f"; there is no model {other!r}" if colon and model is None else ""
            raise ValueError(
                f"--adapter {word}: expected {form}, with a model of {', '.join(models)}{no_model}"
            )
        found.append(AdapterChoice(name, model or models[0], Path(at_home(folder))))
    twice = _twice([*models, *(choice.name for choice in found)])
    if twice is not None:
        whose = "the name of a model" if twice in models else "the name of two"
        raise ValueError(f"--adapter: {twice!r} is {whose}; give each adapter a name of its own")
    return found


def _twice(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)
