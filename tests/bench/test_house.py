"""What `benchmarks/house.py` counts."""

from pathlib import Path

from moe_runtime.benchmarks.house import ROOT, sizes


def test_the_product_is_its_rooms() -> None:
    found = sizes(ROOT)
    rooms = [one for name, one in found.items() if name not in ("product", "tests")]
    for what in ("lines", "files"):
        assert found["product"][what] == sum(one[what] for one in rooms) > 0
    assert found["moe_runtime"]["files"] == len([*Path(ROOT, "moe_runtime").glob("*.py")])
