from functools import lru_cache
from itertools import combinations

from harness.replay import Routes, belady_misses, lru_misses, misses_per_token
from hypothesis import given, settings
from hypothesis import strategies as st

NUM_EXPERTS = 5
steps = st.lists(
    st.frozensets(st.integers(0, NUM_EXPERTS - 1), min_size=1, max_size=2), min_size=1, max_size=9
)
slots = st.integers(2, NUM_EXPERTS)


def fewest_misses(wanted: list[frozenset[int]], num_slots: int) -> int:
    """Tries every content the cache could have after every step."""

    @lru_cache(None)
    def best(time: int, resident: frozenset[int]) -> int:
        if time == len(wanted):
            return 0
        need = wanted[time]
        others = sorted(resident - need)
        room = min(len(others), num_slots - len(need))
        kept = combinations(others, room)
        return len(need - resident) + min(best(time + 1, need | frozenset(k)) for k in kept)

    return best(0, frozenset())


def misses_of_plain_lru(wanted: list[frozenset[int]], num_slots: int) -> int:
    """LRU by time stamps, looked through from end to end."""
    last_use: dict[int, tuple[int, int]] = {}
    misses = 0
    for time, need in enumerate(wanted):
        misses += sum(expert not in last_use for expert in need)
        last_use.update({expert: (time, expert) for expert in need})
        while len(last_use) > num_slots:
            del last_use[min(last_use, key=lambda expert: last_use[expert])]
    return misses


@given(steps, slots)
def test_belady_is_the_optimum(wanted: list[frozenset[int]], num_slots: int) -> None:
    assert belady_misses(wanted, num_slots, set()) == fewest_misses(wanted, num_slots)


@given(steps, slots)
def test_lru_is_lru(wanted: list[frozenset[int]], num_slots: int) -> None:
    assert lru_misses(wanted, num_slots, {}) == misses_of_plain_lru(wanted, num_slots)


@settings(max_examples=50)
@given(steps, steps, slots)
def test_the_prompt_warms_both_caches(
    prompt: list[frozenset[int]], decode: list[frozenset[int]], num_slots: int
) -> None:
    routes = Routes(prompt=(tuple(prompt),), decode=(tuple(decode),))
    lru, optimum = misses_per_token(routes, num_slots)
    assert optimum <= lru
    whole = misses_of_plain_lru(prompt + decode, num_slots)
    expected = whole - misses_of_plain_lru(prompt, num_slots)
    assert round(lru * len(decode)) == expected


def test_everything_resident_misses_nothing() -> None:
    token = (frozenset({0, 1}), frozenset({2, 3}))
    routes = Routes(prompt=(token, token), decode=(token, token))
    assert misses_per_token(routes, 4) == (0.0, 0.0)
    assert misses_per_token(routes, 2) == (4.0, 4.0)
