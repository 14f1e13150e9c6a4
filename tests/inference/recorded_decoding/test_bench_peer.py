"""This project as a system of `moe-runtime bench` on a GPU: its steps are recorded ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from emulated_models import bring_all, counted_recordings, emulated, load_on_emulated_device
from moe_families import Family
from tiny_checkpoints import save, tiny_model

from moe_runtime.benchmarks.peers import host
from moe_runtime.benchmarks.suite.peers import OURS, peer_file

pytest.importorskip("triton")
NUM_EXPERTS = 6
PROMPTS, NUM_NEW = [[3, 5, 7], [11, 2], [8, 9, 4, 6]], 4
SETTINGS = {"num_threads": 1, "max_tokens": 24, "cap_bytes": None, "variant": None}


@contextmanager
def peer_of(checkpoint: Path, slots: int | None = None) -> Iterator[Any]:
    """The peer on the CPU, or with so many slots a layer on the emulated device."""
    device = "cpu" if slots is None else "cuda:0"
    settings = SETTINGS | {"model": str(checkpoint), "device": device}
    _, peer = host._made(str(peer_file(OURS)), settings)
    if slots is None:
        peer.load()
    else:
        model = load_on_emulated_device(checkpoint, slots_a_layer=slots)
        with patch("moe_runtime.load", lambda path, **options: model):
            peer.load()
        if slots == NUM_EXPERTS:
            bring_all(model)
    yield peer
    peer.close()


def one_by_one(peer: Any) -> list[list[int]]:
    return [host.measure(peer, [ids], NUM_NEW, None)["ids"][0] for ids in PROMPTS]


def side_by_side(peer: Any, prompts: list[list[int]]) -> list[list[int]]:
    return host.measure(peer, prompts, NUM_NEW, None)["ids"]


@emulated
@pytest.mark.parametrize("slots", [2, NUM_EXPERTS])
def test_steps_are_recorded_once_and_equal_the_cpu(checkpoint, slots):
    """Of prompts of any length, since all have the room that is asked for."""
    with peer_of(checkpoint) as peer:
        expected = one_by_one(peer)
    with peer_of(checkpoint, slots) as peer, counted_recordings() as made:
        assert one_by_one(peer) == expected
        assert len(made) == 1
        peer._model.moe.check()
    assert len({tuple(ids) for ids in expected}) > 1


@emulated
def test_batched_sequences_equal_the_cpu(checkpoint):
    """Recorded where their prompts are of one length; others are filled up, and computed."""
    even, uneven = [ids[:2] for ids in PROMPTS[:2]], PROMPTS[:2]
    alone = PROMPTS[2:]  # as the last batch of a run
    with peer_of(checkpoint) as peer:
        expected = [side_by_side(peer, batch) for batch in (even, uneven, alone)]
    with peer_of(checkpoint, 2) as peer, counted_recordings() as made:
        for number, batch in enumerate((even, uneven, alone)):
            assert side_by_side(peer, batch) == expected[number]
            assert len(made) == [1, 1, 2][number]


@emulated
def test_a_model_with_states_is_recorded_as_others_are(tmp_path):
    kinds = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    family = Family("qwen3_next", "Qwen3NextForCausalLM", kinds)
    folder = save(tiny_model(family), tmp_path, sharded=True)
    with peer_of(folder) as peer:
        expected = one_by_one(peer)
    with peer_of(folder, 2) as peer, counted_recordings() as made:
        assert one_by_one(peer) == expected
        assert len(made) == 1
