"""The Python of the pages runs, each page's in one namespace, on a tiny model."""

import ast
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from http_server import model_of, served
from page_blocks import PAGES, blocks_of

import moe_runtime
from moe_runtime.checkpoints.opening import load_tokenizer
from moe_runtime.cli.main import main
from moe_runtime.inference.routing_replay import encode_routing, experts_of
from moe_runtime.kernels.expert_mlp import grouped_expert_mlp
from moe_runtime.lab.traces import read_trace
from moe_runtime.layer import MoELayer
from moe_runtime.serving.engine import Engine

SNIPPETS = [
    (page.name, number) for page in PAGES for number in range(len(blocks_of(page, "python")))
]
# What is larger on the pages than a test can afford, and what stands for it.
SMALLER = {
    '"4GiB"': '"64MiB"',
    '"7GiB"': '"64MiB"',
    '"8GiB"': '"64MiB"',
    '"/fast/disk/run"': '"fast/disk/run"',
    "max_tokens=8192": "max_tokens=128",
    "(510, 5347)": "(51, 34)",
    "world_size=4, ep=4": "world_size=1, ep=1",
    "tp_size=2, ep_size=2": "tp_size=1, ep_size=1",
    "MoELayer(2048, 1024, 64, 8,": "MoELayer(32, 16, 4, 2,",
}
NOT_RUN = {
    ("offloaded-training.md", 1): "the Trainer prints; tests/offload/test_trainers.py do the same",
}
"""Snippets of which only the imports are run, and why."""
WRITTEN = {("training.md", 0): "out/model/config.json"}
"""What a snippet leaves."""
SERVED = ("serving.md", 0)
"""Has a test of its own: the server's address differs each time."""


def trained_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained("MODEL", dtype=torch.float32).train()


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(2 * 9).view(2, 9)
    return {"input_ids": ids, "labels": ids}


def routed_answer() -> dict[str, Any]:
    model, ids = trained_model(), batch()["input_ids"][:1]
    shape = (ids.numel() - 1, len(experts_of(model)), model.config.num_experts_per_tok)
    routed = encode_routing(np.broadcast_to(np.arange(shape[-1], dtype=np.uint8), shape))
    answer = {"choices": [{"routed_experts": routed}]}
    return {"model": model, "ids": ids, "labels": ids, "answer": answer}


def layer_in_parts() -> dict[str, Any]:
    layer, x_TD = MoELayer(32, 16, 4, 2), torch.randn(7, 32)
    experts = layer.experts.stacked()
    return {
        "x_TD": x_TD,
        "routing": layer.gate(x_TD),
        "group": dist.group.WORLD,
        "experts": experts,
        "my_experts": partial(grouped_expert_mlp, experts=experts, activation="silu"),
        "my_shared_experts": torch.tanh,
    }


def placement() -> dict[str, Any]:
    for file in ("map.json", "next.json"):
        assert main(["place", "trace.npz", "--gpus", "4", "-o", file]) == 0
    return {"signature": read_trace(Path("trace.npz")).signature}


# What a page takes for granted.
GIVEN: dict[tuple[str, int], Callable[[], dict[str, Any]]] = {
    ("offloaded-training.md", 0): lambda: {
        "model": trained_model(),
        "batches": [[batch(), batch()]] * 2,
    },
    ("offloaded-training.md", 2): routed_answer,
    ("offloaded-training.md", 3): lambda: {"model": trained_model(), "batch": batch()},
    ("offloaded-training.md", 4): lambda: {"folder": "."},
    ("placement.md", 0): placement,
    ("scaling.md", 0): layer_in_parts,
    ("scaling.md", 1): lambda: {"path": "MODEL"},
    ("scaling.md", 2): lambda: {
        "message_bytes": [1e3, 1e5, 1e7],
        "seconds": [1e-5, 1e-4, 1e-2],
        "measured": 1e10,
        "rows": np.full((4, 4), 64),
    },
}


def snippet_of(name: str, number: int) -> str:
    page = next(page for page in PAGES if page.name == name)
    return blocks_of(page, "python")[number]


def made_small(text: str) -> str:
    for larger, smaller in SMALLER.items():
        text = text.replace(larger, smaller)
    return text


def imports_of(text: str) -> str:
    """The statements of a snippet that import."""
    found = [one for one in ast.parse(text).body if isinstance(one, ast.Import | ast.ImportFrom)]
    return ast.unparse(ast.Module(list(found), type_ignores=[]))


@pytest.mark.usefixtures("workplace", "group")
@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in SNIPPETS))
def test_the_snippets_of_a_page_run(name, capsys):
    names: dict[str, Any] = {}
    for place in (one for one in SNIPPETS if one[0] == name and one != SERVED):
        text = made_small(snippet_of(*place))
        names |= GIVEN.get(place, dict)()
        if place in NOT_RUN:
            text = imports_of(text)
        capsys.readouterr()
        exec(compile(text, f"{name}, snippet {place[1]}", "exec"), names)
        # an engine's failed request, say, raises nothing
        assert bool(capsys.readouterr().out) == ("print" in text), place
        assert Path(WRITTEN.get(place, ".")).exists()


@pytest.mark.usefixtures("workplace")
def test_the_client_is_answered():
    model = moe_runtime.load("OLMoE-1B-7B", host_memory="64MiB", max_tokens=128)
    with model.moe, Engine(model) as engine:
        tokenizer = load_tokenizer(Path("OLMoE-1B-7B"))
        with served([model_of("OLMoE-1B-7B", engine, tokenizer, 400)]) as site:
            names: dict[str, Any] = {}
            text = snippet_of(*SERVED)
            assert "http://127.0.0.1:8000" in text
            exec(text.replace("http://127.0.0.1:8000", site.address), names)
            names["client"].close()
    assert names["answer"].choices[0].finish_reason in {"length", "stop"}


def test_the_tables_have_no_row_in_vain():
    assert {*GIVEN, *NOT_RUN, *WRITTEN, SERVED} <= {*SNIPPETS}
    pages = "".join(snippet_of(*place) for place in SNIPPETS)
    assert [larger for larger in SMALLER if larger not in pages] == []
