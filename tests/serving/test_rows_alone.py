"""With ``exact``, a sequence has the bits that it has alone, however many decode beside it."""

import copy
from collections.abc import Callable
from typing import Any

import moe_families
import pytest
import tiny_sizes
import torch
import torch.nn.functional as F
from tiny_checkpoints import save, tiny_model

import moe_runtime
from moe_runtime.inference.adapters import Adapters
from moe_runtime.inference.rows_alone import RowsAlone, rows_with_own_bits
from moe_runtime.kernels.linear.op import linear_of_few_shapes
from moe_runtime.serving.passes import ModelPasses

MOST = 48
QUICK = {
    ("DeepseekV3ForCausalLM", "float32"),  # sigmoids of a router, latents
    ("GptOssForCausalLM", "float32"),  # experts stored transposed, windows and sinks
    ("GraniteMoeForCausalLM", "bfloat16"),  # rows in bf16 of experts in fp32
}
"""What the quick suite runs; the long one runs every family in both types."""
CANNOT_SHARE = {"MiniMaxForCausalLM"}  # a cache of its own


def _cases() -> list[Any]:
    families = [*moe_families.FAMILIES, *moe_families.ADAPTED]
    names = [f for f in families if f.decodes and str(f).endswith("ForCausalLM")]
    return [
        pytest.param(
            family,
            dtype,
            id=f"{family}-{dtype}",
            marks=[] if (str(family), dtype) in QUICK else pytest.mark.long,
        )
        for family in names
        for dtype in ("float32", "bfloat16")
        if str(family) not in CANNOT_SHARE and (dtype == "float32" or family.computes_in_bf16)
    ]


@pytest.mark.parametrize(("family", "dtype"), _cases())
@torch.inference_mode()
def test_rows_of_a_step_have_the_bits_that_each_has_alone(family, dtype, tmp_path, monkeypatch):
    """With seven experts: torch computes some values of such rows by other code than the rest."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        monkeypatch.setitem(tiny_sizes.COMMON, name, 7)
    folder = save(tiny_model(family), tmp_path, sharded=False)
    model: Any = moe_runtime.load(
        folder, device="cpu", dtype=dtype, host_memory="64MiB", max_tokens=1024
    )
    with model.moe:
        passes = ModelPasses(model, Adapters(model, {}), exact=MOST)
        if not passes.can_join or not passes.reads_together:
            assert passes.most_exact == 1
            return
        most = passes.most_exact
        assert most == min(MOST, rows_with_own_bits(model))
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(3, 90, (most, 5), generator=generator).tolist()
        caches, places = [passes.new_cache() for _ in tokens], [1 + row % 4 for row in range(most)]
        for ids, cache, place in zip(tokens, caches, places, strict=True):
            passes._call([ids[:place]], cache, keep=1)
        own = copy.deepcopy(caches)
        last = [ids[place] for ids, place in zip(tokens, places, strict=True)]
        rows = zip(last, own, places, strict=True)
        alone = torch.cat([passes._step([token], cache) for token, cache, _ in rows])
        for size in sorted({1, 2, 5, 17, most} & set(range(most + 1))):
            joined = passes._joined(copy.deepcopy(caches[:size]))
            together = passes._step(last[:size], joined, torch.tensor(places[:size]))
            assert torch.equal(together, alone[:size]), size


def test_the_engines_trial_finds_up_to_how_many_rows_bits_hold(pocket):
    def most_exact() -> int:
        return ModelPasses(pocket, Adapters(pocket, {}), exact=MOST).most_exact

    limit = most_exact()
    for trouble_from in (2, 4, MOST):

        def other_bits(module: object, args: object, out: torch.Tensor) -> torch.Tensor:
            return out * (1 + 1e-6) if out.shape[0] >= trouble_from else out  # noqa: B023

        hook = pocket.get_submodule("model.norm").register_forward_hook(other_bits)
        try:
            found = most_exact()
        finally:
            hook.remove()
        tried = [size for size in (1, 2, 3, 8, limit) if size <= limit]
        assert found == max(size for size in tried if size < trouble_from)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "sigmoid_": lambda x: x.clone().sigmoid_(),
    "silu": F.silu,
    "softplus": F.softplus,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "power": lambda x: x.abs() ** 0.3,
    "softmax": lambda x: x.softmax(-1),
    "log-softmax": lambda x: F.log_softmax(x, dim=-1),
    "mean": lambda x: x.pow(2).mean(-1, keepdim=True),
    "sum": lambda x: x.sum(dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "layer-norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "linear": lambda x: F.linear(x, matrix_of(x)),
    "matmul": lambda x: x @ matrix_of(x).T,
    "few-shapes": lambda x: linear_of_few_shapes(x, matrix_of(x), None),
}


def matrix_of(x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(24, x.shape[-1], generator=generator).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_gives_the_bits_of_each_row_alone(name, dtype):
    function = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(2)
    for width in (7, 8, 33, 60):
        x = torch.randn(MOST, width, generator=generator).to(dtype)
        alone = torch.cat([function(row) for row in x.split(1)])
        for num_rows in (2, 5, 16, MOST):
            with RowsAlone(num_rows):  # of as many sequences
                together = function(x[:num_rows])
            assert torch.equal(together, alone[:num_rows])
            with RowsAlone(MOST + 1):  # of some of them, which an expert was given
                some = function(x[:num_rows])
            assert torch.equal(some, alone[:num_rows])


def test_sums_over_rows_are_left_whole():
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(4))
    with RowsAlone(6):
        assert torch.equal(x.sum(0), torch.stack([*x]).sum(dim=0))
        assert x.sum().ndim == 0
        assert x.softmax(0).sum(0).allclose(torch.ones(5))
