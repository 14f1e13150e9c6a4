"""Pages that are generated: commands, public names, model families, measured results."""

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

from typer.main import get_command

from moe_runtime.cli.main import build_app

ROOT = Path(__file__).resolve().parents[2]
_INTERNAL = {"moe_runtime.kernels.native", "moe_runtime.kernels.triton_support"}
"""Calls of the C library and of Triton, which the kernels beside them make for their callers."""


def command_reference() -> str:
    """Every command with its arguments and options, as the parser has them."""
    parts = [
        "# Commands and options\n",
        "Made from the program's own parser. [The command line](../guides/cli.md) says more about "
        "many of them.\n",
    ]
    for name, command in commands():
        parts.append(f"## {name}\n\n{_help_of(command)}\n")
        parts.append("| name | value | default | meaning |\n|---|---|---|---|")
        parts += [_row_of(param) for param in command.params if param.name != "help"]
        parts.append("")
    return "\n".join(parts)


def commands() -> Iterator[tuple[str, Any]]:
    """Every command of the parser with its name, those of groups as `group command`."""
    yield from _commands_of(get_command(build_app()), "")


def _commands_of(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands_of(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def _help_of(command: Any) -> str:
    return "\n\n".join(_plain(part) for part in (command.help or "").split("\n\n"))


def _row_of(param: Any) -> str:
    is_option = param.param_type_name == "option"
    if is_option:
        names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
    else:
        names = f"`{param.metavar or param.name.upper()}`"
    kind = "" if getattr(param, "is_flag", False) else f"`{_value_of(param)}`"
    if getattr(param, "multiple", False) or param.nargs == -1:
        kind += ", several"
    default = "required" if param.required else _default_of(param)
    cells = (names, kind, default, _plain(getattr(param, "help", None) or ""))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


_KINDS = {str: "TEXT", int: "INTEGER", float: "NUMBER", Path: "PATH"}


def _value_of(param: Any) -> str:
    """What a value is: the words there are, or its kind as the help shows it."""
    kind = param.type_descriptor.annotation
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    inner = next((one for one in (kind, *get_args(kind)) if one in _KINDS), str)
    low = "" if param.min is None else f" ≥ {param.min}"
    return param.metavar or _KINDS[inner] + low


def _default_of(param: Any) -> str:
    is_shown = isinstance(param.default, str | int | float | Path) and param.default is not False
    return f"`{param.default}`" if is_shown and str(param.default) else ""


def _plain(text: str) -> str:
    """A help text as a line of Markdown."""
    return " ".join(text.split()).replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")


def public_names() -> dict[str, list[str]]:
    """The names in `__all__` of every package that a program may import from, by package."""
    found = {}
    for top in ("moe_runtime", "kernels", "policies", "models"):
        for path in sorted((ROOT / top).rglob("__init__.py")):
            relative = path.relative_to(ROOT).parent
            # Some Python versions follow the links to the three folders while walking.
            if relative.parts[:2] in {("moe_runtime", "kernels"), ("moe_runtime", "policies")}:
                continue
            if relative.parts[:2] == ("moe_runtime", "models"):
                continue
            names = _all_of(path)
            parts = relative.parts if top == "moe_runtime" else ("moe_runtime", *relative.parts)
            if names and ".".join(parts) not in _INTERNAL:
                found[".".join(parts)] = names
    return dict(sorted(found.items()))


def _all_of(path: Path) -> list[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node, ast.Assign)
            return ast.literal_eval(node.value)
    return []


def api_page(package: str) -> str:
    """The page of a package: every public name by its docstring."""
    names = public_names()[package]
    entries = "\n".join(f"::: {package}.{name}\n" for name in names)
    return f"# {package}\n\n{entries}"


_PROOFS = (
    ("logits and text, whatever the budget", "tests/inference/test_families.py"),
    ("what autocast makes of them", "tests/inference/test_autocast.py"),
    ("gradients of inputs and of weights that stay", "tests/inference/test_gradients.py"),
    ("writing them back", "tests/inference/test_saving.py"),
    ("packing and quantising experts", "tests/checkpoints/test_packing.py"),
    ("several requests in the server's batches", "tests/serving/test_engine_families.py"),
    ("training with experts off memory", "tests/offload/test_exactness.py"),
)
"""What is compared with `transformers`, on all families or on those that differ in it."""


def model_table() -> str:
    """Every model family that the tests run, and the ones that are refused."""
    families, formats = _families(), tested_formats()
    lines = [
        "# Models\n",
        "Made from the table that the tests run: of each family a tiny random checkpoint is "
        "loaded, and its logits, its text and its gradients must equal those of `transformers` "
        f"({_transformers_range()}) with the same weights. A budget smaller than the experts "
        "changes no bit.\n",
        "[Formats of weights](../reference/formats.md) are independent of the family: the column "
        "has those in which the tests write checkpoints of it, beside fp32 and bf16. What a "
        "loaded model can be asked is [tested row by row]"
        "(../reference/transformers-features.md).\n",
        "| family | class | experts | text step by step | packed formats tested | oldest |",
        "|---|---|---|---|---|---|",
    ]
    for experts, table in (("interface", families.TABLE), ("adapter", families.ADAPTED)):
        for family in table:
            steps = "yes" if family.decodes else "no, as in `transformers`"
            packed = ", ".join(formats.get(family.model_class, ()))
            cells = (experts, steps, packed, _oldest(families, family.model_class))
            lines.append(f"| `{family.folder}` | `{family.model_class}` | {' | '.join(cells)} |")
    lines += [
        "",
        "*Interface*: `transformers` builds the family with its experts interface. *Adapter*: "
        "`moe_runtime.checkpoints.families` gives it one. *Oldest*: whether it also runs with the "
        "oldest `transformers` of the range (`make test-versions`).\n",
        "## What is compared\n",
        *(f"- {what}: `{file}`" for what, file in _PROOFS),
        "",
        "## Refused\n",
        "These have routed experts that are built otherwise; loading one says so in one line.\n",
        "| family | class |",
        "|---|---|",
    ]
    lines += [f"| `{one.folder}` | `{one.model_class}` |" for one in families.UNSUPPORTED]
    return "\n".join(lines) + "\n"


def _oldest(families: ModuleType, model_class: str) -> str:
    if model_class in families.NOT_IN_5_17:
        return "no"
    return "fp32" if model_class in families.FP32_ONLY_IN_5_17 else "yes"


def tested_formats() -> dict[str, list[str]]:
    """Formats of the checkpoints that tests write, by the class of the model."""
    found: dict[str, set[str]] = {}
    for name, args in _calls("quantized_checkpoints.py", "Quantized"):
        family = args[1]
        if name is not None and isinstance(family, ast.Call):
            _, model_class = (ast.literal_eval(one) for one in family.args[:2])
            found.setdefault(model_class, set()).add(name.partition("-")[2])
    for file in ("gguf_checkpoints.py", "gguf_corrected_gates.py", "gguf_linear_attention.py"):
        for _, args in _calls(file, "Family"):
            found.setdefault(ast.literal_eval(args[1]), set()).add("GGUF")
    return {model_class: sorted(names) for model_class, names in found.items()}


def _calls(file: str, function: str) -> Iterator[tuple[str | None, list[ast.expr]]]:
    """Calls in a table of the tests: the first argument where it is a text, and all of them."""
    path = ROOT / "tests" / "support" / "checkpoints" / file
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id == function and len(node.args) > 1:
            first = node.args[0]
            text = first.value if isinstance(first, ast.Constant) else None
            yield text if isinstance(text, str) else None, node.args


def citation_page() -> str:
    """How to cite, from the file that GitHub reads."""
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    title, version, license_ = (
        re.findall(rf'^{name}: "?([^"\n]+)', text, re.MULTILINE)[0]
        for name in ("title", "version", "license")
    )
    (author,) = re.findall(r'- name: "(.+)"', text)
    return (
        "# How to cite\n\n"
        "The software as below, and the papers whose methods you switched on: [Systems]"
        "(systems/index.md) names them, and says where each is.\n\n"
        "```bibtex\n@software{moe_runtime,\n"
        f"  title = {{{title}}},\n  author = {{{{{author}}}}},\n  version = {{{version}}},\n"
        f"  license = {{{license_}}}\n}}\n```\n\n"
        "In the repository `CITATION.cff` says the same. Name the commit as well where you say how "
        "fast something was: `moe-runtime --version` prints it, and every results file has it.\n"
    )


def _families() -> ModuleType:
    path = ROOT / "tests" / "support" / "checkpoints" / "moe_families.py"
    spec = importlib.util.spec_from_file_location("moe_families", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _transformers_range() -> str:
    for line in (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines():
        if line.strip().startswith('"transformers>='):
            return line.strip().strip('",').removeprefix("transformers")
    raise ValueError("pyproject.toml names no range of transformers")


def results_table() -> str:
    """The medians in every results file of `bench`, with the command that regenerates it."""
    parts = [
        "# Measured results\n",
        "Generated from `benchmarks/results`. Medians of the repetitions; each file has all of "
        "them, with versions and settings.\n",
    ]
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("format") != "moe-runtime-bench" or not found["measurements"]:
            continue
        machine = found["machine"]
        parts.append(f"## {path.stem}\n\n`{found['command']}`\n")
        parts.append(
            f"{machine['cpu']}, {machine['num_cores']} cores, {found['date'][:10]}, "
            f"commit {found['commit']}.\n"
        )
        metrics = dict.fromkeys(
            name
            for one in found["measurements"]
            for name, summary in one["summary"].items()
            if summary["judged"]
        )
        parts.append(f"| system | {' | '.join(metrics)} |\n|---|{'--:|' * len(metrics)}")
        for one in found["measurements"]:
            summaries = [one["summary"].get(name) for name in metrics]
            cells = [f"{part['median']:.4g}" if part else "–" for part in summaries]
            parts.append(f"| `{one['system']}` | {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)
