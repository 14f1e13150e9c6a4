"""The map file: what is written is read back, and everything else is one clear error."""

import dataclasses
import json

import numpy as np
import pytest

from moe_runtime.errors import CheckpointError
from moe_runtime.parallel.placement_map import PlacementMap, load_placement_map
from moe_runtime.policies.placement import EPLB, Devices, Placement, RoutingProfile
from moe_runtime.types import ModelSignature

SIGNATURE = ModelSignature(model_type="olmoe", num_layers=3, num_experts=8, top_k=2, vocab_size=100)
DEVICES = Devices(num_nodes=2, gpus_per_node=2)


def make_map(seed: int = 0) -> PlacementMap:
    loads = np.random.default_rng(seed).zipf(1.5, (3, 8)).clip(max=50)
    placement = EPLB()(RoutingProfile.from_loads(loads), DEVICES, num_replicas=4)
    return PlacementMap(signature=SIGNATURE, devices=DEVICES, placement=placement, algorithm="eplb")


def test_a_map_is_read_back(tmp_path):
    written = make_map()
    written.save(tmp_path / "map.json")
    found = load_placement_map(tmp_path / "map.json")
    assert found.signature == SIGNATURE
    assert found.devices == DEVICES
    assert found.algorithm == "eplb"
    np.testing.assert_array_equal(found.placement.expert_of_slot, written.placement.expert_of_slot)
    assert found.experts_of_ranks(1) == written.placement.expert_of_slot[1].reshape(4, 3).tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["map.json"]


def test_empty_slots_survive(tmp_path):
    slots = np.tile([0, 1, 2, 3, 4, 5, 6, 7, -1, 0, -1, -1], (3, 1))
    placement = Placement(expert_of_slot=slots, num_experts=8, num_gpus=4)
    dataclasses.replace(make_map(), placement=placement).save(tmp_path / "map.json")
    found = load_placement_map(tmp_path / "map.json")
    np.testing.assert_array_equal(found.placement.expert_of_slot, slots)


def test_maps_of_another_model_or_size_are_refused():
    other = dataclasses.replace(SIGNATURE, num_layers=4)
    with pytest.raises(CheckpointError, match=r"made for olmoe \(3 layers.*with olmoe \(4 layers"):
        make_map().require(other)
    with pytest.raises(CheckpointError, match="for 4 ranks, there are 2"):
        make_map().require(SIGNATURE, num_ranks=2)
    make_map().require(SIGNATURE, num_ranks=4)


def test_update_arranges_and_counts():
    old, new = make_map(0), make_map(1)
    update = old.update(new)
    lacking = sum(
        len(new.placement.holds(layer, gpu) - old.placement.holds(layer, gpu))
        for layer in range(3)
        for gpu in range(4)
    )
    assert update.num_transfers == lacking
    assert old.update(new, rename="layers").num_transfers <= lacking
    assert old.update(old).moves == ()
    np.testing.assert_array_equal(update.target.placement.copies, new.placement.copies)


def damaged(**changes: object) -> dict:
    value = {
        "format": "moe-runtime-placement",
        "version": 1,
        "signature": dataclasses.asdict(SIGNATURE),
        "algorithm": "eplb",
        "num_nodes": 2,
        "gpus_per_node": 2,
        "layers": [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 3,
    }
    return {**value, **changes}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (damaged(format="other"), "not a placement map"),
        (damaged(version=2), "version 2 is not known"),
        (damaged(more=1), "expected the keys"),
        (damaged(num_nodes=0), "num_nodes is 0"),
        (damaged(num_nodes=True), "num_nodes is True"),
        (damaged(gpus_per_node=3), "must list the experts of 6 ranks"),
        (damaged(algorithm=3), "algorithm is 3"),
        (damaged(layers=[]), "layers must be a list"),
        (damaged(layers=[[[0, 1], [2, 3], [4, 5], [6, 7]]]), "1 layers of 8 experts"),
        (damaged(layers=[[[0, 1], [2, 3], [4, 5], [6, 6]]] * 3), "expert 7 of layer 0 has none"),
        (damaged(layers=[[[0, 1], [2, 3], [4, 5], [6, 9]]] * 3), "must hold experts"),
        (damaged(layers=[[[0, 1], [2, 3], [4, 5, 6], [7]]] * 3), "equally many slots"),
        (damaged(layers=[[[0, 1], [2, 3], [4, 5], "67"]] * 3), "not a list of expert ids"),
        (damaged(layers=[[[0, 1], [2, 3], [4, 5], [6, 1 << 70]]] * 3), "damaged"),
        (damaged(signature={"model_type": "olmoe"}), "signature must have exactly"),
        (damaged(signature={**dataclasses.asdict(SIGNATURE), "top_k": -1}), "top_k = -1"),
        ([1, 2], "not a placement map"),
    ],
)
def test_damaged_files_get_one_line(tmp_path, value, message):
    path = tmp_path / "map.json"
    path.write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_placement_map(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_are_no_json(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        load_placement_map(tmp_path / "none.json")
    for raw in (b"", b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "bad.json").write_bytes(raw)
        with pytest.raises(CheckpointError, match="not JSON"):
            load_placement_map(tmp_path / "bad.json")


def test_map_that_cannot_be_written(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be written"):
        make_map().save(tmp_path / "none" / "map.json")


def test_contradiction_with_the_model():
    with pytest.raises(ValueError, match="3 layers of 8 experts on 4 devices"):
        dataclasses.replace(make_map(), signature=dataclasses.replace(SIGNATURE, num_experts=9))
