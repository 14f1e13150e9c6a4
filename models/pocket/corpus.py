"""Training documents from the text of every Python installation.

Three kinds of document, all found next to the running interpreter:

- `topic`: one per entry of `pydoc_data.topics`, the prose of the language reference;
- `docstring`: one per standard-library file, its docstrings headed by qualified names and
  signatures, much as `pydoc` prints them;
- `source`: one per standard-library file, its code without those docstrings.

The order is deterministic, a twentieth of the names is held out (the docstrings and the source of
one file always fall on the same side), and a paragraph is kept only where it occurs first.
Held-out documents are read first, so that none of their longer paragraphs remains in training.
"""

import ast
import hashlib
import importlib
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

CONTEXT = 512  # tokens of the pocket model's context, as train.toml has it

Kind = Literal["topic", "docstring", "source"]
KINDS: tuple[Kind, ...] = ("topic", "docstring", "source")

# Third-party code, tests and generated tables are no training text.
_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    | {"_bundled", "lib-dynload", "__pycache__", "turtledemo", "pgen2"}
)
_EXCLUDED_FILES = re.compile(
    r"(_sysconfigdata.*|stringprep|html/entities|sre_constants|_?opcode|symbol|token|keyword"
    r"|_compat_pickle|this|antigravity|__phello__.*|tkinter/constants|config-.*/.*)\.py"
)
_HELD_OUT_ONE_IN = 20
_DUPLICATE_MIN_CHARS = 80
_MAX_DOCUMENT_CHARS = 400_000

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A training document; its name decides whether it is held out."""

    kind: Kind
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the document is kept from training."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN == 0


def gather(stdlib: Path | None = None) -> list[Document]:
    """All documents of an installation, in a fixed order, without repeated paragraphs."""
    folder = Path(sysconfig.get_paths()["stdlib"]) if stdlib is None else stdlib
    documents = [*_topics(), *_library(folder)]
    if not any(document.kind == "source" for document in documents):
        raise ValueError(f"expected the standard library's .py files in {folder}, found none")
    return without_repeats(documents)


def without_repeats(documents: Iterable[Document]) -> list[Document]:
    """Drop every longer paragraph that an earlier document has; held-out ones count as earliest."""
    seen: set[bytes] = set()
    kept: list[Document] = []
    for document in sorted(documents, key=lambda document: not document.held_out):
        text = "\n\n".join(_unseen_paragraphs(document.text, seen))
        if text.strip():
            kept.append(replace(document, text=text.rstrip() + "\n"))
    return kept


def _unseen_paragraphs(text: str, seen: set[bytes]) -> Iterator[str]:
    for paragraph in re.split(r"\n[ \t]*\n", text):
        words = " ".join(paragraph.split())
        if len(words) >= _DUPLICATE_MIN_CHARS:
            digest = hashlib.sha256(words.encode(errors="surrogatepass")).digest()
            if digest in seen:
                continue
            seen.add(digest)
        yield paragraph


def _topics() -> Iterator[Document]:
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield Document(kind="topic", name=f"topic:{name}", text=topics[name].strip() + "\n")


def _library(folder: Path) -> Iterator[Document]:
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        if _EXCLUDED_FOLDERS & set(relative.parts) or _EXCLUDED_FILES.fullmatch(
            relative.as_posix()
        ):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            # a few files are broken on purpose or in an old encoding
            continue
        if len(source) > _MAX_DOCUMENT_CHARS:
            continue
        yield from _split(relative, source, tree)


def _split(relative: Path, source: str, tree: ast.Module) -> Iterator[Document]:
    parts = relative.with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
    name = f"module:{relative.as_posix()}"
    entries: list[str] = []
    dropped_lines: set[int] = set()
    for title, node in _documented(tree, module):
        docstring = ast.get_docstring(node)
        if not docstring:
            continue
        body = "\n".join(f"    {line}" if line else "" for line in docstring.splitlines())
        entries.append(f"{title}\n{body}\n")
        statement = node.body[0]
        dropped_lines.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    if entries:
        yield Document(kind="docstring", name=name, text="\n".join(entries))
    lines = source.splitlines()
    code = (line for number, line in enumerate(lines, start=1) if number not in dropped_lines)
    yield Document(kind="source", name=name, text="\n".join(code).strip() + "\n")


def _documented(node: _Documented, title: str) -> Iterator[tuple[str, _Documented]]:
    """Nodes that may have a docstring, with titles: `path.to.function(arguments)`."""
    shown = title
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        shown = f"{title}({ast.unparse(node.args)})"
    yield shown, node
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _documented(child, f"{title}.{child.name}")
