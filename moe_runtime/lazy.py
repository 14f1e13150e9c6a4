"""Names that are imported when first used."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from operator import attrgetter
from traceback import walk_tb
from typing import Any, TypeVar

T = TypeVar("T")


class LazyTable(Mapping[str, T]):
    """Values by name, at places "package.module:attribute"; names are known without imports.

    With `own`, the place "package.module:Class" or "...:Class.attribute" of a class, a name that
    ends in `.py` is also known: a file that defines one class which extends it, called with
    `arguments`. Its value is that class or the attribute of it. Iteration gives the other names.
    """

    def __init__(
        self, places: Mapping[str, str], own: str = "", arguments: tuple[str, ...] = ()
    ) -> None:
        self._places = dict(places)
        self._own = own
        self._arguments = arguments

    def __getitem__(self, name: str) -> T:
        if not (self._own and is_code_file(name)):
            module, _, attribute = self._places[name].partition(":")
            return attrgetter(attribute)(import_module(module))
        module, _, names = self._own.partition(":")
        base, _, attribute = names.partition(".")
        kind = class_in_file(name, getattr(import_module(module), base), self._arguments)
        return getattr(kind, attribute) if attribute else kind

    def __contains__(self, name: object) -> bool:
        return name in self._places or bool(self._own and is_code_file(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def lazy_names(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that imports names on first use (PEP 562).

    `places` are modules, a leading dot for one of the package, and their names, separated by
    spaces. No name may be that of a module in the package.
    """
    modules = {name: module for module, names in places.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name], package), name)

    return find


_OWN_CODE = "moe_runtime.own_code."


def own_code_files() -> list[str]:
    """The user's files of Python code that this process executed."""
    return [str(own.__file__) for name, own in sys.modules.items() if name.startswith(_OWN_CODE)]


def place_in_own_code(error: BaseException) -> str | None:
    """The last line of a user's file that an error passed, as FILE:LINE."""
    lines = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith(_OWN_CODE)
    ]
    return lines[-1] if lines else None


def is_code_file(name: object) -> bool:
    """Whether a name is that of a file of Python code."""
    return isinstance(name, str) and name.endswith(".py")


@functools.cache
def class_in_file(path: str, base: type, arguments: tuple[str, ...] = ()) -> Any:
    """The class in a file of Python code; a process executes the file once."""
    import inspect
    from importlib.util import module_from_spec, spec_from_file_location

    from moe_runtime.errors import blamed_on
    from moe_runtime.files import open_regular

    open_regular(path).close()  # errors have the name
    name = f"{_OWN_CODE}{len(sys.modules)}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    with blamed_on(f"{path}: cannot be executed"):
        spec.loader.exec_module(module)
    own = dict.fromkeys(value for value in vars(module).values() if isinstance(value, type))
    found = [kind for kind in own if issubclass(kind, base) and kind.__module__ == name]
    if len(found) != 1:
        names = ", ".join(kind.__name__ for kind in found) or "none"
        raise ValueError(f"{path}: expected one class that extends {base.__name__}, found {names}")
    (kind,) = found
    declared = vars(base).get("__annotations__", {})
    lacks = {*kind.__abstractmethods__, *(one for one in declared if not hasattr(kind, one))}
    if lacks:
        raise ValueError(f"{path}: {kind.__name__} lacks {', '.join(sorted(lacks))}")
    try:
        inspect.signature(kind).bind(*arguments)
    except TypeError as error:
        expected = f"{kind.__name__}({', '.join(arguments)})"
        raise ValueError(f"{path}: cannot be called as {expected}: {error}") from None
    return kind
