"""Who is missing, by the notes of those that wait: notes are given, and no clock is asked."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

from moe_runtime.parallel.communication.watch import CollectiveMonitor, Note, Notes, find_missing


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
    stamps: dict[tuple[str, str], str] = {}

    def look(number: int) -> tuple[set[str], set[str], set[str]]:
        return find_missing(
            "a",
            others,
            lambda process: [notes[process](number)] if process in notes else [],
            lambda process: process in ended,
            stamps,
        )

    look(0)
    return look(1)


def test_who_waits_at_another_step_is_not_missing():
    notes = {"b": waits("a", "b", "c", step=7)}
    assert look_twice("bc", notes) == (set(), {"c"}, {"b"})


def test_a_chain_of_groups_is_followed_to_its_end():
    notes = {"b": waits("a", "b", "c"), "c": waits("c", "d"), "d": waits("d", "e")}
    assert look_twice("b", notes) == (set(), {"e"}, {"b", "c", "d"})


def test_who_was_stopped_while_it_waited_is_missing():
    """Not those for whom it waited: it would have seen them come."""
    notes = {"b": stands("a", "b", "c"), "c": waits("a", "b", "c")}
    assert look_twice("bc", notes) == (set(), {"b"}, {"c"})


def test_who_ended_after_naming_another_is_not_at_fault():
    assert look_twice("bc", {"b": named("c")}, ended="b") == (set(), {"c"}, set())
    assert look_twice("bc", {"b": named("c")}, ended="bc") == ({"c"}, set(), set())


def test_a_death_behind_those_that_wait_is_seen():
    assert look_twice("b", {"b": waits("c")}, ended="c") == ({"c"}, set(), {"b"})


def test_everybody_may_wait_in_a_circle():
    notes = {"b": waits("c"), "c": waits("a", "b")}
    assert look_twice("b", notes) == (set(), set(), {"b", "c"})


def notes_of(store: HashStore, process: str, group: str) -> Notes:
    """As a process of that group holds them: names are new in each test, as processes are."""
    return Notes(PrefixStore(f"group {group}", store), process)


def test_notes_are_the_processes_whatever_the_group():
    store = HashStore()
    one, other = (notes_of(store, name, f"of {name}") for name in ("one", "two"))
    assert one.of("two") == ()
    other.write(["a", "c"], 5)
    (first,) = one.of("two")
    assert (first.has_given_up, first.step, first.others) == (False, 5, ("a", "c"))
    other.write(["a", "c"], 5)
    (again,) = one.of("two")
    assert again.stamp != first.stamp
    other.write(["c"], 5, gives_up=True)
    (given_up,) = one.of("two")
    assert (given_up.has_given_up, given_up.others) == (True, ("c",))
    other.remove()
    assert one.of("two") == ()


def test_who_goes_on_in_another_group_takes_back_whom_it_named():
    store = HashStore()
    first, second = (notes_of(store, "caught", group) for group in "ab")
    first.write(["x"], 5, gives_up=True)
    assert second.is_left  # so a wait in group b that ends well takes it back
    second.remove()
    assert not first.is_left
    found = find_missing("q", ["caught"], second.of, lambda process: process == "caught", {})
    assert found[0] == {"caught"}


def test_threads_that_wait_keep_notes_of_their_own():
    store = HashStore()
    first, second = (notes_of(store, "threads", group) for group in "ab")
    first.write(["x"], 5, gives_up=True)
    waits = threading.Thread(target=second.write, args=(["y"], 9))
    waits.start()
    waits.join()
    assert [(n.has_given_up, n.others) for n in first.of("threads")] == [
        (True, ("x",)),
        (False, ("y",)),
    ]
    found = find_missing("q", ["threads"], first.of, lambda process: process == "threads", {})
    assert found[:2] == (set(), {"x"})
    first.remove()
    assert [note.others for note in first.of("threads")] == [("y",)]
    first.remove(of_all_threads=True)
    assert first.of("threads") == ()


class Arrives(dist.Work):
    """A collective whose rows arrive in the given slice of the wait, or never."""

    def __init__(self, slices: int, *, just_after: bool = False) -> None:
        super().__init__()
        self.left, self.just_after = slices, just_after

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        if self.left:
            self.left -= 1
            raise RuntimeError("timed out")
        return True

    def is_completed(self) -> bool:
        return self.just_after and self.left == 0


class Gone(HashStore):
    """A store that can go, as with the process that keeps it."""

    is_gone = False

    def set(self, key: str, value: str) -> None:
        if self.is_gone:
            raise dist.DistNetworkError("Broken pipe")
        super().set(key, value)

    def get(self, key: str) -> bytes:
        if self.is_gone:
            raise dist.DistNetworkError("Broken pipe")
        return super().get(key)


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """The group of this process, its only member."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_what_arrives_counts_though_the_store_has_gone(alone):
    """The process that keeps it may have ended in good order, its part done."""
    watch = CollectiveMonitor(alone, timeout_s=60.0)
    watch._notes._store = store = Gone()
    watch.wait(Arrives(1), 1, True, "a sum")
    store.is_gone = True
    watch.wait(Arrives(2), 2, True, "a sum")


def test_what_arrives_just_after_a_slice_counts(alone):
    CollectiveMonitor(alone, timeout_s=60.0).wait(Arrives(1, just_after=True), 1, True, "a sum")


def test_a_wait_or_a_block_that_ends_well_takes_back_the_note_of_another_group(alone):
    first, second = CollectiveMonitor(alone), CollectiveMonitor(alone)
    first._notes.write(["x"], 5, gives_up=True)
    second.wait(Arrives(0), 1, True, "a sum")
    assert not first._notes.is_left
    first._notes.write(["x"], 5, gives_up=True)
    with second.over_torch("agreeing"):
        pass
    assert not first._notes.is_left
