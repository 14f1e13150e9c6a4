"""The tuner with a made-up clock, and the tables it writes."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_runtime.kernels.grouped_gemm import tile as tiles
from moe_runtime.kernels.grouped_gemm.tile import (
    GpuLimits,
    Tile,
    TileKey,
    measured_tiles,
    read_table,
    table_path,
    tile_key,
    write_table,
)
from moe_runtime.kernels.grouped_gemm.tuner import (
    LayerBatch,
    Problem,
    candidate_tiles,
    layer_problems,
    parse_shape,
    tune,
)

KEY = TileKey("plain", 16, 768, 2048, 64)
RULE = Tile(64, 128, 64, 4, 4)
GPU = "NVIDIA H100 80GB HBM3"


class TooLargeError(Exception):
    pass


def problem(key: TileKey = KEY, ran: list[Tile] | None = None) -> Problem:
    def run(tile: Tile) -> None:
        if tile.block_m == 128:
            raise TooLargeError
        if ran is not None:
            ran.append(tile)

    return Problem("down", key, 10, RULE, run)


def clock(seconds: dict[Tile, float], ran: list[Tile]) -> Callable[[Callable[[], Any]], float]:
    """Runs a call once and says what the tile it ran in takes."""

    def measure(call: Callable[[], Any]) -> float:
        call()
        return seconds.get(ran[-1], 1.0)

    return measure


def test_the_fastest_tile_wins_and_what_does_not_fit_is_passed_over():
    fast, slow, large = (replace(RULE, block_m=m) for m in (32, 16, 128))
    ran: list[Tile] = []
    (found,) = tune(
        [problem(ran=ran), problem(ran=ran)],
        lambda _: [slow, RULE, large, fast],
        clock({fast: 0.25, slow: 3.0}, ran),
        refusals=(TooLargeError,),
    )
    assert (found.tile, found.seconds, found.rule_seconds) == (fast, 0.25, 1.0)
    assert (found.num_tried, found.num_refused) == (3, 1)
    # All are compiled before any is timed, the rule's first; then the fastest twice again. A
    # product is measured once.
    again = [fast, RULE, slow]
    assert ran == [slow, fast, RULE, slow, fast, *again, *again]


def test_the_rule_wins_ties_and_other_errors_are_not_hidden():
    ran: list[Tile] = []
    other = replace(RULE, block_m=32)
    (found,) = tune([problem(ran=ran)], lambda _: [other], clock({}, ran))
    assert found.tile == RULE
    with pytest.raises(TooLargeError):
        list(tune([problem(ran=ran)], lambda _: [replace(RULE, block_m=128)], clock({}, ran)))


@pytest.mark.parametrize("kind", ["plain", "gated", "down_act_backward", "dw"])
@pytest.mark.parametrize("rows", [1, 16, 64, 2048])
def test_candidates_fit_the_device_and_the_rows(kind, rows):
    device = GpuLimits(shared_bytes=99 * 1024, has_wide_accumulators=False)
    found = candidate_tiles(problem(KEY._replace(kind=kind, rows=rows)), device)  # type: ignore[arg-type]
    assert 2 < len(found) < 100
    for tile in found:
        assert tile.fitted(2, device) == tile
        if kind == "down_act_backward":
            assert tile.block_n <= 128
        if kind != "dw":
            assert tile.block_m <= max(16, 2 * rows)


def test_every_product_of_a_layer_runs_in_a_tile_of_the_tuner():
    """In the interpreter: the calls are those that a GPU would time."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = layer_problems(LayerBatch(6, 32, 16, 3, 2), torch.float32, device)
    keys = [problem.key for problem in found]
    assert len(set(keys)) == len(keys) == 6
    assert {key.kind for key in keys} == {"plain", "gated", "down_act_backward", "dw"}
    assert keys[0] == TileKey("gated", 32, 32, 32, 4)
    assert found[0].flops == 2 * 12 * 32 * 32
    for one in found:
        one.run(Tile(16, 32, 16, 4, 2))


def test_a_table_is_used_from_the_next_call_on(monkeypatch, tmp_path):
    """What a launcher asks for is what the tuner keeps, for the GPU it was measured on alone."""
    monkeypatch.setattr(tiles, "cache_folder", lambda: tmp_path / "own")
    monkeypatch.setattr(tiles, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(tiles, "describe_device", lambda _: GpuLimits())
    gpu = [GPU]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu[0])
    sizes: dict[str, Any] = {"num_rows": 500, "num_experts": 8, "dim_n": 768, "dim_k": 2048}
    key = tile_key("plain", **sizes, dtype=torch.bfloat16)
    assert key == KEY

    def chosen() -> Tile:
        device = torch.device("cuda", 0)
        return tiles.choose_tile("plain", **sizes, dtype=torch.bfloat16, device=device)

    measured_tiles.cache_clear()
    assert chosen() == RULE
    shipped, own = replace(RULE, block_n=64), replace(RULE, block_m=16)
    write_table(table_path(GPU, tmp_path / "shipped"), GPU, {key: shipped})
    assert chosen() == shipped
    write_table(table_path(GPU), GPU, {key: own})
    assert chosen() == own
    gpu[0] = "NVIDIA H200"
    assert chosen() == RULE
    measured_tiles.cache_clear()


def test_tables_are_added_to_and_damaged_ones_refused(tmp_path):
    path = tmp_path / "deeper" / "gpu.json"
    assert read_table(path) == {}
    other = KEY._replace(kind="dw", rows=4096)
    write_table(path, GPU, {KEY: RULE})
    write_table(path, GPU, {other: replace(RULE, group_m=4)})
    assert read_table(path) == {KEY: RULE, other: replace(RULE, group_m=4)}
    assert [file.name for file in path.parent.iterdir()] == ["gpu.json"]
    whole = json.loads(path.read_text())
    for damaged in (
        "{",
        json.dumps({**whole, "format": 99}),
        json.dumps({**whole, "tiles": [{"kind": "wrong"}]}),
        json.dumps({**whole, "tiles": [{**whole["tiles"][0], "tile": [1, 2]}]}),
    ):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=r"is not a table of tiles .*bench kernels --tune"):
            read_table(path)


def test_tables_with_the_former_name_of_a_kind_are_still_read(tmp_path):
    """`dact` is what `down_act_backward` was called when users measured their first tables."""
    path, key = tmp_path / "gpu.json", KEY._replace(kind="down_act_backward")
    write_table(path, "gpu", {key: RULE})
    text = path.read_text()
    path.write_text(text.replace("down_act_backward", "dact"))
    assert path.read_text() != text
    assert read_table(path) == {key: RULE}
    write_table(path, "gpu", {})
    assert path.read_text() == text


def test_shapes_are_read_from_the_command_line():
    assert parse_shape("1,2, 3,4,4") == LayerBatch(1, 2, 3, 4, 4)
    for text in ("1,2,3,4", "1,2,3,4,x", "0,2,3,4,1", ""):
        with pytest.raises(ValueError, match="five numbers from 1 on"):
            parse_shape(text)
    with pytest.raises(ValueError, match=r"top_k must be at most .* \(4\), got 5"):
        parse_shape("1,2,3,4,5")
