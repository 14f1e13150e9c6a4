"""Builds two C libraries, optional parts of installing; the rest is in pyproject.toml.

The CPU kernels (`moe_runtime.kernels.native.library` loads them) and the replay of simple eviction
policies (`moe_runtime.policies.eviction.compiled`). Both are plain C behind ctypes and use nothing
of Python's headers. Without a working C compiler the installation succeeds: the runtime computes
with torch alone, and replays take longer.
"""

from __future__ import annotations

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError, ExecError, PlatformError

SOURCES = Path("kernels/native")
KERNELS = "moe_runtime.kernels.native.moe_kernels"
REPLAY = "moe_runtime.policies.eviction.replay_loop"
REPLAY_SOURCE = Path("policies/eviction/replay_loop.c")
COMMON_FLAGS = [
    "-std=gnu11",
    "-O3",
    "-g0",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
]
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = [*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
# Each file is compiled for its own instruction set; which one runs is decided when it is loaded.
X86_VARIANTS = {
    "avx2": AVX2_FLAGS,
    "avx512": AVX512_FLAGS,
    "avx512bf16": [*AVX512_FLAGS, "-mavx512bf16"],
    "vbmi2": [*AVX512_FLAGS, "-mavx512vbmi2"],
}
SOURCES_OF_VARIANTS = {
    "isa/isa_avx2.c": "avx2",
    "isa/isa_avx512.c": "avx512",
    "isa/isa_avx512bf16.c": "avx512bf16",
    "formats/planes_avx2.c": "avx2",
    "formats/planes_vbmi2.c": "vbmi2",
}


SOURCES_OF_ALL_VARIANTS = (
    "isa/isa_portable.c",
    "pool.c",
    "products/driver.c",
    "products/plan.c",
    "products/batched.c",
    "products/columns.c",
    "layers/attention.c",
    "products/gate.c",
    "layers/look_ahead.c",
    "layers/norm.c",
    "formats/planes.c",
    "formats/quantized.c",
    "layers/rank.c",
    "io/reads.c",
    "products/step.c",
    "formats/storage_order.c",
    "library.c",
)


# attention.c promises the bits of separate operations: each rounds what it makes.
OWN_FLAGS = {"layers/attention.c": ["-ffp-contract=off"]}


class BuildNativeLibrary(build_ext):
    """Compiles the C sources side by side, leaving out variants the compiler does not know."""

    def get_ext_filename(self, fullname: str) -> str:
        """A name without the interpreter's version: the library does not depend on it."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def get_export_symbols(self, ext: object) -> list[str]:
        return []

    def build_extension(self, ext: Extension) -> None:
        try:
            self._build_kernels(ext) if ext.name == KERNELS else self._build_replay(ext)
        except (CCompilerError, ExecError, PlatformError, OSError) as error:
            self.warn(
                f"{ext.name} was not built ({error}); moe_runtime will compute with torch alone, "
                "and replays take longer. Install a C compiler (gcc or clang) and install again."
            )

    def _build_replay(self, ext: Extension) -> None:
        # Ranks must be those of the Python objects, rounded after every operation as they are.
        self._link(ext, self._compile(REPLAY_SOURCE, ["-ffp-contract=off"], []))

    def _build_kernels(self, ext: Extension) -> None:
        is_x86 = platform.machine().lower() in ("x86_64", "amd64")
        objects: list[str] = []
        macros: list[tuple[str, str]] = []
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            of_variants = {
                variant: [
                    pool.submit(self._compile, SOURCES / source, flags, [])
                    for source, variant_of in SOURCES_OF_VARIANTS.items()
                    if variant_of == variant
                ]
                for variant, flags in (X86_VARIANTS.items() if is_x86 else ())
            }
            for variant, sources in of_variants.items():
                try:
                    compiled_variant = [path for source in sources for path in source.result()]
                except CompileError:
                    self.warn(f"this compiler cannot build the {variant} kernels; leaving them out")
                    continue
                objects += compiled_variant
                macros.append((f"MOE_HAVE_{variant.upper()}", "1"))
            # These know which variants there are.
            common = [
                pool.submit(self._compile, SOURCES / source, OWN_FLAGS.get(source, []), macros)
                for source in SOURCES_OF_ALL_VARIANTS
            ]
            for compiled in common:
                objects += compiled.result()
        self._link(ext, objects)

    def _link(self, ext: Extension, objects: list[str]) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects, str(target), libraries=["m"], extra_postargs=["-pthread"]
        )

    def _compile(self, source: Path, flags: list[str], macros: list[tuple[str, str]]) -> list[str]:
        return self.compiler.compile(
            [str(source)],
            output_dir=self.build_temp,
            macros=macros,
            include_dirs=[str(SOURCES)],
            extra_postargs=[*COMMON_FLAGS, *flags],
        )


setup(
    ext_modules=[
        Extension(
            KERNELS,
            sources=sorted(str(path) for path in SOURCES.rglob("*.c")),
            depends=sorted(str(path) for path in SOURCES.rglob("*.h")),
            optional=True,
        ),
        Extension(
            REPLAY,
            sources=[str(REPLAY_SOURCE)],
            depends=[str(REPLAY_SOURCE.with_name("replay_cache.h"))],
            optional=True,
        ),
    ],
    cmdclass={"build_ext": BuildNativeLibrary},
)
