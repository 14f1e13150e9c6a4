"""Has the native kernels use one instruction set from the start, in this process and its children.

`pytest --isa NAME` puts this folder on `PYTHONPATH`, where every Python imports this module as it
starts. The product has no such switch: what is changed is the module that loads the library.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

VARIABLE = "MOE_SUITE_ISA"
NONE = "none"
"""As where no C compiler was there at installation: torch's products, Python's replays."""
LIBRARIES = ("moe_runtime.kernels.native", "moe_runtime.policies.eviction.compiled")


def force(module: ModuleType, isa: str) -> None:
    """Changes a module that has just been imported."""
    if isa == NONE:
        module.LIBRARY_PATH = module.LIBRARY_PATH.with_name("not_built.so")
    elif module.__name__ == LIBRARIES[0]:
        load = module.NativeLibrary.__init__

        def load_and_select(self, path) -> None:
            load(self, path)
            self.select_isa(isa)

        module.NativeLibrary.__init__ = load_and_select


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of `LIBRARIES` as they would be found, and changes them once they ran."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in LIBRARIES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_force(module: ModuleType) -> None:
            run(module)
            force(module, os.environ[VARIABLE])

        spec.loader.exec_module = run_and_force
        return spec


if VARIABLE in os.environ:
    sys.meta_path.insert(0, _Finder())
    # what a conftest file of a folder that pytest was given has imported already, but not loaded
    for name in LIBRARIES:
        if name in sys.modules:
            force(sys.modules[name], os.environ[VARIABLE])
