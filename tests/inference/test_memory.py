"""Budgets are divided as promised, and control groups are read as the kernel writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.config import format_bytes, nearest, parse_budget, parse_bytes
from moe_runtime.errors import CapacityError
from moe_runtime.inference import budget as memory


def plan(budget: int, **changes: int) -> memory.MemoryPlan:
    sizes = {"dense_bytes": 1000, "reserve_bytes": 500, "slot_bytes": 100, "num_experts": 40}
    return memory.plan_memory(budget, **(sizes | changes))


def test_slots_get_what_dense_weights_and_reserve_leave():
    assert plan(1700).num_slots == 2
    assert plan(2599).num_slots == 10
    assert plan(10**9).num_slots == 40


def test_a_budget_too_small_names_the_smallest():
    with pytest.raises(CapacityError, match="1700 bytes") as caught:
        plan(1699)
    assert caught.value.smallest_bytes == 1700


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7GiB", 7 * 2**30), ("1.5k", 1536), ("800MB", 800 * 10**6), ("12", 12), (" 3 m ", 3 * 2**20)],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("", "GiB", "7 parsecs", "-3", "1e9", "nan", "7GiB7"), "expected a size"),
        (("1.5", "0.5b", "2.25 B"), "size with its unit, such as"),
    ],
)
def test_bad_sizes_are_refused(texts, message):
    for text in texts:
        with pytest.raises(ValueError, match=rf"{message}.*got '{text}'$"):
            parse_bytes(text)


@pytest.mark.parametrize("text", ["2", "2.0", "1.5", "7.0", "1048575"])
def test_small_numbers_need_a_unit(text):
    expected = f"expected a size with its unit, such as 7GiB or 800MB, got '{text}'$"
    with pytest.raises(ValueError, match=expected):
        parse_bytes(text, needs_unit=True)
    with pytest.raises(ValueError, match=f"^m must be a size, .*{expected}"):
        parse_budget(text, name="m")


def test_large_numbers_without_a_unit_are_bytes():
    for size in ("8000000", "8000000.0", 8000000, 8e6, "8000000B"):
        assert parse_budget(size, name="m").num_bytes == 8_000_000
    assert parse_budget("2B", name="m").num_bytes == parse_budget(2, name="m").num_bytes == 2
    assert parse_bytes("12", needs_unit=False) == 12


def test_budgets():
    for asked, expected in (("auto", 90), (0.25, 25), ("0.25", 25), ("2k", 2048), (4096, 4096)):
        assert parse_budget(asked, name="m").resolve(100, auto_share=0.9) == expected


@pytest.mark.parametrize("value", [0, -5, 1.5, 2.0, 0.0, "0", "-1", "1.5", "inf", "nan", "much"])
def test_bad_budgets_are_refused(value):
    with pytest.raises(ValueError, match="host_memory"):
        parse_budget(value, name="host_memory")

    for text in ("99999999TiB", "1e400", "much"):
        with pytest.raises(ValueError, match=f"^m must be .* got '?{text}'?$"):
            parse_budget(text, name="m")
    for other in (None, True, [1]):
        with pytest.raises(TypeError, match="host_memory"):
            parse_budget(other, name="host_memory")


def test_sizes_for_people():
    expected = ["12 B", "2 KiB", "1000 MiB", "13 TiB"]
    assert [format_bytes(n) for n in (12, 2048, 1000 * 2**20, 13 * 2**40)] == expected


@given(st.integers(0, 2**44))
def test_a_printed_size_rounded_up_is_enough(num_bytes):
    text = format_bytes(num_bytes, up=True)
    assert num_bytes <= parse_bytes(text) <= num_bytes * 1.001
    assert len(text.split()[0].replace(".", "")) <= 4


def test_a_typo_names_the_nearest_option():
    assert nearest("lur", ["lfu", "lru", "sieve"]).startswith("did you mean 'lru'?")
    assert nearest("zzz", ["lru"]) == "known: lru"
    # A prefix is enough, however short.
    assert nearest("qwen", ["queen", "qwen3-30b-a3b"]).startswith("did you mean 'qwen3-30b-a3b'?")
    assert nearest("", ["lru"]) == "known: lru"


def test_a_budget_beyond_what_is_free_is_refused():
    with pytest.raises(CapacityError, match="exceeds the 1000 B that are free on this machine"):
        memory.resolve_budget(parse_budget(2000, name="m"), 1000, "this machine")


@pytest.mark.parametrize(
    ("limit", "used", "inactive", "expected"),
    [("1000", 600, 100, 500), ("max", 600, 100, None), (str(2**63 - 4096), 6, 1, None)],
)
def test_a_control_group_counts_its_page_cache_as_free(tmp_path, limit, used, inactive, expected):
    group = tmp_path / "a" / "b"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
    found = memory._levels(tmp_path, "/a/b", "memory.max", "memory.current", "inactive_file")
    assert found == ([] if expected is None else [expected])


def test_the_limit_of_a_parent_group_counts(tmp_path):
    group = tmp_path / "a" / "b"
    group.mkdir(parents=True)
    for level, limit in ((group, "9000"), (tmp_path / "a", "1000")):
        (level / "memory.max").write_text(limit)
        (level / "memory.current").write_text("400")
        (level / "memory.stat").write_text("inactive_file 0")
    files = ("memory.max", "memory.current", "inactive_file")
    assert min(memory._levels(tmp_path, "/a/b", *files)) == 600


def test_the_peak_is_at_least_what_is_resident():
    assert memory.peak_resident_bytes() >= memory.resident_bytes() * 0.9 > 0
    assert memory.available_host_bytes() > 0
