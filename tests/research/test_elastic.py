"""Experts spread over ranks that come and go: the same bits, no request lost, errors that name."""

import contextlib
import gc
import io
import json
import os
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import start_server
from text_checkpoint import NUM_EXPERTS, NUM_LAYERS, tiny_text_model
from thread_transport import ThreadGroup

import moe_runtime
from moe_runtime.checkpoints.packing import pack_checkpoint
from moe_runtime.errors import CheckpointError, RankFailureError
from moe_runtime.parallel.communication.transport import LocalTransport
from moe_runtime.parallel.placement_map import PlacementMap
from moe_runtime.policies.placement import Devices, Placement
from moe_runtime.research.elastic import (
    ElasticRequest,
    ElasticService,
    _check_agreement,
    _rebalance,
    describe,
    start_local_workers,
)
from moe_runtime.research.elastic import member as changes
from moe_runtime.research.elastic.member import RunningRequest
from moe_runtime.research.elastic.paged_experts import (
    Epoch,
    SpreadModel,
    keys_of,
    load_spread_model,
)
from moe_runtime.types import ExpertKey

VOCAB = 300
PROMPTS = [tuple((7 * i + 3 * j) % VOCAB for j in range(3 + 5 * i)) for i in range(5)]
NEW_TOKENS = 10
# Nobody waits that long unless something is wrong.
TIMEOUT_S = 250.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("elastic")
    tiny_text_model(VOCAB).bfloat16().save_pretrained(folder)
    return folder


def random_placement(num_ranks: int, num_replicas: int, seed: int) -> Placement:
    """Experts and replicas anywhere, empty slots included."""
    random = np.random.default_rng(seed)
    width = -(-(NUM_EXPERTS + num_replicas + 1) // num_ranks) * num_ranks
    slots = np.full((NUM_LAYERS, width), -1)
    for layer in range(NUM_LAYERS):
        experts = [*range(NUM_EXPERTS), *random.integers(NUM_EXPERTS, size=num_replicas)]
        slots[layer, random.permutation(width)[: len(experts)]] = experts
    return Placement(expert_of_slot=slots, num_experts=NUM_EXPERTS, num_gpus=num_ranks)


class SilentGroup:
    """A group that everybody has joined, in which nothing is sent."""


def test_a_rank_without_pages_keeps_its_connections_for_slower_ranks(monkeypatch):
    opened: list[weakref.ref[SilentGroup]] = []

    def open_group(*_: object, **__: object) -> SilentGroup:
        group = SilentGroup()
        opened.append(weakref.ref(group))
        return group

    monkeypatch.setattr(changes, "open_group", open_group)
    said: list[str] = []
    store: Any = SimpleNamespace(add=lambda name, _: said.append(name))
    no_pages: Any = SimpleNamespace()
    store.clone = lambda: store
    change = changes.Change(
        epoch=4,
        num_old=3,
        num_new=2,
        members=(0, 1, 2),
        num_experts=2,
        slots=((0, 1),),
        transfers=((0, 1, 0, 1),),
    )
    preparation = changes.ChangePreparation(change, 2, no_pages, store, timeout_s=TIMEOUT_S)
    preparation._thread.join()
    gc.collect()
    assert said == ["epoch/4/ready"]
    assert opened[0]() is not None
    del preparation
    gc.collect()
    assert opened[0]() is None


def enter(model: SpreadModel, transport, placement: Placement) -> None:
    keys = keys_of(placement, transport.rank)
    pages = model.spread.pages
    arrivals = pages.read([key for key in keys if key not in pages])
    model.spread.enter(Epoch(0, transport, placement), arrivals)


def logits_of(model, prompt: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_no_placement_changes_a_bit_of_the_logits(checkpoint, num_ranks):
    """Each rank has a prompt of its own, the last one has none; compared with one process."""
    compare_logits(checkpoint, num_ranks)


@pytest.mark.parametrize("kind", ["planes", "fp8"])
def test_packed_and_quantised_experts_are_spread_too(checkpoint, tmp_path, kind):
    how: Any = {"code": kind} if kind == "planes" else {"quantize": kind}
    compare_logits(pack_checkpoint(checkpoint, tmp_path / "packed", **how).folder, 2)


def compare_logits(checkpoint: Path, num_ranks: int) -> None:
    """Of several placements with those of one process."""
    model = moe_runtime.load(checkpoint, device="cpu", max_tokens=64)
    with model.moe:
        expected = [logits_of(model, prompt) for prompt in PROMPTS[:num_ranks]]
    loaded = [load_spread_model(checkpoint) for _ in range(num_ranks)]

    def compute(transport, seed: int) -> list[torch.Tensor]:
        placement = random_placement(num_ranks, 2 * (seed % 2) * num_ranks, seed)
        mine = loaded[transport.rank]
        enter(mine, transport, placement)
        is_idle = transport.rank == num_ranks - 1 > 0
        answers = [] if is_idle else [logits_of(mine.model, PROMPTS[transport.rank])]
        if is_idle:
            mine.serve_others()
        return answers

    for seed in range(2):
        if num_ranks == 1:
            found = [compute(LocalTransport(), seed)]
        else:
            found = ThreadGroup(num_ranks).run(compute, seed)
        for answers, wanted in zip(found, expected, strict=True):
            assert all(torch.equal(answer, wanted) for answer in answers), f"placement {seed}"


class TestPages:
    def test_what_stays_is_not_moved(self, checkpoint):
        pages = load_spread_model(checkpoint).spread.pages
        keys = [ExpertKey(0, expert) for expert in range(4)]
        pages.switch_epoch(keys[:3], pages.read(keys[:3]))
        addresses = [pages.page(key).data_ptr() for key in keys[1:3]]
        before, size = pages.num_bytes, pages.page(keys[0]).numel()
        pages.switch_epoch(keys[1:], pages.read(keys[3:]))
        assert [pages.page(key).data_ptr() for key in keys[1:3]] == addresses
        assert keys[0] not in pages
        arrived = pages.page(keys[3]).numel()
        assert pages.num_bytes == before - size + arrived
        assert pages.peak_bytes == before + arrived

    def test_a_page_that_did_not_arrive(self, checkpoint):
        pages = load_spread_model(checkpoint).spread.pages
        keys = [ExpertKey(0, 0), ExpertKey(1, 5)]
        pages.switch_epoch(keys[:1], pages.read(keys[:1]))
        with pytest.raises(ValueError, match=r"1 experts have not arrived, .*layer=1, expert=5"):
            pages.switch_epoch(keys[1:], {})
        assert keys[0] in pages


@pytest.mark.parametrize("has_plain_cache", [True, False])
def test_a_request_that_moves_goes_on_with_the_same_bits(checkpoint, has_plain_cache, monkeypatch):
    """Sampled, so that a changed bit or random state shows; caches are sent or built again."""
    monkeypatch.setattr(
        "moe_runtime.research.elastic.member._is_plain", lambda layer: has_plain_cache
    )
    model = load_spread_model(checkpoint)
    enter(model, LocalTransport(), random_placement(1, 0, 0))
    request = ElasticRequest(prompt=PROMPTS[2], max_new_tokens=12, temperature=1.5, seed=3)
    stays = RunningRequest(0, request, model.ends)
    moves = RunningRequest(0, request, model.ends)
    while not stays.is_finished:
        stays.advance(model.model)
    for passes in (3, 4):
        for _ in range(passes):
            moves.advance(model.model)
        torch.save(moves.leave(), buffer := io.BytesIO())
        state = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        moves = RunningRequest.arrive(state, model.ends, model.model.config)
    while not moves.is_finished:
        moves.advance(model.model)
    assert moves.tokens == stays.tokens
    assert moves.take_report() == moves.tokens
    assert moves.take_report() == []


def test_requests_are_spread_evenly_with_the_fewest_moves():
    ranks = dict(enumerate([0, 0, 0, 1, 2, 2, 3]))
    for num_ranks in (1, 2, 3, 4, 6):
        moved = _rebalance(ranks, num_ranks)
        assert moved.keys() == ranks.keys()
        counts = np.bincount(list(moved.values()), minlength=num_ranks)
        assert counts.max() - counts.min() <= 1
        # What must move: all of the ranks that leave, and what exceeds the fullest shares.
        before = sorted(np.bincount(list(ranks.values()), minlength=num_ranks)[:num_ranks])
        kept = sum(map(min, before, sorted(counts)))
        assert sum(moved[n] != rank for n, rank in ranks.items()) == len(ranks) - kept


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[int, ...]]:
    """What one process generates for each prompt: greedily for the first ones, sampled else."""
    model = moe_runtime.load(checkpoint, device="cpu", max_tokens=128)
    answers = []
    with model.moe:
        for index, prompt in enumerate(PROMPTS):
            torch.manual_seed(index)
            options = {"do_sample": False}
            if index > 2:
                options = {"do_sample": True, "temperature": 1.2, "top_p": 0.9, "top_k": 0}
            ids = torch.tensor([prompt])
            tokens = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, **options
            )
            answers.append(tuple(tokens[0, len(prompt) :].tolist()))
    return answers


def make_requests() -> list[ElasticRequest]:
    sampled = {"temperature": 1.2, "top_p": 0.9}
    return [
        ElasticRequest(
            prompt=prompt, max_new_tokens=NEW_TOKENS, seed=index, **(sampled if index > 2 else {})
        )
        for index, prompt in enumerate(PROMPTS)
    ]


@contextlib.contextmanager
def running_service(checkpoint: Path, num_workers: int) -> Iterator[tuple[ElasticService, list]]:
    """On two ranks."""
    start_server()
    service = ElasticService(checkpoint, timeout_s=TIMEOUT_S)
    workers = start_local_workers(num_workers, checkpoint, service.address, timeout_s=TIMEOUT_S)
    try:
        service.start(2)
        yield service, workers
    finally:
        for worker in workers:
            worker.kill()


@pytest.fixture(scope="module")
def service(checkpoint: Path) -> Iterator[tuple[ElasticService, list]]:
    with running_service(checkpoint, 3) as running:
        yield running


def test_ranks_come_and_go_while_requests_run(service, expected):
    """2 ranks, then 4, a rebalance with replicas, and 1; every answer as in one process."""
    live, _ = service
    steps = [
        (lambda: live.resize(4), 4, NUM_LAYERS * NUM_EXPERTS // 2),
        (lambda: live.rebalance(num_replicas=4), 4, None),
        (lambda: live.resize(1), 1, None),
    ]
    for change, num_ranks, num_transfers in steps:
        # The first request keeps the others company until the change has taken place.
        streamed: list[list[int]] = [[] for _ in PROMPTS]
        answers = [
            live.submit(request, streamed[index].append)
            for index, request in enumerate(make_requests())
        ]
        report = change().result(TIMEOUT_S)
        assert (report.num_ranks, live.num_ranks) == (num_ranks, num_ranks)
        if num_transfers is not None:
            assert report.num_transfers == num_transfers
        assert [answer.result(TIMEOUT_S) for answer in answers] == expected
        assert list(map(tuple, streamed)) == expected
        assert live.placement.num_gpus == num_ranks


def test_a_change_that_fails_leaves_the_service_as_it_was(service, expected):
    live, _ = service
    before = live.num_ranks
    next_epoch = live._orders._epoch + 1
    live._store.set(f"epoch/{next_epoch}/failed", "rank 1: no memory")
    answers = [live.submit(request) for request in make_requests()]
    with pytest.raises(RankFailureError, match=r"given up, .* as it was: rank 1: no memory"):
        live.resize(2).result(TIMEOUT_S)
    assert [answer.result(TIMEOUT_S) for answer in answers] == expected
    assert live.num_ranks == before
    assert live.resize(2).result(TIMEOUT_S).num_ranks == 2


def test_bad_requests(service):
    live, _ = service
    with pytest.raises(ValueError, match="the model knows 256 positions"):
        live.submit(ElasticRequest(prompt=(1,), max_new_tokens=300))
    with pytest.raises(ValueError, match=r"token ids must be in \[0, 300\), got 300"):
        live.submit(ElasticRequest(prompt=(300,), max_new_tokens=3))
    with pytest.raises(ValueError, match="the prompt is empty"):
        ElasticRequest(prompt=(), max_new_tokens=3)
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        live.resize(0)
    with pytest.raises(ValueError, match=r"unknown algorithm 'elpb'.*eplb"):
        live.rebalance("elpb")
    with pytest.raises(ValueError, match="greedy makes no replicas"):
        live.rebalance("greedy", num_replicas=4).result(TIMEOUT_S)


def test_a_rank_that_dies_is_named_to_those_who_wait(checkpoint):
    """The service does not survive it: it has one of its own."""
    with running_service(checkpoint, 1) as (live, (worker,)):

        def kill(tokens: list[int]) -> None:
            """Called with the first tokens, so that the request cannot have ended before."""
            os.kill(worker.pid, signal.SIGKILL)

        answer = live.submit(ElasticRequest(prompt=PROMPTS[0], max_new_tokens=200), kill)
        with pytest.raises(RankFailureError, match="rank 1 of 2 has ended"):
            answer.result(TIMEOUT_S)
        with pytest.raises(RankFailureError, match="the service has ended"):
            live.submit(ElasticRequest(prompt=PROMPTS[0], max_new_tokens=2))


def test_maps_and_workers_of_another_model(checkpoint, tmp_path):
    service = ElasticService(checkpoint, timeout_s=1)
    with pytest.raises(ValueError, match="has not been started"):
        service.resize(2)
    signature = service._model.signature
    wide = PlacementMap(
        signature=signature,
        devices=Devices(num_nodes=1, gpus_per_node=2),
        placement=random_placement(2, 0, 0),
        algorithm="by hand",
    )
    with pytest.raises(CheckpointError, match="is for 2 ranks, there are 1"):
        service.start(1, placement=wide)
    with pytest.raises(RankFailureError, match="1 workers are needed, 0 came within 1 s"):
        service.start(2)
    mine = describe(service._model)
    other = json.dumps(json.loads(mine) | {"dtype": "torch.float16"})
    with pytest.raises(CheckpointError, match=r"dtype = torch\.bfloat16, this process torch\.fl"):
        _check_agreement(mine, other)
    # ranks send each other pages, which must mean the same to both
    packed = load_spread_model(pack_checkpoint(checkpoint, tmp_path / "packed").folder)
    with pytest.raises(CheckpointError, match=r"experts = bfloat16 .*, this process .*lossless"):
        _check_agreement(mine, describe(packed))
    _check_agreement(mine, mine)


def test_a_service_that_is_left_by_an_error_ends_at_once(checkpoint):
    request = ElasticRequest(prompt=PROMPTS[0], max_new_tokens=200)
    service = ElasticService(checkpoint, timeout_s=TIMEOUT_S)
    service.start(1)
    answer = service.submit(request)
    service.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    with pytest.raises(RankFailureError, match="ended before this was done"):
        answer.result(0)
