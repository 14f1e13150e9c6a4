"""Experts in the lossless code in memory: more of them, the same bits, the checkpoint untouched."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from moe_families import Family
from quantized_checkpoints import EVEN
from safetensors.torch import load_file, save_file
from tiny_checkpoints import NEXT_TOKEN, PROMPT, save, tiny_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import moe_runtime
from moe_runtime.checkpoints.dense_weights import (
    PackedTensor,
    join_packed,
    packed_parameter,
    whole_of,
)
from moe_runtime.checkpoints.expert_map import map_experts
from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint
from moe_runtime.checkpoints.packing import pack_checkpoint
from moe_runtime.cli.main import main
from moe_runtime.errors import (
    CapacityError,
    CheckpointError,
    UnsupportedModelError,
    UnsupportedUseError,
)
from moe_runtime.inference.budget import BUFFER_SHARE
from moe_runtime.inference.cache_code import LANDING_SLOTS, ROOM_SHARE, SPARE_SLOTS, coded_experts
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.kernels.lossless import encode_planes
from moe_runtime.kernels.lossless.reference import TAIL_BYTES
from moe_runtime.kernels.native import native_library
from moe_runtime.kernels.quantized import QuantizedMatrix, WeightFormat
from moe_runtime.memory.reads import Priority, Transfer
from moe_runtime.models.pocket import pocket_path
from moe_runtime.types import ExpertKey

# rows that are not a multiple of the code's blocks of 64
MIXTRAL = Family(
    "mixtral", "MixtralForCausalLM", config={"hidden_size": 120, "intermediate_size": 200}
)
MAX_TOKENS = 64


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    return save(tiny_model(MIXTRAL).bfloat16(), folder, sharded=False)


def load(folder: Path, **options: Any) -> Any:
    return moe_runtime.load(folder, device="cpu", max_tokens=MAX_TOKENS, **options)


def outcome(folder: Path, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """Logits of a prompt and of three further tokens, and the counters."""
    model = load(folder, **options)
    with model.moe, torch.inference_mode():
        found = model(PROMPT, use_cache=True)
        logits = [found.logits]
        for number in range(3):
            found = model(NEXT_TOKEN + number, past_key_values=found.past_key_values)
            logits.append(found.logits)
        model.moe.check()
        return logits, model.moe.stats()


@pytest.mark.parametrize(("dtype", "first"), [("bfloat16", 0), ("float32", 1)])
def test_the_same_bits_at_every_budget(source: Path, dtype: str, first: int) -> None:
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    expected, _ = outcome(source, host_memory="1GiB", dtype=dtype)
    summary = inspect_checkpoint(source, max_tokens=MAX_TOKENS, dtype=dtype, cache_code="planes")
    smallest, slot = summary.smallest_budget_bytes, summary.slot_bytes
    ways = [
        {"host_memory": smallest},
        {"host_memory": smallest + slot, "io_threads": 1},
        {"host_memory": smallest + 5 * slot, "policy": "slru", "prefetch": "enforce"},
        {"host_memory": "1GiB", "shares": "adaptive"},
    ]
    for way in ways[first::2]:
        found, _ = outcome(source, dtype=dtype, cache_code="planes", **way)
        assert all(map(torch.equal, found, expected)), way
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def test_a_trained_model_has_the_same_bits_in_smaller_slots() -> None:
    expected, plain = outcome(pocket_path(), host_memory="1GiB")
    found, coded = outcome(pocket_path(), host_memory="1GiB", cache_code="planes")
    assert all(map(torch.equal, found, expected))
    # 11 bits a weight, room for one escape byte in 16, and padding of rows to 64 weights
    assert coded.slot_bytes < 0.75 * plain.slot_bytes
    assert coded.bytes_read == plain.bytes_read
    assert coded.copied_bytes == 0  # to no device


def test_inspection_predicts_the_slots_of_a_budget(source: Path) -> None:
    plain = inspect_checkpoint(source, max_tokens=MAX_TOKENS)
    coded = inspect_checkpoint(source, max_tokens=MAX_TOKENS, cache_code="planes")
    assert coded.expert_bytes == plain.expert_bytes
    # landing slots and spare escapes, the values of a matrix that is written out, and a share of
    # the dense weights
    landing = (LANDING_SLOTS + SPARE_SLOTS) * plain.slot_bytes
    shares = [int(BUFFER_SHARE * summary.dense_bytes) for summary in (coded, plain)]
    more = landing + 120 * 200 * 2 + shares[0] - shares[1]
    assert coded.reserve_bytes == plain.reserve_bytes + more
    smallest = coded.smallest_budget_bytes
    with pytest.raises(CapacityError) as refusal:
        load(source, host_memory=smallest - 1, cache_code="planes")
    assert refusal.value.smallest_bytes == smallest
    budget = smallest + 3 * coded.slot_bytes
    _, stats = outcome(source, host_memory=budget, cache_code="planes")
    assert (stats.expert_slots, stats.slot_bytes) == (5, coded.slot_bytes)
    assert coded.slots_for(budget) == 5


def make_odd(weight: torch.Tensor) -> torch.Tensor:
    """Weights with 27 exponents; a code book has seven."""
    places = torch.arange(weight.numel()).view_as(weight)
    bits = (places % 2 << 15) | (97 + places % 27 << 7)
    return bits.to(torch.int16).view(torch.bfloat16)


def with_odd_exponents(folder: Path, *names: str) -> Path:
    """The same model with some odd matrices."""
    save(tiny_model(MIXTRAL).bfloat16(), folder, sharded=False)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(names):
            tensors[name] = make_odd(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_experts_whose_escapes_have_no_room_have_the_same_bits(tmp_path: Path) -> None:
    """In slots that go from one expert to the next, and where all are resident."""
    odd = ("1.block_sparse_moe.experts.3.w3.weight", "0.block_sparse_moe.experts.2.w2.weight")
    folder = with_odd_exponents(tmp_path / "model", *odd)
    expected, _ = outcome(folder, host_memory="1GiB")
    summary = inspect_checkpoint(folder, max_tokens=MAX_TOKENS, cache_code="planes")
    for budget in (summary.smallest_budget_bytes, "1GiB"):
        found, stats = outcome(folder, host_memory=budget, cache_code="planes")
        assert all(map(torch.equal, found, expected))
        assert stats.misses > 0


def test_more_escapes_than_the_budget_has_bytes_for_are_refused_by_name(tmp_path: Path) -> None:
    loaded = load(
        with_odd_exponents(tmp_path, "w3.weight"), host_memory="1GiB", cache_code="planes"
    )
    with loaded.moe, torch.inference_mode():
        with pytest.raises(CapacityError, match=rf"up weights of expert \d of [^\n]*{ROOM_SHARE}"):
            loaded(torch.arange(60)[None])
        loaded.moe.check()


class Allocations(TorchDispatchMode):
    """Notes the bytes of every new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        found = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in given:
            self.found.append(found.untyped_storage().nbytes())
        return found


@pytest.mark.skipif(native_library() is None, reason="plain torch needs memory for the code")
def test_escapes_without_room_take_their_bytes_only_and_while_they_are_used_only(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(source, host_memory="1GiB", cache_code="planes")
    with loaded.moe:
        store = loaded.moe._store
        fetcher, slots = store.fetcher, [store._slab.slot(number) for number in range(4)]
        names, all_odd = fetcher._experts.matrices[0], ("gate", "up", "down")
        monkeypatch.setattr(fetcher._copies, "submit", lambda *_: None)

        def move(number: int, *odd: str) -> list[int]:
            """Bytes that are allocated to encode an expert into the slot of its number."""
            key, landing = ExpertKey(0, number), torch.zeros(fetcher._experts.slot_bytes).byte()
            views = dict(zip(names, fetcher._experts.layouts[key].views(landing), strict=True))
            for name in odd:
                views[name].copy_(make_odd(views[name]))
            sizes = Allocations()
            with sizes:
                fetcher._move(key, landing, slots[number])
            weights = fetcher.with_spare(key, slots[number])
            assert weights is not None
            for name in odd:
                assert torch.equal(getattr(weights, name).dequantize(torch.bfloat16), views[name])
            return sizes.found

        escape_bytes = 120 * 200 - 7 * 889 + TAIL_BYTES  # of a matrix; there is room for eight
        for number in (0, 1):
            assert max(move(number, *all_odd)) == escape_bytes
        with pytest.raises(CapacityError, match="down weights of expert 2"):
            move(2, *all_odd)
        move(3, "gate")  # a refused expert keeps no bytes
        fetcher.fetch(ExpertKey(0, 2), slots[0], Transfer(Priority.DEMAND, lambda _: None))
        move(2, *all_odd)  # nor does an evicted one


@pytest.mark.parametrize("kind", ["transposed", "quantised", "packed"])
def test_linear_layers_are_coded_beside_experts_that_stay_as_they_are(
    source: Path, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "out"
    if kind == "transposed":
        gpt_oss = Family("gpt_oss", "GptOssForCausalLM", {**EVEN, "hidden_size": 128})
        save(tiny_model(gpt_oss).bfloat16(), folder, sharded=False)
    else:
        pack_checkpoint(source, folder, quantize="fp8" if kind == "quantised" else None)
    plain, coded = (
        inspect_checkpoint(folder, max_tokens=MAX_TOKENS, cache_code=code)
        for code in ("none", "planes")
    )
    assert (coded.slot_bytes, coded.expert_bytes) == (plain.slot_bytes, plain.expert_bytes)
    assert coded.dense_bytes < plain.dense_bytes
    expected, _ = outcome(folder)
    for budget in (coded.smallest_budget_bytes, "1GiB"):
        found, _ = outcome(folder, cache_code="planes", host_memory=budget)
        assert all(map(torch.equal, found, expected))
    with pytest.raises(ValueError, match="unknown cache_code 'zip'"):
        load(folder, cache_code="zip")


@pytest.mark.parametrize(
    "family",
    [
        Family("deepseek_v3", "DeepseekV3ForCausalLM", {"num_key_value_heads": 2}),
        Family("olmoe", "OlmoeForCausalLM"),
    ],
    ids=lambda family: family.folder,
)
def test_families_have_the_same_bits(family: Family, tmp_path: Path) -> None:
    """Among them one whose steps divide a linear layer's weight into keys and values."""
    family = replace(family, config={**family.config, "hidden_size": 128})
    folder = save(tiny_model(family).bfloat16(), tmp_path / "model", sharded=False)
    model = load(folder, cache_code="planes")
    coded = [p for p in model.parameters() if isinstance(p, PackedTensor)]
    assert len(coded) > 4
    model.moe.close()
    expected, _ = outcome(folder)
    found, _ = outcome(folder, cache_code="planes")
    assert all(map(torch.equal, found, expected))


def test_a_model_without_bf16_is_one_line(tmp_path: Path) -> None:
    save(tiny_model(MIXTRAL), tmp_path / "out", sharded=False)
    with pytest.raises(UnsupportedModelError, match=r"is for weights in bf16[^\n]*none$"):
        load(tmp_path / "out", cache_code="planes")


def test_dense_weights_take_the_bytes_that_inspect_says_at_most() -> None:
    model = load(pocket_path(), cache_code="planes")
    with model.moe:
        weights = dict(model.named_parameters())
        coded = {n: w for n, w in weights.items() if isinstance(w, PackedTensor)}
        assert "model.layers.0.self_attn.q_proj.weight" in coded
        largest = max(coded, key=lambda name: coded[name].numel())
        planned = inspect_checkpoint(pocket_path(), cache_code="planes").dense_bytes
        in_code = sum(cast(Any, weight).matrix.nbytes for weight in coded.values())
        as_bf16 = sum(
            w.nbytes for n, w in weights.items() if n not in coded and ".experts" not in n
        )
        assert in_code + as_bf16 <= planned
        plain = load(pocket_path())
        with plain.moe:
            for name, weight in coded.items():
                assert torch.equal(weight.detach() + 0, plain.get_parameter(name)), name
        with pytest.raises(UnsupportedUseError, match="cache_code none"), torch.no_grad():
            coded[largest].zero_()


def layer_of(matrix: Any) -> nn.Linear:
    layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    layer.weight = packed_parameter(matrix, torch.bfloat16)
    return layer


def gaussian(rows: int, std: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (std * torch.randn(rows, 256, generator=generator)).bfloat16()


@pytest.mark.parametrize("kind", ["alike", "quantised among them", "of other scales", "odd rows"])
def test_projections_are_joined_where_nothing_is_lost(kind: str) -> None:
    stds = (0.02, 2**-14, 2**-22) if kind == "of other scales" else (0.02, 0.01, 0.02)
    sizes = (64, 40, 32) if kind == "odd rows" else (64, 32, 32)
    values = [gaussian(size, std) for size, std in zip(sizes, stds, strict=True)]
    matrices: list[Any] = [encode_planes(one) for one in values]
    if kind == "quantised among them":
        codes = torch.randint(0, 256, (32, 256), dtype=torch.uint8)
        scales = torch.ones(32, 1, dtype=torch.bfloat16)
        matrices[1] = QuantizedMatrix(WeightFormat("int8", "bf16", 1, 256), 256, codes, scales)
    layers = [layer_of(matrix) for matrix in matrices]
    join_packed(layers)
    weights = [cast(PackedTensor, layer.weight) for layer in layers]
    is_joined = whole_of(weights) is not None
    assert is_joined == (kind == "alike")
    for weight, matrix in zip(weights, matrices, strict=True):
        assert torch.equal(weight.values(), matrix.dequantize(torch.bfloat16))
        assert is_joined or weight.matrix is matrix
    whole = weights[0].whole
    if whole is not None:
        assert torch.equal(whole.values(), torch.cat(values))


def test_a_step_of_attention_with_damaged_codes_is_refused() -> None:
    model = load(pocket_path(), cache_code="planes")
    with model.moe, torch.inference_mode():
        cache = model(PROMPT, use_cache=True).past_key_values
        weight = model.model.layers[0].self_attn.o_proj.weight
        weight.matrix.starts[1:] += 2**20
        with pytest.raises(CheckpointError, match="damaged"):
            model(NEXT_TOKEN, past_key_values=cache)


def test_a_linear_layer_without_room_for_its_escapes_is_refused_by_name(tmp_path: Path) -> None:
    folder = with_odd_exponents(tmp_path / "odd", "layers.1.self_attn.q_proj.weight")
    with pytest.raises(CapacityError, match=r"layers\.1\.self_attn\.q_proj\.weight does not fit"):
        load(folder, cache_code="planes")
    outcome(folder)


def test_a_process_may_have_some_of_the_experts(source: Path) -> None:
    checkpoint = open_checkpoint(source, "auto")
    experts = map_experts(build_on_meta(checkpoint), checkpoint)
    whole, _ = coded_experts(experts, torch.device("cpu"))
    kept = [ExpertKey(0, 3), ExpertKey(0, 5), ExpertKey(2, 0)]
    experts.layouts = {key: experts.layouts[key] for key in kept}
    some, landing_bytes = coded_experts(experts, torch.device("cpu"))
    assert some.layouts == {key: whole.layouts[key] for key in kept}
    assert landing_bytes == (LANDING_SLOTS + SPARE_SLOTS) * experts.slot_bytes
    with pytest.raises(UnsupportedModelError, match="is for models on the CPU"):
        coded_experts(experts, torch.device("cuda"))


def test_the_commands(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", str(source), "--json", "--max-tokens", "64"]
    summaries = []
    for code in ("none", "planes"):
        assert main([*words, "--cache-code", code]) == 0
        summaries.append(json.loads(capsys.readouterr().out))
    assert summaries[1]["slot_bytes"] < summaries[0]["slot_bytes"]
    assert main([*words, "--cache-code", "zip"]) == 2
    assert "unknown cache_code 'zip'" in json.loads(capsys.readouterr().out)["error"]
    shown = []
    for code in ("none", "planes"):
        line = ["run", str(pocket_path()), "-p", "The experts", "-n", "9", "--cache-code", code]
        assert main(line) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
