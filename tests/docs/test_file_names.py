"""Files that pages, docstrings and comments name in backticks exist, and so do names of code."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("moe_runtime", "kernels", "policies", "models", "benchmarks", "examples", "deploy", "tests")
TOPS += ("docs",)
SUFFIXES = {".py", ".c", ".h", ".cpp", ".md"}
QUOTED = re.compile(r"(`+)([^`\n]+)\1")
NAME = re.compile(r"(?<![\w/.*-])[\w/-]+\.(?:py|cpp|c|h)(?![\w.*-])")
CODE_NAME = re.compile(
    r"(?<![\w/.*-])(?:[A-Z]\w*[a-z]\w*[A-Z]\w*|[A-Z]+(?:_[A-Z]+)+|_?[a-z]+(?:_[a-z0-9]+)+)(?![\w/*-])"
)
OF_OTHERS = {"transformers-features.md", "serving.md"}
"""Pages of names of transformers and of metrics, which other tests compare."""
FOREIGN = {
    "manylinux_2_28",
    "GPU_ARGS",
    "NAME_OR_FILE",
    "LLAMA_CPP",
    "GradScaler",
    "TRITON_INTERPRET",
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


def test_named_code_exists():
    pages = {path: path.read_text(encoding="utf-8") for path in files()}
    code = (text for path, text in pages.items() if path.suffix != ".md")
    known = FOREIGN.union(path.stem for path in pages).union(*(re.findall(r"\w+", c) for c in code))
    gone = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in pages.items()
        if path.suffix == ".md" and path.name not in {"CHANGELOG.md", *OF_OTHERS}
        for _, quoted in QUOTED.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        for name in CODE_NAME.findall(quoted)
        if name not in known
    ]
    assert gone == []


def test_names_are_found():
    code = "ReorderedW OLD_NAMES _gone_step lru a/long_name --some_option x_y"
    assert CODE_NAME.findall(code) == ["ReorderedW", "OLD_NAMES", "_gone_step", "x_y"]
    text = "'kernels/gone.py', ''gone.h'', 'python gone.py -o x'".replace("'", "`")
    assert [*named(text)] == ["kernels/gone.py", "gone.h", "gone.py"]
    assert [*named("`FILE.py` gone.py `llama.cpp` `self.c_x`")] == []
