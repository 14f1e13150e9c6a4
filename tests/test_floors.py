"""Rules of the house that a machine can check: imports, file length, state, text.

The floors are those of the table in CONTRIBUTING.md. Files are parsed, not imported.
"""

import ast
import functools
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 800
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".json", ".c", ".cpp", ".h", ".yml", ".yaml"}

# Room -> floor. An import may lead to its own room or to a room on a lower floor.
FLOORS = {
    "errors": 0,
    "allocator": 0,
    "files": 0,
    "folders": 0,
    "config": 0,
    "digests": 0,
    "lazy": 0,
    "types": 0,
    "kernels": 1,
    "policies": 1,
    "routing": 2,
    "memory": 2,
    "checkpoints": 3,
    "parallel": 4,
    "lab": 5,
    "layer": 5,
    "models": 6,
    "inference": 7,
    "training": 8,
    "research": 9,
    "serving": 9,
    "integrations": 10,
    "cli": 11,
    "benchmarks": 12,
    "tests": 13,
}
# Floor 0 is one room: files that may use one another.
GROUND = {"allocator", "errors", "config", "lazy", "types", "files", "folders", "digests"}
LIGHT = sys.stdlib_module_names | {"moe_runtime"}
# A policy decides over keys and counts; clocks and threads belong to the store.
NOT_IN_POLICIES = {"torch", "triton", "transformers", "threading", "time"}


def python_files(*tops: str) -> list[Path]:
    """Python files under the given top folders, relative to the root; links are not followed."""
    links = [
        ROOT / "moe_runtime" / name for name in ("benchmarks", "kernels", "policies", "models")
    ]
    return [
        path.relative_to(ROOT)
        for top in tops
        for path in sorted((ROOT / top).rglob("*.py"))
        if not any(path.is_relative_to(link) for link in links)
    ]


SUITE = [f"benchmarks/{name}" for name in ("cases", "commands", "load", "peers")]
SUITE += ["benchmarks/suite", "benchmarks/synthetic"]
PRODUCT = python_files("moe_runtime", "kernels", "policies", "models", *SUITE)


def everything() -> list[Path]:
    return [*python_files("moe_runtime", "kernels", "policies", "models", "benchmarks", "tests")]


@functools.cache
def read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8", errors="replace")


@functools.cache
def parse(path: Path) -> ast.Module:
    """Once for all rules, as what follows from it."""
    return ast.parse(read(path), filename=str(path))


@functools.cache
def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """Kept for this file only: they are large. None of their parts is garbage before its end."""
    gc.disable()
    yield
    gc.enable()
    for kept in (read, parse, nodes_of):
        kept.cache_clear()


def room_of_file(path: Path) -> str | None:
    """The room a file belongs to; None for the package's own `__init__`, which is the door."""
    parts = path.with_suffix("").parts
    room = parts[1] if parts[0] == "moe_runtime" else parts[0]
    return None if room in ("__init__", "setup") else room


def imported_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every absolute module name a file imports, wherever in the file, with the line number."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module
            # `from moe_runtime import inference` imports a room as well.
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def room_of_module(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "moe_runtime" or len(parts) == 1:
        return None
    return parts[1] if parts[1] in FLOORS else None


def may_import(room: str, target: str) -> bool:
    if room == target or {room, target} <= GROUND:
        return True
    return FLOORS[target] < FLOORS[room]


def test_every_room_has_a_floor():
    """A new room gets a floor here and in CONTRIBUTING.md."""
    assert {room_of_file(path) for path in everything()} <= {*FLOORS, None}


def test_contributing_has_the_floors():
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", read(Path("CONTRIBUTING.md")), re.M)
    written = {
        name: int(floor)
        for floor, row in rows
        for name in re.findall(r"`(?:moe_runtime/)?(\w+)`", row)
        if name in FLOORS
    }
    assert written == {name: floor for name, floor in FLOORS.items() if name not in GROUND}


def test_imports_go_down():
    wrong = [
        f"{path}:{line} imports {module}"
        for path in PRODUCT  # tests and scripts may import every room
        if (room := room_of_file(path)) is not None
        for line, module in imported_modules(parse(path))
        if (target := room_of_module(module)) is not None and not may_import(room, target)
    ]
    assert wrong == []


def test_rule_can_fail():
    tree = ast.parse("def f():\n    from moe_runtime import inference")
    targets = {room_of_module(module) for _, module in imported_modules(tree)} - {None}
    assert targets == {"inference"}
    assert not may_import("memory", "inference")
    assert not may_import("memory", "routing")
    assert may_import("inference", "memory")


def test_light_rooms_stay_light():
    """The ground floor needs only the standard library, and policies never see a tensor."""
    wrong = []
    for path in PRODUCT:
        room = room_of_file(path)
        roots = {module.split(".")[0] for _, module in imported_modules(parse(path))}
        if room in GROUND or room is None:
            wrong += [f"{path}: {root}" for root in roots - LIGHT]
        if room == "policies":
            wrong += [f"{path}: {root}" for root in roots & NOT_IN_POLICIES]
    assert wrong == []


def c_files() -> list[Path]:
    found = [path for top in ("kernels", "policies") for path in (ROOT / top).rglob("*.[ch]")]
    return [path.relative_to(ROOT) for path in sorted(found)]


def test_files_are_short():
    assert Path("kernels/native/products/driver.c") in c_files()
    lengths = {str(path): len(read(path).splitlines()) for path in [*everything(), *c_files()]}
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_file_names_say_what_they_are():
    """No name occurs in three rooms or more."""
    rooms: dict[str, set[str | None]] = {}
    for path in PRODUCT:
        rooms.setdefault(path.name, set()).add(room_of_file(path))
    del rooms["__init__.py"]
    assert {name: found for name, found in rooms.items() if len(found) > 2} == {}


# Public classes of one name in several files that mean the same, and why there are several.
SAME_CLASSES: dict[str, str] = {
    "Peer": "what each file of benchmarks/peers is; they run in processes of their own"
}


def test_a_class_name_means_one_thing():
    files: dict[str, list[str]] = {}
    for path in PRODUCT:
        for node in nodes_of(parse(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    twice = {name: found for name, found in files.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in SAME_CLASSES} == {}
    assert set(SAME_CLASSES) <= set(twice)


def environment_reads(tree: ast.Module) -> list[int]:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    return [
        node.lineno
        for node in nodes_of(tree)
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and names & {alias.name for alias in node.names})
    ]


def blanket_handlers(tree: ast.Module) -> list[int]:
    return [
        node.lineno
        for node in nodes_of(tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and not isinstance(node.body[-1], ast.Raise)
    ]


# Files that set the environment, and why they may.
# Functions whose backward pass autograd sees through: tests/kernels/test_second_derivatives.py.
SEEN_THROUGH = {"AttachLoss", "_Assemble", "_FrozenLinear", "_Merge", "_Rotate", "_Tie"}


def unmarked_functions(tree: ast.Module) -> set[str]:
    """Autograd functions that do not refuse second derivatives where inputs are named too."""
    found = set()
    for node in nodes_of(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        if not {ast.unparse(base).rpartition(".")[2] for base in node.bases} & {"Function"}:
            continue
        parts = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
        marks = {ast.unparse(one).partition("(")[0] for one in parts["backward"].decorator_list}
        if "first_derivatives_only" not in marks:
            found.add(node.name)
    return found


def test_second_derivatives_are_refused_or_right():
    found = {str(path): unmarked_functions(parse(path)) for path in PRODUCT}
    assert found.pop("kernels/operands/second_derivative.py") == {"_Refusing"}
    assert set().union(*found.values()) == SEEN_THROUGH
    text = "class A(Function):\n  @once_differentiable\n  def backward(): ..."
    assert unmarked_functions(ast.parse(text)) == {"A"}


OWN_ENVIRONMENT = {
    "benchmarks/peers/deepspeed.py": "DeepSpeed is told by it alone; its process is its own",
    "benchmarks/peers/sglang.py": "as DeepSpeed",
    "benchmarks/peers/vllm.py": "as DeepSpeed",
    "moe_runtime/lab/replay/teaching.py": "that of its process, which has one thread",
}


def test_no_hidden_state():
    """No `global`; the environment is read by the command line only; nothing swallows errors."""
    wrong = []
    for path in PRODUCT:
        tree = parse(path)
        lines = [node.lineno for node in nodes_of(tree) if isinstance(node, ast.Global)]
        if room_of_file(path) != "cli" and path.parent != Path("benchmarks/commands"):
            lines += blanket_handlers(tree)
            lines += [] if str(path) in OWN_ENVIRONMENT else environment_reads(tree)
        wrong += [f"{path}:{line}" for line in lines]
    assert wrong == []


# Files that write without `files.py` around it, and why they may.
OWN_WRITERS = {
    "moe_runtime/files.py": "writes atomically",
    "benchmarks/suite/memory_cap.py": "control groups, whose files are the kernel's",
    "benchmarks/cases/dispatch_ranks.py": "logs in a folder that is removed",
    "moe_runtime/checkpoints/hub.py": "the hub's cache as huggingface_hub lays it out; headers",
    "moe_runtime/cli/disk.py": "a file without a name, to measure the disk",
    "moe_runtime/cli/processes.py": "the null device",
    "moe_runtime/cli/terminal.py": "appends what was typed",
    "moe_runtime/training/offload/disk.py": "records, written over in place",
    "moe_runtime/training/metrics.py": "appends lines, of which readers take whole ones",
    "moe_runtime/serving/batches/offline.py": "removes its own file, where it stayed empty",
    "moe_runtime/serving/digest_files.py": "a cache, with a sum in each file",
    # Into a folder that takes its place as a whole:
    "moe_runtime/checkpoints/export.py": "replace_folder",
    "moe_runtime/checkpoints/safetensors_index.py": "replace_folder",
    "moe_runtime/checkpoints/packing/writer.py": "replace_folder, from a folder that is taken up",
    "moe_runtime/inference/hugging_face/saving.py": "replace_folder",
    "benchmarks/synthetic/model_shapes.py": "replace_folder",
    "benchmarks/synthetic/texts.py": "replace_folder",
    "benchmarks/synthetic/config_shape.py": "replace_folder",
    "benchmarks/synthetic/gguf_files.py": "replace_folder",
    "models/lm/export.py": "replace_folder",
    "models/pocket/texts.py": "replace_folder",
}


def writes(tree: ast.Module) -> list[int]:
    """Lines that write files by their names, replace or remove what has a name."""
    names = {"write_text", "write_bytes", "rmtree", "rename", "NamedTemporaryFile"}
    names |= {"mkdtemp", "O_CREAT", "O_TRUNC"}
    found = []
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and node.attr in names & {"O_CREAT", "O_TRUNC"}:
            found.append(node.lineno)
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        of_module = isinstance(node.func, ast.Name) or ast.unparse(node.func).startswith("files.")
        modes = [a.value for a in node.args if isinstance(a, ast.Constant)]
        opens = name == "open" and any(isinstance(m, str) and set(m) & set("wxa") for m in modes)
        replaces = ast.unparse(node.func) in ("os.replace", "os.link")
        if opens or replaces or (name in names and not of_module):
            found.append(node.lineno)
    return found


def test_outputs_have_one_writer():
    """What is written by name goes through `files.py`."""
    wrong = [
        f"{path}:{line}"
        for path in PRODUCT
        if str(path) not in OWN_WRITERS
        for line in writes(parse(path))
    ]
    assert wrong == []
    assert writes(ast.parse("path.open('w')")) == writes(ast.parse("os.replace(a, b)")) == [1]


def committed_texts() -> list[Path]:
    """Text files of the working tree as git sees it: tracked, or new and not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    paths = [Path(name) for name in listing.split("\0") if name]
    return [
        path
        for path in paths
        if (path.suffix in TEXT_SUFFIXES or path.name in ("Makefile", "run", "LICENSE"))
        and (ROOT / path).is_file()
        and not (ROOT / path).is_symlink()
    ]


def test_no_machine_paths():
    """No file names a folder of somebody's machine: everything is relative or an argument."""
    folders = ["root", "work", "tmp", "home", "Users", "mnt"]
    machine_path = re.compile(rf"(?<![\w.<}}-])/(?:{'|'.join(folders)})/[\w.]+[^\s\"'`)]*")
    texts = {str(path): read(path) for path in committed_texts()}
    suspects = (path for path, text in texts.items() if any(f"/{one}/" in text for one in folders))
    found = {path: machine_path.findall(texts[path]) for path in suspects}
    assert {path: hits for path, hits in found.items() if hits} == {}
