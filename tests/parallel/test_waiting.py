"""Who is missing, by the notes of those that wait: notes are given, and no clock is asked."""

from collections.abc import Callable

from moe_runtime.parallel.communication.waiting import Inquiry, Note, Notes


def waits(*others: str, step: int = 1) -> Callable[[int], Note]:
    """The notes of a process that waits: the number of the look is their stamp."""
    return lambda look: Note(False, str(look), step, others)


def stands(*others: str) -> Callable[[int], Note]:
    """A process that was stopped while it waited: its last note stays as it is."""
    return lambda look: Note(False, "0", 1, others)


def named(*others: str) -> Callable[[int], Note]:
    return lambda look: Note(True, "0", 1, others)


def look_twice(
    others: str, notes: dict[str, Callable[[int], Note]], ended: str = ""
) -> tuple[set[str], set[str], set[str]]:
    """What process `a` finds out about those it waits for: ended, missing, waiting."""
    look = 0
    inquiry = Inquiry(
        "a",
        others,
        lambda process: notes[process](look) if process in notes else None,
        lambda process: process in ended,
    )
    for look in range(2):  # noqa: B007
        inquiry.look()
    return inquiry.ended, inquiry.missing, inquiry.waiting


def test_who_waits_at_another_step_is_not_missing() -> None:
    notes = {"b": waits("a", "b", "c", step=7)}
    assert look_twice("bc", notes) == (set(), {"c"}, {"b"})


def test_a_chain_of_groups_is_followed_to_its_end() -> None:
    notes = {"b": waits("a", "b", "c"), "c": waits("c", "d"), "d": waits("d", "e")}
    assert look_twice("b", notes) == (set(), {"e"}, {"b", "c", "d"})


def test_who_was_stopped_while_it_waited_is_missing() -> None:
    """Not those for whom it waited: it would have seen them come."""
    notes = {"b": stands("a", "b", "c"), "c": waits("a", "b", "c")}
    assert look_twice("bc", notes) == (set(), {"b"}, {"c"})


def test_who_ended_after_naming_another_is_not_at_fault() -> None:
    assert look_twice("bc", {"b": named("c")}, ended="b") == (set(), {"c"}, set())
    assert look_twice("bc", {"b": named("c")}, ended="bc") == ({"c"}, set(), set())


def test_a_death_behind_those_that_wait_is_seen() -> None:
    assert look_twice("b", {"b": waits("c")}, ended="c") == ({"c"}, set(), {"b"})


def test_everybody_may_wait_in_a_circle() -> None:
    notes = {"b": waits("c"), "c": waits("a", "b")}
    assert look_twice("b", notes) == (set(), set(), {"b", "c"})


def test_notes_are_the_processes_whatever_the_group() -> None:
    from torch.distributed import HashStore, PrefixStore

    store = HashStore()
    one, other = (Notes(PrefixStore(f"group {name}", store), name) for name in ("a", "b"))
    assert one.of("b") is None
    other.wait_for(["a", "c"], 5)
    first = one.of("b")
    assert first is not None
    assert (first.has_given_up, first.step, first.others) == (False, 5, ("a", "c"))
    other.wait_for(["a", "c"], 5)
    again = one.of("b")
    assert again is not None
    assert again.stamp != first.stamp
    other.give_up_on(["c"], 5)
    assert (given_up := one.of("b")) is not None
    assert (given_up.has_given_up, given_up.others) == (True, ("c",))
    other.take_back()
    assert one.of("b") is None
