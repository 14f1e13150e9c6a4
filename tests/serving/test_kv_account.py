"""Room for keys and values: who has it, who gives way, and that it always adds up."""

import random
import tracemalloc

from moe_runtime.serving.http.dividing import server_bytes
from moe_runtime.serving.kv_account import PIECE, KVAccount


def account_of(capacity: int, block: int = 4) -> KVAccount[tuple[int, ...]]:
    return KVAccount(capacity, block_tokens=block)


def keep(account: KVAccount[tuple[int, ...]], tokens: list[int]) -> int:
    size = account.block_tokens
    return account.keep(tokens, lambda i: tuple(tokens[: (i + 1) * size]))


def test_ten_thousand_random_operations_add_up():
    """What is found of a prefix is what was kept for just these tokens, whatever happened since."""
    draw = random.Random(0)
    account, rooms = account_of(200), dict[int, int]()
    refused = found_blocks = 0
    for _ in range(10_000):
        operation, who = draw.randrange(4), draw.randrange(6)
        tokens = [draw.randrange(2) for _ in range(draw.randrange(30))]
        if operation == 0:
            wanted = draw.randrange(1, 120)
            before = account.room_of(who), account.prefix_tokens
            if account.reserve(who, wanted):
                assert account.room_of(who) >= wanted
                rooms[who] = account.room_of(who)
            else:
                refused += 1
                assert (account.room_of(who), account.prefix_tokens) == before
                others = sum(rooms.values()) - rooms.get(who, 0)
                assert others + -(-wanted // PIECE) * PIECE > 200
        elif operation == 1:
            account.release(who)
            rooms.pop(who, None)
        elif operation == 2:
            kept = keep(account, tokens)
            assert kept <= len(tokens) // 4
            assert len(account.find(tokens)) == kept
        elif operation == 3:
            found = account.find(tokens)
            found_blocks += len(found)
            assert found == [tuple(tokens[: 4 * i + 4]) for i in range(len(found))]
        account.check()
        assert account.sequence_tokens == sum(rooms.values())
    assert refused > 100
    assert found_blocks > 100


def test_sequences_take_room_from_the_prefixes_used_longest_ago():
    account = account_of(32)
    for first in range(4):
        keep(account, [first] * 8)
    assert account.prefix_tokens == 32
    account.find([0] * 8)
    assert account.reserve("a", 16)
    assert [len(account.find([first] * 8)) for first in range(4)] == [2, 0, 0, 2]
    account.check()


def test_prefix_has_no_room_that_sequences_need():
    account = account_of(36)
    assert account.reserve("a", 32)
    assert keep(account, [1] * 12) == 1
    account.check()
    account.release("a")
    assert keep(account, [1] * 12) == 3


def test_growing_sequence_has_slack_only_while_there_is_room():
    account = account_of(1024, block=0)
    assert account.reserve("a", 512)
    assert account.room_of("a") == 512
    assert account.reserve("a", 513)
    assert account.room_of("a") == 560  # 513 and a sixteenth, in pieces of 16
    assert account.reserve("b", 464)
    assert account.reserve("b", 464)
    assert not account.reserve("b", 465)
    assert account.room_of("b") == 464
    account.check()


def test_sequence_has_the_least_room_or_all_that_there_is():
    account = KVAccount[None](100, block_tokens=0, least_tokens=40)
    assert account.reserve("one", 1)
    assert account.reserve("two", 2)
    assert [account.room_of(name) for name in ("one", "two")] == [48, 48]
    assert not account.reserve("three", 1)
    small = KVAccount[None](100, block_tokens=0, least_tokens=1000)
    assert small.reserve("one", 1)
    assert small.room_of("one") == 96
    account.check()
    small.check()


def test_without_blocks_nothing_is_kept():
    account = account_of(64, block=0)
    assert account.keep([1] * 40, lambda _: ()) == 0
    assert account.find([1] * 40) == []
    account.check()


def test_what_finds_a_prefix_again_is_small_beside_what_a_server_sets_aside_for_it():
    """A block has a tensor besides, of some 200 bytes in Python and as many in torch."""
    tokens, block = list(range(2**15)), 16
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        account: KVAccount[bool] = KVAccount(2**15, block_tokens=block)
        assert account.keep(tokens, lambda _: True) == 2**15 // block
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    set_aside = server_bytes(2**15) - server_bytes(0)
    assert used < set_aside / 4
    account.check()


def test_prefixes_of_other_roots_are_others():
    account = account_of(64)
    keep(account, [1] * 8)
    assert account.keep([1] * 8, lambda _: (), "3 key") == 2
    assert account.prefix_tokens == 16
    assert account.find([1] * 8, "3 key") == [(), ()]
    assert account.find([1] * 8, "4 key") == []
    assert account.find([1] * 8, "3 other") == []
    assert account.find([1] * 3 + [2] + [1] * 4) == []
    account.check()
