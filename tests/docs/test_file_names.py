"""Files that pages, docstrings and comments name in backticks exist."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("moe_runtime", "kernels", "policies", "models", "benchmarks", "examples", "tests", "docs")
SUFFIXES = {".py", ".c", ".h", ".cpp", ".md"}
QUOTED = re.compile(r"(`+)([^`\n]+)\1")
NAME = re.compile(r"(?<![\w/.*-])[\w/-]+\.(?:py|cpp|c|h)(?![\w.*-])")
FOREIGN = {
    "llama.cpp",
    "malloc.h",
    "convert_hf_to_gguf.py",
    "my_peer.py",
    "first_in.py",
    "FILE.py",
    "PEER.py",
}


def files() -> list[Path]:
    """Links are not followed; the built copy in `build` is left out."""
    found = [path for top in TOPS for path in (ROOT / top).rglob("*") if path.suffix in SUFFIXES]
    return sorted({path.resolve() for path in [*found, *ROOT.glob("*.md"), ROOT / "setup.py"]})


def named(text: str) -> Iterator[str]:
    for _, quoted in QUOTED.findall(text):
        yield from set(NAME.findall(quoted)) - FOREIGN


def test_named_files_exist():
    known = {f"/{path.relative_to(ROOT)}" for path in files()}
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files()
        if path.name != "CHANGELOG.md"  # tells of files that are gone
        for name in named(path.read_text(encoding="utf-8"))
        if not any(one.endswith(f"/{name}") for one in known)
    ]
    assert wrong == []


def test_names_are_found():
    text = "'kernels/gone.py', ''gone.h'', 'python gone.py -o x'".replace("'", "`")
    assert [*named(text)] == ["kernels/gone.py", "gone.h", "gone.py"]
    assert [*named("`FILE.py` gone.py `llama.cpp` `self.c_x`")] == []
