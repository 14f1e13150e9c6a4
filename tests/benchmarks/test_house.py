"""What `benchmarks/house.py` counts."""

from pathlib import Path

from moe_runtime.benchmarks.house import ROOT, sentences, sizes


def test_the_product_is_its_rooms() -> None:
    found = sizes(ROOT)
    rooms = [one for name, one in found.items() if name not in ("product", "tests")]
    for what in ("lines", "files"):
        assert found["product"][what] == sum(one[what] for one in rooms) > 0
    assert found["moe_runtime"]["files"] == len([*Path(ROOT, "moe_runtime").glob("*.py")])


def test_a_sentence_ends_at_its_stop_and_tables_have_none() -> None:
    text = "# A heading\n\nOne two three. Four five six seven:\n\n- eight nine ten\n\n| a b c |"
    assert [*sentences(text)] == [3, 4, 3]
