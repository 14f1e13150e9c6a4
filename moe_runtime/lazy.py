"""Names whose modules are imported when they are first used."""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


class LazyTable(Mapping[str, T]):
    """Values by name from places "package.module:attribute"; names are known without imports."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)

    def __getitem__(self, name: str) -> T:
        module, _, attribute = self._places[name].partition(":")
        return attrgetter(attribute)(import_module(module))

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def lazy_names(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that imports where a name is defined on first use (PEP 562).

    `places` are modules, a leading dot for one of the package, and their names, separated by
    spaces. No name may be that of a module in the package.
    """
    modules = {name: module for module, names in places.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name], package), name)

    return find
