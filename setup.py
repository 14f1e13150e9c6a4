"""Builds two C libraries, optional parts of installing, and says which machines a wheel is for.

The rest is in pyproject.toml.

The CPU kernels (`moe_runtime.kernels.native` loads them) and the replay of simple eviction
policies (`moe_runtime.policies.eviction.compiled`). Both are plain C behind ctypes and use nothing
of Python's headers: a wheel is for every Python, and for every Linux whose C library has the
functions that they call. Without a working C compiler the installation succeeds: the runtime
computes with torch alone, and replays take longer.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.errors import CCompilerError, CompileError, ExecError, PlatformError

SOURCES = Path("kernels/native")
KERNELS = "moe_runtime.kernels.native.moe_kernels"
REPLAY = "moe_runtime.policies.eviction.replay_loop"
LIBRARIES = (KERNELS, REPLAY)
EVICTION = Path("policies/eviction")
BUILD_FACTS = Path("moe_runtime/build.json")
"""Which commit it was built from: an installed package has no checkout to ask."""
_OLDEST_GLIBC = (2, 17)
"""What every Linux has that Python 3.11 and torch run on; older functions need no older tag."""
_LIBRARIES_OF_EVERY_LINUX = frozenset(
    {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
)
COMMON_FLAGS = [
    "-std=gnu11",
    "-O3",
    "-g0",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",  # vectors are passed between inlined functions alone
]
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = [*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
# Each file is compiled for its own instruction set; which one runs is decided when it is loaded.
X86_VARIANTS = {
    "avx2": AVX2_FLAGS,
    "avx512": AVX512_FLAGS,
    "avx512bf16": [*AVX512_FLAGS, "-mavx512bf16", "-mavx512vnni", "-mavx512vbmi", "-mavx512vbmi2"],
    "amx": [*AVX512_FLAGS, "-mamx-tile", "-mamx-bf16"],
    "vbmi2": [*AVX512_FLAGS, "-mavx512vbmi2"],
}
SOURCES_OF_VARIANTS = {
    "isa/isa_avx2.c": "avx2",
    "isa/isa_avx512.c": "avx512",
    "isa/isa_avx512bf16.c": "avx512bf16",
    "isa/isa_amx.c": "amx",
    "formats/planes_avx2.c": "avx2",
    "formats/planes_vbmi2.c": "vbmi2",
}


SOURCES_OF_ALL_VARIANTS = (
    "isa/isa_portable.c",
    "library.c",
    "pool.c",
    "formats/planes.c",
    "formats/quantized.c",
    "io/reads.c",
    "layers/attention.c",
    "layers/look_ahead.c",
    "layers/norm.c",
    "layers/prompt_attention.c",
    "layers/recurrent.c",
    "products/batched.c",
    "products/columns.c",
    "products/driver.c",
    "products/gate.c",
    "products/latent.c",
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
        ranks = self._compile(EVICTION / "replay_loop.c", ["-ffp-contract=off"], [])
        learned = (EVICTION / "reuse.c", EVICTION.parent / "prediction" / "combined.c")
        self._link(ext, sum((self._compile(source, [], []) for source in learned), ranks))

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
                    if variant == "amx" and ("MOE_HAVE_AVX512BF16", "1") not in macros:
                        raise CompileError("they are built upon the avx512bf16 kernels")
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
        # Where Python's own libraries lie on this machine is nothing to a wheel: these need none.
        linker = [word for word in self.compiler.linker_so if not word.startswith("-Wl,-rpath")]
        self.compiler.set_executables(linker_so=linker)
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


class Wheel(bdist_wheel):
    """Names a wheel after what its libraries need, not after the Python that built it."""

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform_tag = super().get_tag()
        folder = Path(self.bdist_dir)
        libraries = [
            path.read_bytes()
            for path in (folder / Path(*name.split(".")).with_suffix(".so") for name in LIBRARIES)
            if path.is_file()
        ]
        return ("py3", "none", platform_of(libraries, platform_tag) if libraries else "any")


def platform_of(libraries: list[bytes], platform_tag: str) -> str:
    """The platform tag of a wheel, by the newest function of glibc that its libraries call.

    Args:
        libraries: contents of shared libraries.
        platform_tag: this machine's, as in ``linux_x86_64``.

    Returns:
        As in ``manylinux_2_34_x86_64``; the machine's own tag where a library needs what not every
        Linux has, or is not one of Linux and glibc.
    """
    content = b"\0".join(libraries)
    needed = {
        word.decode() for word in re.findall(rb"(?<=\0)[\w.+-]+\.so(?:\.\d+)*(?=\0)", content)
    }
    found = re.findall(rb"(?<=\0)GLIBC_(\d+)\.(\d+)(?:\.\d+)*(?=\0)", content)
    if not platform_tag.startswith("linux_") or not found or needed - _LIBRARIES_OF_EVERY_LINUX:
        return platform_tag
    major, minor = max(_OLDEST_GLIBC, *((int(one), int(other)) for one, other in found))
    return f"manylinux_{major}_{minor}_{platform_tag.removeprefix('linux_')}"


class BuildPython(build_py):
    """Copies the modules, and says in a wheel which commit they are of."""

    def run(self) -> None:
        super().run()
        facts = build_facts()
        if not self.editable_mode and facts:
            (Path(self.build_lib) / BUILD_FACTS).write_text(facts, encoding="utf-8")


class SourceArchive(sdist):
    """An archive of the sources, which says which commit they are of."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        facts = build_facts()
        if facts:
            (Path(base_dir) / BUILD_FACTS).write_text(facts, encoding="utf-8")


def build_facts() -> str | None:
    """What a source archive says, else what git says of this checkout; None without either."""
    if BUILD_FACTS.is_file():
        return BUILD_FACTS.read_text(encoding="utf-8")
    if not Path(".git").exists():
        return None
    try:
        words = ["git", "rev-parse", "--short=12", "HEAD"]
        head = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return json.dumps({"commit": head}) + "\n"


if __name__ == "__main__":
    setup(
        ext_modules=[
            Extension(
                KERNELS,
                sources=sorted(str(path) for path in SOURCES.rglob("*.c")),
                depends=sorted(str(path) for path in SOURCES.rglob("*.h")),
                optional=True,
            ),
            Extension(
                REPLAY, sources=sorted(map(str, EVICTION.parent.glob("*/*.c"))), optional=True
            ),
        ],
        cmdclass={
            "bdist_wheel": Wheel,
            "build_ext": BuildNativeLibrary,
            "build_py": BuildPython,
            "sdist": SourceArchive,
        },
    )
