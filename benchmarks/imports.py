"""How much of this project a door imports: `python benchmarks/imports.py`.

Counts modules and lines of `moe_runtime`, by room, after importing the package, after loading the
pocket model, after generating with it, and after `moe-runtime run`, each in a process of its own.
`--modules` lists every module with the one that imported it first; `--tree` measures another
checkout beside this one; `--save` writes a results file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.machine import commit, describe_machine, machine_name, versions

from moe_runtime.files import write_text

ROOT = Path(__file__).resolve().parent.parent
BUDGET = "28MiB"
LOAD = f"""
import moe_runtime
model = moe_runtime.load(sys.argv[2], host_memory="{BUDGET}")
"""
DOORS = {
    "import moe_runtime": "import moe_runtime",
    "load": LOAD,
    "load and generate": f"""{LOAD}
import torch
model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4)
""",
    "moe-runtime run": f"""
from moe_runtime.cli.main import main
main(["run", sys.argv[2], "--prompt", "The", "--max-new-tokens", "4", "--host-memory", "{BUDGET}"])
""",
}
# Runs a door, then prints a line of JSON: every module of ours with its lines and its importer.
WATCHED = """
import importlib.abc, json, pathlib, sys
importers = {}
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None:
            importers.setdefault(name, frame.f_globals.get("__name__", "?"))
sys.meta_path.insert(0, Watch())
sys.path.insert(0, sys.argv[1])
%s
found = {}
for name, module in sorted(sys.modules.items()):
    file = getattr(module, "__file__", None)
    if name.split(".")[0] == "moe_runtime":
        lines = len(pathlib.Path(file).read_text().splitlines()) if file else 0
        found[name] = {"lines": lines, "importer": importers.get(name)}
print("\\n" + json.dumps(found))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout")
    parser.add_argument("--modules", action="store_true", help="list modules and importers")
    parser.add_argument("--save", action="store_true", help="write a results file")
    arguments = parser.parse_args()
    rows = [row for tree in [*arguments.tree, ROOT] for row in measure(tree, arguments.modules)]
    if not arguments.save:
        return
    machine = describe_machine()
    results = {
        "command": "python benchmarks/imports.py --save" + " --tree BEFORE" * len(arguments.tree),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "versions": versions(),
        "rows": rows,
    }
    output = ROOT / "benchmarks" / "results" / f"imports-{machine_name(machine)}.json"
    write_text(output, json.dumps(results, indent=1) + "\n")
    print(f"wrote {output.relative_to(ROOT)}")


def measure(tree: Path, lists_modules: bool) -> list[dict[str, Any]]:
    """A row for each door of a checkout, printed as it is measured."""
    rows = []
    for door in DOORS:
        found = modules_after(door, tree)
        row = {"commit": commit(tree), "door": door} | totals(found)
        rows.append(row)
        print(
            f"{row['commit'][:12]}  {door:18}  {row['modules']:4} modules  {row['lines']:6} lines"
        )
        if lists_modules:
            for name, module in found.items():
                print(f"{module['lines']:6}  {name:60}  by {module['importer']}")
    return rows


def modules_after(door: str, tree: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Lines and importer of each module of ours that a door leaves behind in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        # the root of a checkout on the path would offer its folders as packages
        (Path(folder) / "moe_runtime").symlink_to(tree.resolve() / "moe_runtime")
        command = [sys.executable, "-P", "-c", WATCHED % DOORS[door]]
        command += [folder, str(ROOT / "models" / "pocket")]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(printed.splitlines()[-1])


def totals(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Modules and lines in all, and by room."""
    rooms: dict[str, dict[str, int]] = {}
    for name, module in found.items():
        first = name.split(".")[1] if "." in name else name
        room = rooms.setdefault(first, {"modules": 0, "lines": 0})
        room["modules"] += 1
        room["lines"] += module["lines"]
    lines = sum(module["lines"] for module in found.values())
    return {"modules": len(found), "lines": lines, "rooms": rooms}


if __name__ == "__main__":
    main()
