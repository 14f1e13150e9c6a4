"""Adapters beside weights that are quantised or in the lossless code, which stay as they are.

The reference is what transformers makes of the values that the format's own packer gives back.
"""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from finetuning_runs import (
    GPT_OSS,
    MIXTRAL,
    PARTS,
    SEQUENCES,
    SIZES,
    adapted,
    checkpoint_of,
    config_of,
    finetuned,
    resident,
    run_losses,
    smallest,
    train,
    write_text,
)
from frozen_bases import bases
from moe_families import Family
from offloaded_models import here
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_checkpoints import PROMPT
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

import moe_runtime
from moe_runtime.cli.main import main
from moe_runtime.errors import CheckpointError, MoERuntimeError
from moe_runtime.training.finetune.checkpoint_model import take_adapters, write_adapters
from moe_runtime.training.finetune.finetune_run import FinetunePreparation, finish, prepare, start
from moe_runtime.training.finetune.settings import FinetuneConfig, LoraConfig

KINDS = ("gpt_oss-mxfp4", "deepseek_v3-int4", "planes", "qwen2moe-mixed.gguf")
LONG_KINDS = (
    *("qwen3_moe-fp8-ragged", "qwen3_moe-gptq", "mixtral-nvfp4"),
    *("qwen3moe-mxfp4.gguf", "olmoe-q4_k.gguf"),
)
"""With the others: all kinds of codes and scales, and all layouts of experts in files."""


def loss_of(model: PreTrainedModel, embedded: Tensor, ids: Tensor) -> Tensor:
    logits = model(inputs_embeds=embedded, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), ids.flatten()) / PARTS


def embed(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model.get_input_embeddings()(ids).detach().requires_grad_()


def draw(preparation: FinetunePreparation) -> list[Tensor]:
    return [*torch.from_numpy(preparation.batches.draw(SEQUENCES)).chunk(PARTS)]


def gradients_in_memory(model: PreTrainedModel, windows: list[Tensor]) -> dict[str, Tensor]:
    """Under the names that `FrozenExpertsExecutor` has for adapters of experts."""
    inputs = [embed(model, ids[:, :-1]) for ids in windows]
    for embedded, ids in zip(inputs, windows, strict=True):
        loss_of(model, embedded, ids[:, 1:]).backward()
    found = {f"inputs {i}": x.grad for i, x in enumerate(inputs)}
    for name, parameter in model.named_parameters():
        for part, letter in (("first", "A"), ("second", "B")):
            name = name.replace(f".0.{part}", f"_{letter}")
        found[name.replace(".parametrizations.", ".adapters.")] = parameter.grad
    return {name: grad for name, grad in found.items() if grad is not None}


@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.long) for kind in LONG_KINDS)]
)
def test_gradients_are_those_of_the_values(tmp_path: Path, kind: str) -> None:
    """Of inputs, of PEFT's adapters on attention and of ours on experts; all experts on the disk.

    Both compute in fp32 from the same values, and in other orders. How far the one in memory is
    from fp64 shows what rounding comes to: two such results lie at most twice as far apart, and
    twice that for tails, as in `test_finetuning`.
    """
    folder, plain = bases(kind, tmp_path)
    files = [*folder.iterdir()] if folder.is_dir() else [folder]
    before = [file.read_bytes() for file in files]
    config = config_of(folder, tmp_path, lora={"rank": 3, "scale": 1.5})
    preparation = prepare(smallest(config))
    trainer = start(preparation, resume=False)
    ours = preparation.model
    torch.manual_seed(1)
    for name, parameter in ours.named_parameters():
        if name.endswith("_B") or ".lora_B" in name:  # zero at first, as gradients of A are then
            parameter.data.normal_(std=0.05)
    first = {name: p.detach().clone() for name, p in here(ours).items()}
    windows = draw(preparation)
    inputs = [embed(ours, ids[:, :-1]) for ids in windows]
    pairs = zip(inputs, windows, strict=True)
    parts = [functools.partial(loss_of, ours, x, ids[:, 1:]) for x, ids in pairs]
    trainer.optimizer.backward(parts)  # type: ignore[union-attr]
    trainer.optimizer.check()  # type: ignore[union-attr]
    trained = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    leaves = {f"inputs {i}": x for i, x in enumerate(inputs)} | trained
    found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    trainer.close()
    assert [file.read_bytes() for file in files] == before

    single, exact = (
        gradients_in_memory(adapted(plain, preparation, first, dtype), windows)
        for dtype in (torch.float32, torch.float64)
    )
    assert found.keys() == exact.keys()
    assert len(found) > PARTS + 2 * 2 * 2 * 2
    for name, truth in exact.items():
        rounding = (single[name] - truth).norm() + 2**-24 * truth.norm()
        assert truth.norm() > 0, name
        assert (found[name] - single[name]).norm() <= 4 * rounding, name
        # An expert's wrong scale leaves more than that.
        assert 4 * rounding < 1e-3 * truth.norm(), name


def test_adapters_on_attention_are_those_that_transformers_has_a_module_for(tmp_path: Path) -> None:
    """Not on Qwen3-Next's projection in the two parts of its file."""
    folder, plain = bases("qwen3next-q5_1.gguf", tmp_path)
    preparation = prepare(config_of(folder, tmp_path, lora={"rank": 3}))
    start(preparation, resume=False).close()
    named = preparation.model.named_parameters()
    paths = {name.partition(".lora_")[0] for name, _ in named if ".lora_" in name}
    theirs = dict(resident(plain, torch.float32).named_modules())
    assert all(isinstance(theirs[path], torch.nn.Linear) for path in paths)
    assert {path.rpartition(".")[2] for path in paths} >= {"q_proj", "in_proj_ba", "out_proj"}


def test_a_run_does_not_depend_on_the_budget_and_its_adapters_load_in_peft(tmp_path: Path) -> None:
    """With the smallest budget, everything resident, and an interrupted run."""
    folder, plain = bases("planes", tmp_path)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    results = []
    for name, change in (("small", smallest), ("large", lambda config: config)):
        run = {"output": str(tmp_path / name)}
        results.append(finetuned(change(config_of(folder, tmp_path, lora={"rank": 2}, run=run))))
    config = config_of(folder, tmp_path, lora={"rank": 2})
    losses = run_losses(config, stop_after=2)
    preparation = prepare(config)
    trainer = start(preparation, resume=True)
    losses += train(trainer)
    summary = finish(preparation, trainer, export=True)
    with torch.no_grad():
        expected = preparation.model.eval()(PROMPT).logits
    sinks = trainer.sinks
    trainer.close()
    assert all(sink._file.closed for sink in sinks)  # type: ignore[attr-defined]
    assert results[0][0] == results[1][0] == losses
    summaries = [found for _, found in results] + [summary]
    adapters = [Path(found["adapters"]) for found in summaries]
    assert len({(path / "adapter_model.safetensors").read_bytes() for path in adapters}) == 1
    reads = [found["offload"]["read_bytes"] for found in summaries]
    assert reads[0] > reads[1]
    assert [found["model"] for found in summaries] == [None] * 3
    assert {path: path.read_bytes() for path in folder.iterdir()} == before

    base = resident(plain).eval()
    with torch.no_grad():
        untrained = base(PROMPT).logits
        loaded = PeftModel.from_pretrained(base, adapters[2]).eval()
        found = loaded(PROMPT).logits
    # Sums in fp32 in another order, as in `test_quantized_models`.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert (untrained - expected).norm() > 1e-2 * expected.norm()


LLAMA4 = Family(
    "llama4", "Llama4ForCausalLM", SIZES | {"intermediate_size_mlp": 48, "num_experts_per_tok": 1}
)


DORA = {"places": ["attention"], "dora": True, "dropout": 0.25}


@pytest.mark.parametrize(
    ("family", "more"), [(GPT_OSS, {"rslora": True}), (LLAMA4, {}), (MIXTRAL, DORA)]
)
def test_adapters_of_plain_weights_are_those_of_peft(
    tmp_path: Path, family: Family, more: dict[str, Any]
) -> None:
    """PEFT, our loading, merging and resuming give the logits of the trained model."""
    folder = checkpoint_of(family, tmp_path / "first")
    lora = {"rank": 3, "scale": 1.5, **more}
    preparation = prepare(config_of(folder, tmp_path, lora=lora, merge=True))
    trainer = start(preparation, resume=False)
    train(trainer)
    summary = finish(preparation, trainer, export=True)
    with torch.no_grad():
        expected = preparation.model.eval()(PROMPT).logits
    trainer.close()
    base, merged = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (folder, summary["model"])
    )
    with torch.no_grad():
        found = {"base": base(PROMPT).logits, "merged": merged(PROMPT).logits}
        found["peft"] = PeftModel.from_pretrained(base, summary["adapters"]).eval()(PROMPT).logits
    again = {**lora, "start": summary["adapters"]}
    preparation = prepare(
        config_of(folder, tmp_path, lora=again, run={"output": str(tmp_path / "again")})
    )
    start(preparation, resume=False)
    with torch.no_grad():
        found["again"] = preparation.model.eval()(PROMPT).logits
    other = config_of(
        folder, tmp_path, lora=again | {"scale": 2.5}, run={"output": str(tmp_path / "other")}
    )
    with pytest.raises(ValueError, match=r"its factor of .* is .*, that of this run "):
        start(prepare(other), resume=False)
    assert torch.equal(found["again"], expected)
    if "dora" in more:
        assert float((found["peft"] - expected).abs().max()) < 1e-5 * float(expected.abs().max())
        assert float((found["merged"] - expected).abs().max()) < 1e-5 * float(expected.abs().max())
        return
    ours: Any = moe_runtime.load(
        folder, device="cpu", host_memory="64MiB", max_tokens=64, adapter=summary["adapters"]
    )
    with ours.moe, torch.no_grad():
        found["ours"] = ours(PROMPT).logits
    error = {name: float((own - expected).abs().max()) for name, own in found.items()}
    # sums in fp32 in another order
    assert max(error["merged"], error["peft"], error["ours"]) < 1e-5 * float(expected.abs().max())
    assert error["base"] > 1e-2 * float(expected.abs().max())


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "alpha": ({"alpha_pattern": {"q_proj": 30}}, r"factor of .*q_proj is 10, .* this run 1\.5"),
    "gate_up": (
        {"alpha_pattern": {"down_proj": 30}},
        r"experts\.down_proj is 10, .* this run 1\.5",
    ),
    "target": ({"target_parameters": ["mlp.experts.down_proj"]}, "gate_up_proj is 0"),
    "base": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    "kind": ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
    "dora": ({"use_dora": True, "target_parameters": None}, "magnitude_vector of "),
}


def test_a_beginning_is_read_as_peft_reads_it_and_not_needed_again(tmp_path: Path) -> None:
    """Other computations are refused; a run resumes without the folder."""
    folder = checkpoint_of(MIXTRAL, tmp_path / "first")
    lora: dict[str, Any] = {"rank": 3, "scale": 1.5}
    preparation = prepare(config_of(folder, tmp_path, lora=lora))
    start(preparation, resume=False).close()
    first, settings = tmp_path / "adapter", preparation.config.lora
    assert settings is not None
    write_adapters(first, preparation.model, preparation.sites, settings, "")
    (first / "digests.json").unlink()
    file = first / "adapter_config.json"
    written = file.read_text()
    config = config_of(folder, tmp_path, lora={**lora, "start": str(first)})
    for changes, expected in OTHER.values():
        file.write_text(json.dumps(json.loads(written) | changes))
        with pytest.raises((ValueError, MoERuntimeError), match=expected):
            take_adapters(first, preparation.model, preparation.sites, settings)
    file.write_text(written)
    run_losses(config, stop_after=1)
    weights = first / "adapter_model.safetensors"
    content = weights.read_bytes()
    shutil.rmtree(first)
    trainer = start(prepare(config), resume=True)
    assert len(train(trainer, stop_after=2)) == 1
    trainer.close()
    first.mkdir()
    file.write_text(written)
    weights.write_bytes(content[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"made with the files of lora\.start = '"):
        start(prepare(config), resume=True)
    with pytest.raises(CheckpointError, match=r"was made with lora\.start = 'given'"):
        start(prepare(config_of(folder, tmp_path, lora=lora)), resume=True)


def test_what_would_change_frozen_weights_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = bases("planes", tmp_path)
    words = ["finetune", str(folder), str(write_text(tmp_path)), "-o", str(tmp_path / "out")]
    words += ["--context", "16", "--sequences", "2", "--steps", "1"]
    for more, expected in (
        ([], "give --lora RANK"),
        (["--zeroth-order"], "give --lora RANK"),
        (["--lora", "2", "--export-dtype", "bfloat16"], "not merged into weights"),
        (["--lora", "2", "--merge"], "not merged into quantised or packed weights"),
        (["--merge"], "--merge is for adapters; give --lora RANK too"),
    ):
        assert main([*words, *more]) == 2
        shown = capsys.readouterr().err
        (line,) = [line for line in shown.splitlines() if "error:" in line]
        assert expected in line
        assert not (tmp_path / "out").exists()


def test_a_merge_that_would_round_frozen_weights_is_refused(tmp_path: Path) -> None:
    """Of a float32 checkpoint; with float32 products, what has no adapter keeps its bits."""
    folder = checkpoint_of(MIXTRAL, tmp_path / "first")

    def merging(precision: str, export: str) -> FinetuneConfig:
        run = {"precision": precision, "steps": 1, "output": str(tmp_path / precision)}
        lora = {"rank": 2, "places": ["attention"]}
        return config_of(folder, tmp_path, run=run, lora=lora, merge=True, export_dtype=export)

    for export in ("auto", "float16", "float32"):
        with pytest.raises(ValueError, match="merge would write it rounded"):
            prepare(merging("bfloat16", export))
    prepare(merging("bfloat16", "bfloat16"))
    _, summary = finetuned(merging("float32", "auto"))
    first, merged = (load_file(f / "model.safetensors") for f in (folder, Path(summary["model"])))
    for name, tensor in merged.items():
        assert torch.equal(tensor, first[name]) == ("self_attn" not in name), name


def test_the_command_says_where_adapters_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only experts have adapters."""
    folder, _ = bases("deepseek_v3-int4", tmp_path)
    words = ["finetune", str(folder), str(write_text(tmp_path)), "-o", str(tmp_path / "out")]
    words += ["--context", "16", "--sequences", "2", "--steps", "1", "--host-memory", "1GiB"]
    words += ["--lora", "2", "--lora-on", "experts"]
    assert main([*words, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    config = json.loads((Path(summary["adapters"]) / "adapter_config.json").read_text())
    assert config["target_modules"] == []
    assert config["base_model_name_or_path"] == str(folder)


def test_adapters_of_experts_have_no_magnitudes() -> None:
    options: list[dict[str, Any]] = [{"dora": True}, {"dropout": 0.5}]
    for option in options:
        with pytest.raises(ValueError, match=f"{next(iter(option))} is for adapters on attention"):
            LoraConfig(rank=2, **option)


def test_weights_that_give_no_numbers_end_the_run_at_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = bases("qwen3_moe-fp8-ragged", tmp_path)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in (name for name in tensors if "experts" in name and "scale" in name):
            tensors[name].fill_(torch.nan)
        save_file(tensors, file, {"format": "pt"})
    words = ["finetune", str(folder), str(write_text(tmp_path)), "-o", str(tmp_path / "out")]
    words += ["--context", "16", "--sequences", "2", "--steps", "2", "--host-memory", "1GiB"]
    assert main([*words, "--lora", "2"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert "the loss of step 1 is not a number" in line
    assert "inspect MODEL --verify" in line
    assert not (tmp_path / "out" / "adapters").exists()
