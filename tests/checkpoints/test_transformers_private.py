"""What transformers does not promise is used in one place, with the versions that were tested."""

import ast
import re
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_runtime.checkpoints import transformers_private
from moe_runtime.errors import MoERuntimeWarning
from moe_runtime.inference.kv_cache import cache_of

ROOT = Path(__file__).resolve().parents[2]
PLACE = "moe_runtime/checkpoints/transformers_private.py"
# Modules of transformers that its documentation has pages of; its top level is public.
DOCUMENTED = {"cache_utils", "generation.streamers", "masking_utils", "utils"}
PRIVATE = {
    *("_apply_gate", "_default_apply_gate", "_finalize_model_loading", "_get_dtype_plan"),
    *("_hf_peft_config_loaded", "_is_hf_initialized"),
    *("_attn_implementation", "_supports_sdpa"),
    # what a model's code says: what it does is asked instead
    *("getsource", "getsourcelines", "__code__"),
    "past_key_values",  # of two names, by version
}
# And who else may use what, because it is about nothing else.
ELSEWHERE = {
    # peers that are measured: their blocks
    "benchmarks/": "models",
    # which need nothing of this project
    "benchmarks/peers/": "past_key_values",
    # checkpoints that are measured: the quantiser that published ones were made by
    "benchmarks/synthetic/model_shapes.py": "integrations.finegrained_fp8",
    # a layer's own code, which finds other steps of its states under their names
    "moe_runtime/inference/cpu/recurrent_steps.py": "__code__",
    # conversations are rendered as transformers does, in a program with limits
    "moe_runtime/serving/http/limits.py": "utils.chat_template_utils",
    # a loop that stands for one of transformers
    "moe_runtime/inference/device/decoding_model.py": "generation.utils",
    # an interface of 5.23 and later, which is looked for
    "moe_runtime/inference/hugging_face/dispatcher.py": "distributed.expert_parallel",
}


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines of a module that touch a private part of transformers, and what."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers."):
            module = str(node.module).removeprefix("transformers.")
            if module not in DOCUMENTED:
                yield node.lineno, module
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
            yield from ((node.lineno, n) for n in found if n.startswith("transformers."))
        elif isinstance(node, ast.Attribute) and node.attr in PRIVATE:
            yield node.lineno, node.attr
        elif isinstance(node, ast.keyword | ast.arg) and node.arg in PRIVATE:
            yield node.lineno, str(node.arg)
        elif isinstance(node, ast.Constant) and node.value in PRIVATE:
            yield node.lineno, str(node.value)


def may_use(path: str, what: str) -> bool:
    return any(path.startswith(who) and what.startswith(it) for who, it in ELSEWHERE.items())


def test_no_other_module_touches_a_private_part_of_transformers():
    links = [ROOT / "moe_runtime" / name for name in ("kernels", "policies", "models")]
    # a tree takes long to make: most files have no such word
    words = re.compile("|".join([r"transformers\.", *map(re.escape, PRIVATE)]))
    wrong = [
        f"{path}:{line} {what}"
        for top in ("moe_runtime", "models", "kernels", "policies")
        for file in sorted((ROOT / top).rglob("*.py"))
        if not any(file.is_relative_to(link) for link in links)
        and (path := str(file.relative_to(ROOT))) != PLACE
        and words.search(text := file.read_text(encoding="utf-8"))
        for line, what in private_uses(ast.parse(text))
        if not may_use(path, what)
    ]
    assert wrong == []


def new(cache=None):
    """Takes it as transformers does from 5.24 on."""


def old(past_key_values=None):
    """Takes it as before."""


@pytest.mark.parametrize(("forward", "name"), [(new, "cache"), (old, "past_key_values")])
def test_the_cache_is_found_by_either_name(forward, name):
    given, cache = {"use_cache": True}, object()
    assert cache_of(given) is None
    assert transformers_private.cache_name(forward) == name
    named = given | {name: cache}
    assert cache_of(named) is cache


def test_the_range_of_versions_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (bound,) = [d for d in project["dependencies"] if d.startswith("transformers")]
    numbers = re.findall(r"(\d+)\.(\d+)", bound)
    ends = [tuple(map(int, number)) for number in numbers]
    assert ends == [transformers_private.FIRST_TESTED, transformers_private.FIRST_UNTESTED]


@pytest.mark.parametrize("version", ["5.16.1", "5.25.0.dev0", "nonsense"])
def test_a_version_that_was_not_tested_is_named_in_one_line(version):
    transformers_private.warn_if_untested.cache_clear()
    with pytest.warns(
        MoERuntimeWarning, match=rf"^transformers {version} is not one .*5\.17.*5\.25"
    ):
        transformers_private.warn_if_untested(version)


@pytest.mark.parametrize("version", ["5.17.0", "5.24.1.dev0"])
def test_a_version_that_was_tested_is_not_mentioned(version):
    transformers_private.warn_if_untested.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transformers_private.warn_if_untested(version)
