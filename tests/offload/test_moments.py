"""Compressed moments compared with brute force, and training with its definition."""

import itertools

import pytest
import torch
from offloaded_models import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    WIDTH,
    batches,
    offloaded,
    rate_of,
    stack,
    train_offloaded,
)

import moe_runtime
from moe_runtime.errors import CheckpointError
from moe_runtime.training.offload.adamw import bytes_of_step, leading_vectors
from moe_runtime.training.offload.records import (
    CHUNK_ELEMENTS,
    ExpertTensor,
    MomentCodec,
    RecordLayout,
    Sections,
    moment_codec,
)
from moe_runtime.training.optimizer import DenseAdamW

BLOCK = 4096


def round_trip(codec: MomentCodec, values: torch.Tensor, step: int = 1) -> torch.Tensor:
    stored = torch.full((codec.num_bytes(len(values), values.dtype),), 0x7F, dtype=torch.uint8)
    codec.encode(values, stored, 0, step, 0)
    return codec.decode(stored, 0, len(values), values.dtype)


def second_moments(num: int) -> torch.Tensor:
    """Second moments over many orders of magnitude, some of them zero."""
    generator = torch.Generator().manual_seed(5)
    values = torch.exp(6 * torch.randn(num, generator=generator) - 12)
    values[::97] = 0
    return values


def test_bf16_rounds_to_a_neighbour_and_without_bias():
    codec = moment_codec("bf16")
    values = torch.tensor([1.0 + 2.0**-9, -3.0 - 2.0**-10, 0.0, 1.5])
    found = torch.stack([round_trip(codec, values, step) for step in range(2000)]).double()
    below, above = values.double() - 2.0**-6, values.double() + 2.0**-6
    assert bool(((found > below) & (found < above)).all())
    assert [len(column.unique()) for column in found.T] == [2, 2, 1, 1]
    # neighbours lie 2**-7 and 2**-6 apart: five standard deviations of a mean of 2,000 fair choices
    bounds = torch.tensor([2.0**-7, 2.0**-6, 0.0, 0.0]).double() * 5 * 0.5 / 2000**0.5
    assert bool(((found.mean(0) - values.double()).abs() <= bounds).all())


def expand_by_hand(group: torch.Tensor) -> list[tuple[float, float]]:
    """COAT on one group in fp64: what may be decoded for each element, twice the same unless the
    nearest number of E4M3 cannot be told in fp32."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    codes = codes[codes.isfinite() & (codes >= 0)].sort().values
    sizes = group.double().abs()
    some = sizes[sizes > 0]
    if not len(some):
        return [(0.0, 0.0)] * len(group)
    span = (some.max() / some.min()).log2()
    power = min(16.0, float(torch.log2(torch.tensor(448 / 2.0**-9)).double() / span))
    found = []
    for value, size in zip(group.tolist(), sizes, strict=True):
        wanted = (size / some.max()) ** power * 448
        near = [codes[(codes - wanted * (1 + sign * 1e-4)).abs().argmin()] for sign in (-1, 1)]
        back = sorted(float(some.max() * (code / 448) ** (1 / power)) for code in near)
        found.append(tuple(-x for x in reversed(back)) if value < 0 else tuple(back))
    return found


@pytest.mark.parametrize("kind", ["second moments", "first moments", "equal", "zeros", "tiny"])
def test_fp8_expands_the_range_as_defined(kind):
    values = {
        "second moments": second_moments(300),
        "first moments": torch.randn(300, generator=torch.Generator().manual_seed(1)) * 1e-3,
        "equal": torch.full((130,), -3e-7),
        "zeros": torch.zeros(129),
        "tiny": torch.tensor([1e-38, 1e-44, 0.0, -1e-41]),
    }[kind]
    found = round_trip(moment_codec("fp8"), values).double().tolist()
    wanted = [pair for group in values.split(128) for pair in expand_by_hand(group)]
    for ours, (low, high) in zip(found, wanted, strict=True):
        slack = 1e-4 * abs(high) + 2e-45
        assert low - slack <= ours <= high + slack


def test_chunks_and_odd_sizes_do_not_matter():
    values = second_moments(2 * CHUNK_ELEMENTS + 77)
    for name in ("bf16", "fp8"):
        codec = moment_codec(name)
        whole = round_trip(codec, values, 3)
        stored = torch.empty(codec.num_bytes(len(values), values.dtype), dtype=torch.uint8)
        for start in range(0, len(values), CHUNK_ELEMENTS):
            codec.encode(values[start : start + CHUNK_ELEMENTS], stored, start, 3, 0)
        assert torch.equal(codec.decode(stored, 0, len(values), values.dtype), whole)
        last = codec.decode(stored, 2 * CHUNK_ELEMENTS, len(values), values.dtype)
        assert torch.equal(last, whole[2 * CHUNK_ELEMENTS :])


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (16, 16)])
def test_leading_vectors_span_the_subspace_of_svd(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    basis = leading_vectors(matrix, 4)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    wanted = u[:, :4] if shape[0] <= shape[1] else vh[:4].T
    torch.testing.assert_close(basis @ basis.T, wanted @ wanted.T, rtol=1e-5, atol=1e-5)


def scripted(settings: moe_runtime.AdamW, inputs: list[torch.Tensor]) -> torch.nn.Module:
    """The definition in fp64 and in memory: Adam's formulas, and the format after every step."""
    model = stack(dtype=torch.float64)
    experts = [layer.experts for layer in model.layers]
    others = {n: p for n, p in model.named_parameters() if ".experts." not in n}
    dense = DenseAdamW(
        others, lr=0.1, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )
    codec = moment_codec(settings.moments)
    keys = list(itertools.product(range(LAYERS), range(EXPERTS)))
    moments: dict[tuple[int, int], list[torch.Tensor]] = {}
    bases: dict[tuple[int, int], list[torch.Tensor]] = {}
    updates = dict.fromkeys(keys, 0)
    for step, x in enumerate(inputs):
        model.loss(x).backward()
        dense.step(rate_of(step))
        for layer, expert in keys:
            key = (layer, expert)
            weights = [p[expert] for p in experts[layer].parameters()]
            grads = [p.grad[expert] for p in experts[layer].parameters()]
            got_tokens = bool(model.layers[layer].aux.routing.counts_E[expert])
            if settings.galore_rank and got_tokens:
                if updates[key] % settings.galore_refresh == 0:
                    bases[key] = [leading_vectors(g, settings.galore_rank) for g in grads]
                updates[key] += 1
            if settings.galore_rank:
                blank = [w.new_zeros(min(w.shape), settings.galore_rank) for w in weights]
                used = bases.get(key, blank)
                low = [
                    b.T @ g if g.shape[0] <= g.shape[1] else g @ b
                    for g, b in zip(grads, used, strict=True)
                ]
            else:
                used, low = [], grads
            flat = torch.cat([g.flatten() for g in low])
            mean, variance = moments.get(key, [flat * 0, flat * 0])
            b1, b2 = settings.betas
            mean, variance = b1 * mean + (1 - b1) * flat, b2 * variance + (1 - b2) * flat**2
            number, rate = step + 1, rate_of(step)
            root = (variance / (1 - b2**number)).sqrt() + settings.eps
            move = -rate * mean / (1 - b1**number) / root
            moments[key] = [coded(codec, m, number, i) for i, m in enumerate((mean, variance))]
            parts = move.split([g.numel() for g in low])
            with torch.no_grad():
                for i, (weight, part) in enumerate(zip(weights, parts, strict=True)):
                    weight.mul_(1 - rate * settings.weight_decay)
                    change = part.view(low[i].shape)
                    if used:
                        wide = weight.shape[0] <= weight.shape[1]
                        change = used[i] @ change if wide else change @ used[i].T
                        change = settings.galore_scale * change
                    weight.add_(change)
        for parameter in model.parameters():
            parameter.grad = None
    return model


def coded(codec: MomentCodec, moment: torch.Tensor, step: int, salt: int) -> torch.Tensor:
    if codec.is_exact:
        return moment
    stored = torch.empty(codec.num_bytes(len(moment), moment.dtype), dtype=torch.uint8)
    codec.encode(moment, stored, 0, step, salt)
    return codec.decode(stored, 0, len(moment), moment.dtype)


VARIANTS = [
    moe_runtime.AdamW(weight_decay=0.1, moments="bf16"),
    moe_runtime.AdamW(weight_decay=0.1, moments="fp8"),
    moe_runtime.AdamW(weight_decay=0.1, galore_rank=1, galore_refresh=2),
    moe_runtime.AdamW(weight_decay=0.1, galore_rank=3, galore_refresh=3, moments="fp8"),
]


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: f"{s.moments}-{s.galore_rank}")
def test_training_follows_the_definition_wherever_experts_live(tmp_path, settings):
    """Experts miss steps and pass through the disk; every tier has the same bits."""
    # a subspace is only defined where the gradient has as many directions
    tokens = 200 if settings.galore_rank > 1 else 7
    inputs = batches(4, tokens, dtype=torch.float64)
    expected = scripted(settings, inputs)
    first: list[torch.Tensor] = []
    for share in (0.3, 1.0):
        folder = tmp_path / str(share)
        folder.mkdir()
        model = stack(dtype=torch.float64)
        training = offloaded(model, settings, folder, experts_in_memory=share)
        train_offloaded(training, model.loss, [[x] for x in inputs])
        found = [t for layer in range(LAYERS) for t in training.stacked(layer).values()]
        wanted = [p for layer in expected.layers for p in layer.experts.parameters()]
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        assert all(torch.equal(a, b) for a, b in zip(first or found, found, strict=True))
        first = found
        training.close()


@pytest.mark.parametrize(
    ("settings", "moment_bytes"),
    [
        (VARIANTS[0], lambda n: 2 * n),
        (VARIANTS[1], lambda n: -(-n // 128) * 136),
        (VARIANTS[2], lambda n: 4 * (2 * HIDDEN + HIDDEN)),
    ],
)
def test_bytes_are_those_of_the_format(settings, moment_bytes):
    tensors = [
        ExpertTensor("gate_up_proj", (2 * HIDDEN, WIDTH), True),
        ExpertTensor("down_proj", (WIDTH, HIDDEN), True),
    ]
    layout = RecordLayout(tensors, torch.float32, settings.state_format)
    elements = 3 * HIDDEN * WIDTH
    basis = 4 * settings.galore_rank * 2 * WIDTH

    def whole(num_bytes: int) -> int:
        return -(-num_bytes // BLOCK) * BLOCK

    moment = whole(moment_bytes(elements))
    assert layout.bytes_of(Sections.VARIANCE) == moment
    assert layout.bytes_of(Sections.MEAN) == moment + whole(basis)
    parameters = whole(4 * elements)
    state = parameters + 2 * moment + whole(basis)
    assert layout.record_bytes == state + parameters
    assert bytes_of_step(layout, settings) == (parameters + state, state)


def test_checkpoint_of_another_format_is_refused(tmp_path):
    training = offloaded(stack(), VARIANTS[0], tmp_path, experts_in_memory=0.3)
    state = training.state_dict()
    training.write({"own": state}, lambda found: found["own"], lambda found: state.update(found))
    training.close()
    with pytest.raises(CheckpointError, match="bf16 moments, this run's full moments"):
        offloaded(
            stack(), moe_runtime.AdamW(), tmp_path, experts_in_memory=0.3, resume=state["own"]
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moments": "fp16"}, "did you mean"),
        ({"galore_rank": -1}, "galore_rank"),
        ({"galore_refresh": 0}, "galore_refresh"),
        ({"galore_scale": 0.0}, "galore_scale"),
        ({"untouched": "dense"}, "dense_exact"),
    ],
)
def test_unusable_options(options, message):
    with pytest.raises(ValueError, match=message):
        moe_runtime.AdamW(**options)
