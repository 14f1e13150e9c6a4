"""The case ``experts``: one layer of experts by this project, transformers and peers.

Calls alternate between routings, so that few tokens read their weights from memory, as in a model.
An implementation whose outputs differ gets no numbers.

Two tokens are also computed in float64. The 2-norm of the error may be as large as the roundings
allow: K + 6 in the dtype of the weights (gate, up, activation, their product, an expert's output,
its weighting, K terms of the sum) and D + F in fp32, each an independent relative error of at most
the unit roundoff. A backward pass doubles them. All other tokens must be within twice the bound of
this project's.

Peers run in their own processes and only compute forward passes. Their threads are stopped between
turns, since some would keep spinning.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_runtime.benchmarks import suite
from moe_runtime.benchmarks.peers.host import time_block as time_block
from moe_runtime.benchmarks.suite.peers import PeerProcess, PeerProgram, started
from moe_runtime.benchmarks.synthetic.config_shape import model_of
from moe_runtime.benchmarks.synthetic.model_shapes import SHAPES, LayerSizes

PEERS = ("eager", "grouped_mm", "batched_mm")
"""Implementations of transformers."""
OURS = "moe_runtime"
ROUTINGS = 8
"""Calls cycle through this many routings."""
_TIMEOUT_S = 3600.0  # a peer may compile its operators on first use
IN_FLOAT64 = 2
FEW = 8  # eager's backward fills a gradient of all experts for each one: a minute for many experts
# batched_mm copies an expert for every row; beyond this many bytes it is left out.
_BATCHED_BYTES = 2 << 30


@dataclass(frozen=True, kw_only=True)
class CallsPlan:
    """The measured calls of a layer, and the seconds of a repetition of each."""

    tokens: Sequence[int]
    trains: bool
    block_s: float

    def calls(self) -> Iterator[tuple[str, int, bool]]:
        """The metric, the tokens and whether there is a backward pass, for each kind of call."""
        for has_backward in (False, True)[: 1 + self.trains]:
            for num_tokens in self.tokens:
                name = "backward" if has_backward else "forward"
                yield f"{name}_{num_tokens}_s", num_tokens, has_backward

    def metrics(self) -> dict[str, suite.Metric]:
        return {name: suite.Metric("s") for name, _, _ in self.calls()}


class TimedCall(NamedTuple):
    """A timed function of the call's number, and a check that counts compared and equal tokens."""

    run: Callable[[int], object]
    judge: Callable[[Any], tuple[int, int]]


class CallsSystem(suite.BenchSystem):
    """Calls under test by metric; `select` runs before each turn."""

    def __init__(
        self,
        name: str,
        calls: Mapping[str, TimedCall],
        block_s: float,
        select: Callable[[], object] = lambda: None,
        difference: str = "tokens differ by more than roundings allow",
    ) -> None:
        super().__init__(name)
        self._calls, self._block_s, self._select = calls, block_s, select
        self._difference = difference

    def repeat(self) -> Mapping[str, suite.Number]:
        with suite.peer_failures():
            self._select()
            if not self.compared:
                judged = [one.judge(one.run(0)) for one in self._calls.values()]
                compared, equal = (sum(one[part] for one in judged) for part in (0, 1))
                self.count(compared, equal, self._difference)
            return {name: time_block(one.run, self._block_s) for name, one in self._calls.items()}


def output_or_gradient(call: Callable[[Tensor], Tensor], x: Tensor, *, trains: bool) -> Tensor:
    """The output of a call, or the gradient of x with the output's gradient set to x."""
    if not trains:
        with torch.no_grad():
            return call(x)
    leaf = x.clone().requires_grad_()
    call(leaf).backward(x)
    assert leaf.grad is not None
    return leaf.grad


def num_near(found: Tensor, expected: Tensor, exact: Tensor, bound: float) -> int:
    """The number of tokens ``[T, D]`` within twice a relative bound of the expected ones.

    The first tokens must be within the bound of the exact results ``[few, D]``.
    """

    def is_within(one: Tensor, other: Tensor, bound: float) -> Tensor:
        other = other.double()
        return (one.double() - other).norm(dim=-1) / other.norm(dim=-1) <= bound

    near = is_within(found, expected, 2 * bound)  # False for NaN
    few = found[: len(exact)]
    near[: len(few)] &= is_within(few, exact, bound)
    return int(near.sum())


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """A module of experts in memory, called with x, ids and gate weights."""

    module: Any
    num_experts: int
    top_k: int
    dim_model: int
    dim_hidden: int

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def expert_bytes(self) -> int:
        return sum(p[0].nbytes for p in self.module.parameters() if len(p) == self.num_experts)

    def input_rounding(self, num_tokens: int) -> float:
        """The relative error that rounding the inputs of products causes."""
        del num_tokens
        return 0.0

    def select(self, implementation: str) -> None:
        """Select the implementation of later calls."""
        self.module.config._experts_implementation_internal = implementation

    def routing(self, num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        """Uniform top-k ids and normalised gate weights, ``[T, K]``."""
        generator = torch.Generator().manual_seed(seed)
        scores = torch.rand(num_tokens, self.num_experts, generator=generator)
        weights, ids = scores.topk(self.top_k)
        shares = weights / weights.sum(-1, keepdim=True)
        return ids.to(self.device), shares.to(self.device, self.dtype)

    def tokens(self, num_tokens: int) -> Tensor:
        """Random tokens ``[T, D]``."""
        generator = torch.Generator().manual_seed(99)
        drawn = torch.randn(num_tokens, self.dim_model, generator=generator)
        return drawn.to(self.device, self.dtype)

    def contenders(self, num_tokens: int, *, trains: bool) -> list[str]:
        """The implementations of transformers with enough memory and time for a call."""
        copied = num_tokens * self.top_k * self.expert_bytes * (2 if trains else 1)
        no_room = {"batched_mm"} if copied > _BATCHED_BYTES else set()
        slow = {"eager"} if trains and self.num_experts > FEW else set()
        return [name for name in PEERS if name not in no_room | slow]

    def in_float64(self, ids: Tensor) -> tuple[Any, Tensor]:
        """The chosen experts alone in float64, computed one by one, and the ids among them."""
        kept, places = ids.unique(return_inverse=True)
        few = copy.copy(self.module)
        few._parameters = {
            name: torch.nn.Parameter(value[kept].double(), requires_grad=False)
            if len(value) == self.num_experts
            else value
            for name, value in self.module.named_parameters(recurse=False)
        }
        few.config = copy.copy(self.module.config)
        few.config._experts_implementation_internal = "eager"
        few.num_experts = len(kept)
        return few, places

    def handed_parts(self) -> Iterator[tuple[str, Tensor]]:
        """The weights for a peer in another process: gate and up ``[E, F, D]``, down ``[E, D, F]``.

        Raises:
            PeerFailedError: the layer is not gate, up and down in bf16.
        """
        found = {name: value.detach() for name, value in self.module.named_parameters()}
        is_transposed = getattr(self.module, "is_transposed", False)
        is_plain = found.keys() == {"gate_up_proj", "down_proj"} and not is_transposed
        if self.dtype != torch.bfloat16 or not is_plain:
            kind = str(self.dtype).removeprefix("torch.")
            given = f"{', '.join(sorted(found))} in {kind}{', transposed' * is_transposed}"
            raise suite.PeerFailedError(
                f"takes gate_up_proj and down_proj in bfloat16; this layer has {given}"
            )
        gate, up = found["gate_up_proj"].chunk(2, dim=1)
        yield from (("gate", gate), ("up", up), ("down", found["down_proj"]))


def synthetic_layer(name: str, dtype: torch.dtype) -> ExpertLayer:
    """The experts of a named shape, with random weights."""
    config = replace(SHAPES[name], num_layers=1).config()
    config.pop("quantization_config", None)
    with torch.device("meta"):
        built = model_of(config)
    return _drawn(dtype, *_experts_of(built))


def layer_of_model(model: str | Path, dtype: str | torch.dtype) -> ExpertLayer:
    """The first layer of experts of a checkpoint, with random weights.

    Args:
        dtype: compute dtype; ``"auto"`` for the checkpoint's.

    Raises:
        CheckpointError: there is no readable checkpoint.
        UnsupportedModelError: transformers marks no experts in the model.
    """
    built, found_dtype = _built(model, dtype)
    return _drawn(found_dtype, *_experts_of(built))


def sizes_of_model(model: str | Path, dtype: str | torch.dtype) -> tuple[LayerSizes, torch.dtype]:
    """Like `layer_of_model`: the layer's sizes, and the compute dtype."""
    built, found_dtype = _built(model, dtype)
    return _experts_of(built)[1], found_dtype


def _built(model: str | Path, dtype: str | torch.dtype) -> tuple[Any, torch.dtype]:
    from moe_runtime.checkpoints.opening import build_on_meta, found_headers, open_checkpoint

    with found_headers(model) as folder:
        checkpoint = open_checkpoint(folder, dtype)
        return build_on_meta(checkpoint), checkpoint.dtype


def _experts_of(built: Any) -> tuple[Any, LayerSizes]:
    """The first module of experts, and its sizes."""
    from moe_runtime.checkpoints.expert_map import chosen_per_token, find_experts

    found = find_experts(built)[0]
    dims = found.module.down_proj.shape[1:]
    dims = reversed(dims) if getattr(found.module, "is_transposed", False) else dims
    return found.module, LayerSizes(found.num_experts, chosen_per_token(built, [found]), *dims)


def _drawn(dtype: torch.dtype, module: Any, sizes: LayerSizes) -> ExpertLayer:
    module = module.to(dtype).to_empty(device="cpu").eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        # Drawing all experts takes minutes: one is drawn, the others are its rows in another order.
        pattern = torch.randn(parameter.shape[1:], generator=generator).to(dtype) * 0.02
        for expert in range(len(parameter)):
            parameter.data[expert] = pattern.roll(expert, dims=0)
    return ExpertLayer(module=module, **sizes._asdict())


@dataclass(frozen=True, kw_only=True)
class ExpertsPlan(CallsPlan):
    layer: ExpertLayer

    def call(self, num_tokens: int, *, trains: bool) -> Callable[[int], Tensor]:
        """A function of the call's number that returns the finished output or x's gradient."""
        layer, module = self.layer, self.layer.module
        routes = [layer.routing(num_tokens, seed) for seed in range(ROUTINGS)]
        x = layer.tokens(num_tokens)

        def run(number: int) -> Tensor:
            ids, weights = routes[number % ROUTINGS]
            if trains:
                module.requires_grad_(True)
                weights = weights.clone().requires_grad_()
            out = output_or_gradient(lambda x: module(x, ids, weights), x, trains=trains)
            if trains:
                module.zero_grad(set_to_none=True)
                module.requires_grad_(False)
            if out.is_cuda:
                torch.cuda.synchronize(out.device)
            return out

        return run


def num_equal(plan: ExpertsPlan, found: Tensor, expected: Tensor, *, trains: bool) -> int:
    """The number of tokens ``[T, D]`` of the first routing that are close enough."""
    layer = plan.layer
    own, fp32 = (torch.finfo(dtype).eps / 2 for dtype in (layer.dtype, torch.float32))
    sums = (layer.top_k + 6) * own + (layer.dim_model + layer.dim_hidden) * fp32
    bound = (2 if trains else 1) * (sums + layer.input_rounding(len(found)))
    exact = in_float64(layer, len(found), trains=trains)
    return num_near(found.to(expected.device), expected, exact, bound)


def in_float64(
    layer: ExpertLayer, num_tokens: int, *, trains: bool, count: int = IN_FLOAT64
) -> Tensor:
    """The first tokens of the first routing in float64, ``[T, D]``."""
    count = min(num_tokens, count)
    ids, weights = (part[:count] for part in layer.routing(num_tokens, 0))
    few, places = layer.in_float64(ids)
    x = layer.tokens(num_tokens)[:count].double()
    return output_or_gradient(lambda x: few(x, places, weights.double()), x, trains=trains)


def experts_system(name: str, plan: ExpertsPlan, expected: Mapping[str, Tensor]) -> CallsSystem:
    """An implementation, compared with this project's results of the first routing."""

    def judge(metric: str, trains: bool, found: Tensor) -> tuple[int, int]:
        return len(found), num_equal(plan, found, expected[metric], trains=trains)

    calls = {
        metric: TimedCall(plan.call(tokens, trains=trains), partial(judge, metric, trains))
        for metric, tokens, trains in plan.calls()
        if name == OURS or name in plan.layer.contenders(tokens, trains=trains)
    }
    return CallsSystem(name, calls, plan.block_s, partial(plan.layer.select, name))


class PeerSystem(suite.BenchSystem):
    """A peer in its own process, which starts with its first turn."""

    def __init__(self, program: PeerProgram, running: ExitStack, **settings: Any) -> None:
        super().__init__(program.name, {})
        self._program, self._running = program, running
        self._settings = {**settings, **program.settings}
        self.process: PeerProcess | None = None

    def begin(self, *, stands_still: bool = False) -> PeerProcess:
        begun = started(self._program, _TIMEOUT_S, stands_still=stands_still)
        process = self._running.enter_context(begun)
        self.versions = process.ask("start", settings=self._settings)["versions"]
        return process


class ExpertsPeer(PeerSystem):
    """A peer that computes the layer. The first such peer writes the layer's files."""

    def __init__(
        self,
        program: PeerProgram,
        plan: ExpertsPlan,
        expected: Mapping[str, Tensor],
        folder: Path,
        running: ExitStack,
    ) -> None:
        super().__init__(program, running)
        self._plan, self._expected, self._folder = plan, expected, folder

    def repeat(self) -> Mapping[str, suite.Number]:
        folder = str(self._folder)
        if self.process is None:
            write_layer(self._plan, self._folder)
            self.process = self.begin(stands_still=True)
            self.process.ask("load_experts", folder=folder)
        calls = [(name, tokens) for name, tokens, trains in self._plan.calls() if not trains]
        if not self.compared:
            equal = 0
            for name, tokens in calls:
                self.process.ask("experts", folder=folder, tokens=tokens, block_s=None)
                bits = np.load(self._folder / f"{tokens}.npy")
                found = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
                equal += num_equal(self._plan, found, self._expected[name], trains=False)
            self.count(sum(tokens for _, tokens in calls), equal)
        asked = {"folder": folder, "block_s": self._plan.block_s}
        return {n: self.process.ask("experts", tokens=t, **asked)["seconds"] for n, t in calls}


def write_layer(plan: ExpertsPlan, folder: Path) -> None:
    """Write the weights of a layer and the tokens and routings of every call, unless present.

    Raises:
        PeerFailedError: see `ExpertLayer.handed_parts`.
    """
    layer = plan.layer
    if (folder / f"{plan.tokens[-1]}.npz").exists():  # the last file
        return
    for name, part in layer.handed_parts():
        np.save(folder / f"{name}.npy", _bits(part))
    for tokens in plan.tokens:
        routes = [layer.routing(tokens, seed) for seed in range(ROUTINGS)]
        ids = np.stack([ids.cpu().numpy() for ids, _ in routes])
        weights = np.stack([weights.float().cpu().numpy() for _, weights in routes])
        np.savez(folder / f"{tokens}.npz", x=_bits(layer.tokens(tokens)), ids=ids, weights=weights)


def _bits(values: Tensor) -> np.ndarray[Any, Any]:
    array = values.cpu().contiguous()
    is_bf16 = array.dtype == torch.bfloat16
    return array.view(torch.int16).numpy().view(np.uint16) if is_bf16 else array.numpy()


def measure_experts(
    plan: ExpertsPlan,
    rules: suite.Rules,
    settings: Mapping[str, Any],
    peers: Sequence[PeerProgram] = (),
    *,
    case: str = "experts",
    others: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Measure this project, implementations of transformers (all by default), and peers."""
    from moe_runtime.inference.hugging_face.backend import register_with_transformers

    register_with_transformers()
    plan.layer.select(OURS)
    expected = {name: plan.call(tokens, trains=trains)(0) for name, tokens, trains in plan.calls()}
    names = (OURS, *(PEERS if others is None else others))
    systems: list[suite.BenchSystem] = [experts_system(name, plan, expected) for name in names]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        systems += [ExpertsPeer(one, plan, expected, Path(folder), running) for one in peers]
        return suite.measure_systems(case, systems, plan.metrics(), rules, settings)
