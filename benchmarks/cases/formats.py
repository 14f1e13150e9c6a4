"""The case ``experts`` with ``--formats``: one layer's experts in quantised formats.

Each format is a system; so are a plain read of the same bytes, and every peer with the format. One
expert is drawn; the others are its rows in another order. The reference decodes one expert.

T tokens, K choices, D model, F hidden; R routed rows.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn.functional import silu

from moe_runtime.benchmarks import suite
from moe_runtime.benchmarks.cases import expert_layers
from moe_runtime.benchmarks.suite.peers import PeerProgram, describe_peer
from moe_runtime.benchmarks.synthetic.model_shapes import LayerSizes
from moe_runtime.kernels.combine import combine_assignments
from moe_runtime.kernels.decode_step.prepared import ExpertStep
from moe_runtime.kernels.expert_mlp import ExpertWeights, expert_ffn
from moe_runtime.kernels.native import require_native
from moe_runtime.kernels.quantized import QuantizedMatrix, WeightFormat
from moe_runtime.kernels.quantized.formats import INT8_GROUP
from moe_runtime.kernels.quantized.reference import scale_values
from moe_runtime.kernels.quantized.rounding import quantize
from moe_runtime.memory.source import Slab

_READ = "read"
# Reasons why a measurement ended, the worst first.
_ENDS = ("interrupted", "failed", "time", "most", "narrow")
_ROUNDING = {
    "mxfp4": WeightFormat("e2m1", "e8m0", group_cols=32),
    "int4": WeightFormat("uint4", "bf16", group_cols=32, zero=8),
    **{name: WeightFormat(name) for name in ("q8_0", "q4_k", "q6_k")},
}
FORMATS = {
    "bf16": None,
    "fp8": WeightFormat("e4m3", "f32", group_rows=128, group_cols=128),
    **_ROUNDING,
    **{f"{name}-int8": replace(kind, int8_activations=True) for name, kind in _ROUNDING.items()},
}
"""Formats by name. Names ending in ``-int8`` round activations, as ``load(activations="int8")``
does."""
# Byte offsets of a block's fp16 numbers, whose values are positive and negative alike.
_BLOCK_SCALES = {"q8_0": {0: 1.0}, "q4_k": {0: 1.0, 2: 7.5}, "q6_k": {208: 1.0}}
_ALIGNMENT = 64
# Gate, up and down multiply rounded rows.
_ROUNDED_PRODUCTS = 3

Matrix = Tensor | QuantizedMatrix


@dataclass(frozen=True, kw_only=True)
class FormatLayer(expert_layers.ExpertLayer):
    """Experts in a format; ``module`` computes them as a decode step of a loaded model does."""

    format_name: str
    experts: Sequence[ExpertWeights]
    memory: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        return self.memory.device

    @property
    def expert_bytes(self) -> int:
        return sum(matrix.nbytes for matrix in _matrices(self.experts[0]))

    def input_rounding(self, num_tokens: int) -> float:
        """Each number is half of a step from its own at most, and a step a 127th of the largest
        of a group: in the 2-norm no more than the root of the group's size as often."""
        del num_tokens
        kind = FORMATS[self.format_name]
        is_rounded = kind is not None and kind.int8_activations
        return _ROUNDED_PRODUCTS * INT8_GROUP**0.5 / (2 * 127) if is_rounded else 0.0

    def select(self, implementation: str) -> None:
        """There is only one implementation."""

    def contenders(self, num_tokens: int, *, trains: bool) -> list[str]:
        """Only the format itself; codes have no gradients."""
        del num_tokens
        return [] if trains else [self.format_name]

    def in_float64(self, ids: Tensor) -> tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Tensor]:
        """Experts with decoded weights in float64, and the ids unchanged."""
        gate, up, down = (
            (one if isinstance(one, Tensor) else one.dequantize()).double()
            for one in _matrices(self.experts[0])
        )

        def compute(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
            hidden_TF = silu(x_TD @ gate.T) * (x_TD @ up.T)
            out_TD = torch.zeros_like(x_TD)
            for token, choices in enumerate(ids_TK.tolist()):
                for expert, weight in zip(choices, weights_TK[token], strict=True):
                    out_TD[token] += weight * (down @ hidden_TF[token].roll(expert)).roll(expert)
            return out_TD

        return compute, ids

    def handed_parts(self) -> Iterator[tuple[str, Tensor]]:
        """Codes ``[E, N, bytes]`` and scales of all experts, in bf16 or fp32, or bf16 weights."""
        for name in ("gate", "up", "down"):
            parts = zip(*(_parts(getattr(one, name)) for one in self.experts), strict=True)
            for what, every in zip((name, f"{name}_scales"), parts, strict=False):
                stacked = torch.stack(every)
                is_power = what != name and stacked.dtype == torch.uint8
                yield what, scale_values(stacked, "e8m0").bfloat16() if is_power else stacked


def make_format_layer(name: str, sizes: LayerSizes, memory: int) -> FormatLayer:
    """A layer with as many of its experts as fit."""
    num_experts, top_k, dim_d, dim_f = sizes
    generator = torch.Generator().manual_seed(0)
    shapes = (dim_f, dim_d), (dim_f, dim_d), (dim_d, dim_f)
    drawn = [_drawn(FORMATS[name], *shape, generator) for shape in shapes]
    slot_bytes = sum(_room(part) for matrix in drawn for part in _parts(matrix))
    count = min(num_experts, memory // slot_bytes)
    if count < top_k:
        raise ValueError(f"{count} experts of {slot_bytes} bytes fit, and a token takes {top_k}")
    slab = Slab(count, slot_bytes)
    every = (_placed(drawn, slab.slot(number), number) for number in range(count))
    experts = [ExpertWeights(gate, up, down) for gate, up, down in every]
    return FormatLayer(
        module=_decode_step(experts),
        num_experts=count,
        top_k=top_k,
        dim_model=dim_d,
        dim_hidden=dim_f,
        format_name=name,
        experts=experts,
        memory=slab.bytes,
    )


def _drawn(kind: WeightFormat | None, num_rows: int, num_cols: int, random: Generator) -> Matrix:
    if kind is not None and kind.block_codes:
        blocks = num_rows, kind.row_bytes(num_cols) // kind.block_bytes, kind.block_bytes
        codes = torch.randint(256, blocks, generator=random, dtype=torch.uint8)
        for first, scale in _BLOCK_SCALES[kind.codes].items():
            half = torch.tensor([scale * 2.0**-12], dtype=torch.float16)
            codes[..., first : first + 2] = half.view(torch.uint8)
        return QuantizedMatrix(kind, num_cols, codes.flatten(1))
    values = torch.randn(num_rows, num_cols, generator=random)
    if kind is None:
        return (values * num_cols**-0.5).bfloat16()
    if kind.codes != "e4m3":
        return quantize(values * num_cols**-0.5, kind)
    # experts are row rotations of one, so block scales rotate with them
    shape = kind.scales_shape(num_rows, num_cols)
    scales = torch.rand(shape[1], generator=random).add_(0.5).mul_(num_cols**-0.5 / 112)
    codes = (values * 112).clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return QuantizedMatrix(kind, num_cols, codes, scales.repeat(shape[0], 1))


def _placed(drawn: Sequence[Matrix], slot: Tensor, number: int) -> Iterator[Matrix]:
    """Matrices rotated by ``number`` rows, one after the other in a slot."""
    offset = 0
    for matrix in drawn:
        copies = []
        for part in _parts(matrix):
            place = slot[offset : offset + part.nbytes].view(part.dtype).view_as(part)
            copies.append(
                place.copy_(part.roll(number, 0) if len(part) == matrix.shape[0] else part)
            )
            offset += _room(part)
        if isinstance(matrix, Tensor):
            yield copies[0]
        else:
            yield QuantizedMatrix(matrix.format, matrix.num_cols, *copies)


def _matrices(expert: ExpertWeights) -> list[Matrix]:
    every = (expert.gate, expert.up, expert.down)
    return [one for one in every if isinstance(one, (Tensor, QuantizedMatrix))]


def _parts(matrix: Matrix) -> list[Tensor]:
    if isinstance(matrix, Tensor):
        return [matrix]
    return [part for part in (matrix.codes, matrix.scales) if part is not None]


def _room(part: Tensor) -> int:
    return -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT


def _decode_step(experts: Sequence[ExpertWeights]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    step = ExpertStep(experts[0].shape, "silu")

    def compute(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        ids_R = ids_TK.flatten().tolist()
        visited = [*dict.fromkeys(ids_R)]
        some = [experts[expert] for expert in visited]
        place_of = {expert: place for place, expert in enumerate(visited)}
        out_TD = step.layer(x_TD, weights_TK, [place_of[expert] for expert in ids_R], some)
        if out_TD is not None:
            return out_TD
        rows = [[row for row, own in enumerate(ids_R) if own == expert] for expert in visited]
        every = [row for own in rows for row in own]
        tokens = [row // ids_TK.shape[1] for row in every]
        out_RD = x_TD.new_empty(len(ids_R), x_TD.shape[1])
        expert_ffn(x_TD, some, [*map(len, rows)], tokens, every, out_RD, activation="silu")
        return combine_assignments(out_RD, weights_TK)

    return compute


@dataclass(frozen=True)
class FormatsPlan:
    names: Sequence[str]
    sizes: LayerSizes
    memory: int
    tokens: Sequence[int]
    block_s: float

    def metrics(self) -> dict[str, suite.Metric]:
        """For each number of tokens: seconds, bytes of the experts, and the share of the read
        speed."""
        kinds = {"s": suite.Metric("s"), "bytes": suite.Metric("bytes", is_judged=False)}
        kinds["of_read"] = suite.Metric("share", better="more")
        words = [(number, what) for number in self.tokens for what in kinds]
        return {f"forward_{number}_{what}": kinds[what] for number, what in words}


class PlainRead(suite.BenchSystem):
    """A plain read of the same bytes as a format's calls; nothing is compared."""

    def __init__(self, name: str, plan: expert_layers.ExpertsPlan, layer: FormatLayer) -> None:
        super().__init__(name)
        self._plan, self._memory, self._library = plan, layer.memory, require_native()
        self._bytes = dict[int, int]()
        for number in plan.tokens:
            ids = (layer.routing(number, seed)[0] for seed in range(expert_layers.ROUTINGS))
            visited = median(len(one.unique()) for one in ids)
            self._bytes[number] = int(visited * layer.expert_bytes)

    def repeat(self) -> Mapping[str, suite.Number]:
        found: dict[str, suite.Number] = {}
        for number, num_bytes in self._bytes.items():
            places = len(self._memory) - num_bytes + 1

            def read(call: int, size: int = num_bytes, places: int = places) -> None:
                first = call * size % places
                self._library.read(self._memory[first : first + size])

            found[f"forward_{number}_s"] = expert_layers.time_block(read, self._plan.block_s)
            found[f"forward_{number}_bytes"] = num_bytes
        return found


def measure_formats(
    plan: FormatsPlan,
    rules: suite.Rules,
    settings: Mapping[str, Any],
    peers: Sequence[PeerProgram] = (),
) -> dict[str, Any]:
    require_native().set_num_threads(torch.get_num_threads())
    begin, rows, ends, counts = rules.clock(), list[dict[str, Any]](), set[str](), dict[str, int]()
    for done, name in enumerate(plan.names):
        if rules.is_stopping():
            ends.add("interrupted")
            break
        try:
            with suite.peer_failures():
                layer = make_format_layer(name, plan.sizes, plan.memory)
        except suite.PeerFailedError as error:
            rows.append(suite.describe_system(name, suite.MeasuredSystem(failure=str(error)), {}))
            continue
        counts[name] = layer.num_experts
        own = expert_layers.ExpertsPlan(
            layer=layer, tokens=plan.tokens, trains=False, block_s=plan.block_s
        )
        with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
            systems = [*_systems(own, layer, peers, Path(folder), running)]
            left_s = (rules.max_s - (rules.clock() - begin)) / (len(plan.names) - done)
            found, ended = suite.run_in_turn(systems, replace(rules, max_s=left_s))
        ends.add(ended)
        reads = found[f"{_READ}, {name}"]
        rows += [
            suite.describe_compared(one, _of_read(found[one.name], reads), plan.metrics())
            for one in systems
        ]
    ended = next((one for one in _ENDS if one in ends), "failed")
    return suite.make_results("experts", {**settings, "experts_made": counts}, ended, rows)


def _systems(
    plan: expert_layers.ExpertsPlan,
    layer: FormatLayer,
    peers: Sequence[PeerProgram],
    folder: Path,
    running: ExitStack,
) -> Iterator[suite.BenchSystem]:
    name = layer.format_name
    expected = {
        metric: expert_layers.in_float64(layer, number, trains=False, count=number)
        for metric, number, _ in plan.calls()
    }
    yield expert_layers.experts_system(name, plan, expected)
    yield PlainRead(f"{_READ}, {name}", plan, layer)
    for one in peers:
        if name in describe_peer(one.file)["FORMATS"]:
            settings = {**one.settings, "format": name}
            program = replace(one, name=f"{one.name}, {name}", settings=settings)
            yield expert_layers.ExpertsPeer(program, plan, expected, folder, running)


def _of_read(measured: suite.MeasuredSystem, reads: suite.MeasuredSystem) -> suite.MeasuredSystem:
    """Medians of repetitions, and their shares of the plain read's speed."""
    found = []
    for own, read in zip(measured.repetitions, reads.repetitions, strict=False):
        row = {name: suite.middle(value) for name, value in own.items()}
        for name in [] if measured is reads else [*row]:
            if name.endswith("_s"):
                row[name.removesuffix("s") + "of_read"] = suite.middle(read[name]) / row[name]
        found.append(row)
    return suite.MeasuredSystem(repetitions=found, failure=measured.failure)
