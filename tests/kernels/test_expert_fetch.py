"""`fetch_experts`: the kernel and the specification against a search by brute force."""

import math
import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from moe_runtime.kernels.expert_fetch import FetchTables, fetch_experts

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNTOUCHED = 0xA5
IMPLS = ["triton", "reference"] if DEVICE == "cpu" else ["triton"]


class Experts(NamedTuple):
    """A layer whose experts are on the device, in host memory, or in neither (the last one)."""

    tables: FetchTables
    host: Tensor  # [E, bytes of a slot]
    slots: Tensor
    residents: list[int]


def draw(sizes: list[int], num_experts: int, num_landing: int, lead: int = 0) -> Experts:
    """Experts of parts that lie apart on both sides; every third one is resident."""
    unit = math.gcd(8, *sizes, lead or 8)
    host_begins, begins, host_bytes, slot_bytes = [], [], lead, 0
    for size in sizes:
        host_begins.append(host_bytes)
        begins.append(slot_bytes)
        host_bytes += size + unit
        slot_bytes += size
    host_bytes = -(-host_bytes // 8) * 8
    slot_bytes = -(-slot_bytes // 8) * 8
    host = torch.randint(0, 256, (num_experts, host_bytes), dtype=torch.uint8)
    if DEVICE == "cuda":
        host = host.pin_memory()
    sources = host.data_ptr() + torch.arange(num_experts)[:, None] * host_bytes
    sources = sources + torch.tensor(host_begins)
    sources[-1] = 0
    num_slots = num_experts + num_landing
    order = list(range(num_slots))
    random.Random(num_experts).shuffle(order)
    residents = [order[num_landing + e] if e % 3 == 1 else -1 for e in range(num_experts)]
    sources[1::6] = 0  # some of the residents have no copy in host memory
    residents[-1] = -1
    given = (
        torch.tensor(residents, dtype=torch.int32),
        sources,
        torch.tensor([begins, sizes]),
        torch.tensor(order[:num_landing], dtype=torch.int32),
    )
    slots = torch.full((num_slots, slot_bytes), UNTOUCHED, dtype=torch.uint8)
    tables = FetchTables(*(tensor.to(DEVICE) for tensor in given))
    return Experts(tables, host, slots.to(DEVICE), residents)


def check(experts: Experts, ids_TK: Tensor, first: int, word_bytes: int, impl: str) -> None:
    """Compares all slots and the table with what a search over the choices says."""
    tables, host, slots, residents = experts
    slots_E = torch.full((len(residents),), -7, dtype=torch.int32, device=DEVICE)
    slots.fill_(UNTOUCHED)
    fetch_experts(
        ids_TK.to(DEVICE), tables, slots, slots_E, first=first, word_bytes=word_bytes, impl=impl
    )
    expected = torch.full_like(slots, UNTOUCHED, device="cpu")
    table = residents if first == 0 else [-1] * len(residents)
    table = [*table]
    chosen = ids_TK.flatten().tolist()
    landing = tables.landing_L.tolist()
    for own, expert in enumerate(chosen[first : first + len(landing)]):
        is_new = expert not in chosen[: first + own]
        is_there = 0 <= expert < len(residents) - 1  # the last one is nowhere
        if not (is_new and is_there and residents[expert] < 0):
            continue
        table[expert] = landing[own]
        for source, (begin, size) in zip(
            tables.sources_EP[expert].tolist(), tables.parts_2P.T.tolist(), strict=True
        ):
            offset = source - host[expert].data_ptr()
            expected[landing[own], begin : begin + size] = host[expert, offset : offset + size]
    assert slots_E.tolist() == table
    assert torch.equal(slots.cpu(), expected)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("sizes", "lead", "word_bytes"),
    [
        ([4096, 2048], 0, 8),
        ([16384 * 2 + 8, 24, 8], 120, 8),  # over a program's words, with short parts behind
        ([8192 + 4, 12], 4, 4),
        ([4098, 2], 62, 2),
        ([2049, 1, 127], 1, 1),
        ([64], 8, 1),  # fewer bytes a word than it could have
    ],
)
def test_what_is_chosen_and_not_there_lands_whole(sizes, lead, word_bytes, impl):
    experts = draw(sizes, num_experts=9, num_landing=4, lead=lead)
    check(experts, torch.tensor([[0, 1, 3, 5]]), 0, word_bytes, impl)
    check(experts, torch.tensor([[8, 4, 8, 1]]), 0, word_bytes, impl)  # nowhere, resident
    check(experts, torch.tensor([[2, 2, 2, 0]]), 0, word_bytes, impl)  # named again


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rounds_take_every_choice_once(dtype, impl):
    experts = draw([256, 40], num_experts=40, num_landing=3)
    ids_TK = torch.tensor([[6, -1, 9, 0], [0, 40, 38, 6], [39, 12, 1, 30]], dtype=dtype)
    for first in range(0, 12, 3):
        check(experts, ids_TK, first, 8, impl)
    check(experts, ids_TK[:, ::2], 0, 8, impl)  # strided
    check(experts, ids_TK[:, ::2], 3, 8, impl)
    check(experts, ids_TK[:1, :2], 0, 8, impl)  # fewer than there are landing slots


@pytest.mark.parametrize("impl", IMPLS)
def test_any_routing(impl):
    experts = draw([48, 16, 8], num_experts=33, num_landing=5)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        shape = (1 + seed % 3, 1 + seed % 7)
        ids_TK = torch.randint(-1, 35, shape, generator=generator)
        for first in range(0, ids_TK.numel(), 5):
            check(experts, ids_TK, first, 8, impl)


def test_what_does_not_fit_is_refused():
    tables, _, slots, residents = draw([64], num_experts=6, num_landing=2)
    slots_E, ids_TK = torch.zeros(6, dtype=torch.int32, device=DEVICE), tables.residents_E[None]

    def fetch(**changed) -> None:
        given = {"slots": slots, "slots_E": slots_E, "word_bytes": 8, "impl": "auto", **changed}
        found = tables._replace(**{n: given.pop(n) for n in [*given] if n in tables._fields})
        fetch_experts(ids_TK, found, **given)

    for name, bad, message in (
        ("word_bytes", 16, "word_bytes must be 1, 2, 4 or 8, got 16"),
        ("impl", "native", "impl must be one of auto, triton, reference"),
        ("slots_E", slots_E[:5], r"slots of experts must be \[6\]"),
        ("slots_E", slots_E.long(), "slots of experts must be contiguous torch.int32"),
        ("slots", slots.to(torch.int8), "slots must be contiguous torch.uint8"),
        ("slots", slots[:, ::2], "slots must be contiguous"),
        ("residents_E", tables.residents_E[:5], r"residents must be \[6\]"),
        ("sources_EP", tables.sources_EP.int(), "sources must be contiguous torch.int64"),
        ("parts_2P", tables.parts_2P[:1], r"parts must be \[2, 1\]"),
        ("landing_L", tables.landing_L.long(), "landing slots must be contiguous torch.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            fetch(**{name: bad})
    fetch()
    assert len(residents) == 6
