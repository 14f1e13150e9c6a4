"""A transformers model over two ranks equals the same model in one process."""

from pathlib import Path

import pytest
import torch
from moe_families import FAMILIES, Family
from parallel_transformers import outputs
from rank_pool import RankPool
from tiny_checkpoints import save, tiny_model

from moe_runtime.errors import UnsupportedModelError
from moe_runtime.inference.hugging_face.dispatcher import register_expert_parallelism


def has_interface() -> bool:
    try:
        from transformers.distributed.expert_parallel import EPImplementation  # noqa: F401
    except ImportError:
        return False
    return True


# Alternating gates and biases; shared experts and dense layers before.
SOME = ("gpt_oss", "deepseek_v3")
# transformers' own tensor parallelism cannot divide the dense part of these in fp64: the same
# errors come with its own dispatcher.
CANNOT_BE_DIVIDED = {
    *("diffusion_gemma", "glm5_next", "inkling", "inkling2", "openai_privacy_filter"),
    *("qwen3_omni_moe", "qwen3_vl_moe", "zaya"),
}
# Parts of these compute in fp32, whatever the model's dtype: their sums differ by its rounding.
COARSE = {
    *("axk2", "beam", "deepseek_v2", "dots3_note", "gemma4", "muse_spark", "nemotron_h"),
    *("qwen3_5_moe", "qwen3_next"),
}
LOADED_WHOLE = [
    family
    for family in FAMILIES
    if family.model_class.endswith("ForCausalLM") and family.folder not in CANNOT_BE_DIVIDED
]


def compare(family: Family, folder: Path, pool: RankPool) -> None:
    path = str(save(tiny_model(family), folder, sharded=False))
    logits, tokens, gradients, trained = outputs(family.model_class, path, False)
    # fp64, summed in another order; or fp32, of a few hundred terms.
    close = {"rtol": 1e-9, "atol": 1e-12}
    if family.folder in COARSE:
        close = {"rtol": 1e-4, "atol": 1e-6}
    for theirs in pool.run(outputs, family.model_class, path, True):
        torch.testing.assert_close(theirs[0], logits, **close)
        assert torch.equal(theirs[1], tokens)
        assert theirs[2].keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(theirs[2][name], gradient, **close, msg=name)
        torch.testing.assert_close(theirs[3], trained, **close)


@pytest.mark.skipif(not has_interface(), reason="transformers before 5.23")
@pytest.mark.parametrize("name", SOME)
def test_two_ranks_equal_one_process(name, tmp_path, ranks):
    compare(next(f for f in FAMILIES if f.folder == name), tmp_path, ranks(2))


@pytest.mark.long
@pytest.mark.skipif(not has_interface(), reason="transformers before 5.23")
@pytest.mark.parametrize("family", LOADED_WHOLE, ids=str)
def test_every_family_over_two_ranks(family, tmp_path, ranks):
    compare(family, tmp_path, ranks(2))


def test_older_transformers_is_an_error(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    with pytest.raises(UnsupportedModelError, match=r"5\.23 or newer can"):
        register_expert_parallelism()
