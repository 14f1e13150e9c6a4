"""After an exception in any function of a pass the model goes on with the same bits."""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
from injection import KINDS, Site, StruckThreads, calls_of, raise_on
from moe_families import Family

import moe_runtime
from moe_runtime.errors import MoERuntimeError
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.lab.traces.format import Trace, read_trace

PROMPT = torch.tensor([[5, 70, 11, 13]])
NEXT_TOKEN = torch.tensor([[43]])
SLOTS = 4
"""Few enough that most experts are read, evicted and waited for."""
EVERY_PASS = (
    "inference/cpu/step_layers.py",
    "inference/expert_layer.py",
    "inference/steps.py",
    "inference/hugging_face/loaded_model.py",
)
"""Files whose functions an equal pass calls again, whichever read is faster; except functions that
bind slots."""


@torch.no_grad()
def run(model: Any) -> torch.Tensor:
    """Logits of a prompt and of a step with its cache."""
    prompt = model(PROMPT, use_cache=True)
    step = model(NEXT_TOKEN, past_key_values=prompt.past_key_values, use_cache=True)
    return torch.cat((prompt.logits[0], step.logits[0]))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny_checkpoints.tiny_model(Family("qwen3_moe", "Qwen3MoeForCausalLM"))
    return tiny_checkpoints.save(made, tmp_path_factory.mktemp("tiny"), sharded=False)


def _forward(model: Any) -> Callable[[], Any]:
    return partial(run, model)


def _backward(model: Any) -> Callable[[], Any]:
    """A backward pass, whose forward pass has been made."""
    embedded = model.get_input_embeddings()(PROMPT).detach().requires_grad_()
    loss = model(inputs_embeds=embedded, labels=PROMPT).loss
    return partial(torch.autograd.grad, loss, embedded)


def load(path: Path, **options: Any) -> Any:
    summary = inspect_checkpoint(path, max_tokens=64)
    budget = summary.smallest_budget_bytes + (SLOTS - 2) * summary.slot_bytes
    return moe_runtime.load(path, device="cpu", host_memory=budget, max_tokens=64, **options)


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Trial:
    """A model with injected exceptions, and the conditions that must hold after each."""

    def __init__(self, model: Any, *, backward: bool = False) -> None:
        self.model = model
        self.expected = run(model)
        self._begin = _backward if backward else _forward
        self.sites = calls_of(self._begin(model))
        self._other = ThreadPoolExecutor(1)
        self.struck: set[Site] = set()

    def strike(self, site: Site, occurrence: int, kind: type[BaseException]) -> None:
        """The first time where the function is not called so often this time."""
        for number in dict.fromkeys((occurrence, 1)):
            if raise_on(site, number, kind, self._begin(self.model)):
                self.struck.add(site)
                break
        where = f"{kind.__name__} at {site}, {occurrence}"
        self.model.moe.check()
        assert self._other.submit(self._locks_are_free).result(600), where
        assert torch.get_num_threads() == 2, where
        assert torch.equal(run(self.model), self.expected), where

    def _locks_are_free(self) -> bool:
        locks = [self.model._steps.turn, self.model.moe._store._monitor._lock]
        for lock in locks:
            # a Python reading thread holds it for a moment; a lost one stays locked
            if not lock.acquire(timeout=600):
                return False
            lock.release()
        return True

    def strike_all(self, places: Sequence[str], seed: int = 0, every: int = 3) -> None:
        """One in ``every`` functions of these files, each at some call with some exception."""
        generator = random.Random(seed)
        sites = [
            site
            for site in self.sites
            if str(site).startswith(tuple(places)) and "<genexpr>" not in site.code.co_name
        ][generator.randrange(every) :: every]
        for number, site in enumerate(sites):
            times = generator.randint(1, min(self.sites[site], 8))
            self.strike(site, times, KINDS[(number + seed) % len(KINDS)])
        certain = {site for site in sites if str(site).startswith(EVERY_PASS)}
        certain = {site for site in certain if not site.code.co_name.startswith("bind")}
        assert certain
        assert certain <= self.struck, sorted(map(str, certain - self.struck))

    def close(self) -> None:
        self._other.shutdown()
        self.model.moe.check()
        self.model.moe.close()


STATEFUL = ("inference/", "memory/", "policies/", "lab/")
"""Files with stateful functions; kernels only compute."""


@pytest.mark.usefixtures("_two_threads")
def test_an_exception_in_a_pass_leaves_nothing_behind(checkpoint):
    trial = Trial(load(checkpoint, prefetch="enforce"))
    trial.strike_all(STATEFUL)
    assert any(str(site).startswith("memory/store.py") for site in trial.struck)
    trial.close()


@pytest.mark.usefixtures("_two_threads")
def test_an_exception_in_a_layer_whose_experts_are_resident_leaves_nothing_behind(checkpoint):
    """Where experts are used without being leased."""
    trial = Trial(moe_runtime.load(checkpoint, device="cpu", host_memory="1GiB", max_tokens=64))
    trial.strike_all(("inference/expert_layer.py", "memory/", "policies/eviction/"))
    trial.close()


@pytest.mark.usefixtures("_two_threads")
def test_an_exception_in_a_backward_pass_leaves_nothing_behind(checkpoint):
    trial = Trial(load(checkpoint), backward=True)
    trial.strike_all(("inference/expert_", "memory/"))
    trial.close()


@pytest.fixture
def coded(tmp_path: Path) -> Any:
    """A model whose experts are read into landing slots and encoded into others."""
    sizes = {"hidden_size": 120, "intermediate_size": 200}  # no multiple of the code's blocks
    made = tiny_checkpoints.tiny_model(Family("mixtral", "MixtralForCausalLM", config=sizes))
    path = tiny_checkpoints.save(made.bfloat16(), tmp_path / "model", sharded=False)
    options = {"max_tokens": 64, "cache_code": "planes"}
    summary = inspect_checkpoint(path, **options)
    budget = summary.smallest_budget_bytes + (SLOTS - 2) * summary.slot_bytes
    return moe_runtime.load(path, device="cpu", host_memory=budget, prefetch="enforce", **options)


def test_exceptions_where_experts_are_encoded_on_their_way(coded):
    """In functions that the threads call which encode arrivals, each some time."""
    fetcher = coded.moe._store._fetcher
    fetcher._copy = copy = StruckThreads(fetcher._copy)
    with copy.listed():
        expected = run(coded)
    every = ("memory/tiers.py", "inference/cache_code.py")
    sites = [site for site in copy.sites if str(site).startswith(every)]
    assert sites
    for number, site in enumerate(sites):
        copy.target = site, KINDS[number % len(KINDS)]
        with contextlib.suppress(MoERuntimeError):  # where the expert was waited for
            run(coded)
        assert copy.target is None, site
        coded.moe.check()
        assert torch.equal(run(coded), expected), site
    coded.moe.close()


@pytest.mark.usefixtures("_two_threads")
def test_an_exception_where_two_tiers_are_asked_leaves_nothing_behind(coded):
    trial = Trial(coded)
    trial.strike_all(("inference/expert_layer.py", "memory/tiers.py"))
    trial.close()


@pytest.mark.long
@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize(
    "options",
    [
        {"prefetch": "enforce", "predictor": "running-counts", "policy": "slru"},
        {"prefetch": "auto", "policy": "activation-aware", "shares": "adaptive"},
        {"prefetch": "observe", "trace": "trace.npz", "timeline": "timeline.json"},
    ],
)
def test_exceptions_under_other_options(checkpoint, tmp_path, options):
    files = {name: tmp_path / options[name] for name in ("trace", "timeline") if name in options}
    trial = Trial(load(checkpoint, **{**options, **files}))
    for seed in range(len(KINDS)):
        trial.strike_all(STATEFUL, seed, every=1)
    trial.close()


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_in_a_nested_call_leaves_the_outer_one_its_turn(checkpoint, kind):
    """A hook that calls the model again, fails, and is forgiven."""
    model = load(checkpoint)
    expected = run(model)
    depth = 0

    def again(*_: Any) -> None:
        nonlocal depth
        if depth == 0:
            depth = 1
            with pytest.raises(kind, match="as asked"):
                run(model)
        elif depth == 1:
            depth = 2
            raise kind("as asked")

    hook = model.model.layers[1].register_forward_pre_hook(again)
    assert torch.equal(run(model), expected)
    hook.remove()
    assert depth == 2
    assert torch.get_num_threads() == 2
    with ThreadPoolExecutor(1) as other:
        assert torch.equal(other.submit(run, model).result(600), expected)
    model.moe.check()
    model.moe.close()


@pytest.mark.parametrize(
    ("predictor", "options"),
    [("next-gate", {}), ("running-counts", {"trace": "t.npz", "timeline": "t.json"})],
)
def test_threads_that_share_a_model_get_what_they_get_alone(
    checkpoint, tmp_path, predictor, options
):
    files = {name: tmp_path / file for name, file in options.items()}
    model = load(checkpoint, prefetch="enforce", predictor=predictor, **files)
    prompts = [torch.arange(3 + i, 9 + 3 * i)[None] for i in range(4)]

    def generate(prompt: torch.Tensor) -> torch.Tensor:
        return model.generate(prompt, max_new_tokens=8, do_sample=False)

    alone = [generate(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        together = list(threads.map(generate, prompts))
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)
    model.moe.check()
    model.moe.close()
    if "trace" in files:
        assert_same_routing(read_trace(files["trace"]), alone)


def assert_same_routing(trace: Trace, texts: list[torch.Tensor]) -> None:
    """Each text stands in the trace twice, whichever steps of others were in between."""
    found = []
    for request in range(2 * len(texts)):
        rows = trace.token_request == request
        found.append((trace.token_id[rows].tolist(), trace.expert_ids[rows].tolist()))
    wanted = [text[0, :-1].tolist() for text in texts]  # the last token is not fed back
    assert [tokens for tokens, _ in found[: len(texts)]] == wanted
    assert sorted(found[len(texts) :]) == sorted(found[: len(texts)])
