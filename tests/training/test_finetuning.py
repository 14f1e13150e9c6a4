"""`moe-runtime finetune` against the same training with everything in memory."""

import json
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetuning_runs import (
    CONTEXT,
    ERNIE,
    GPT_OSS,
    MIXTRAL,
    PARTS,
    SEQUENCES,
    SIZES,
    STEPS,
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
from moe_families import Family
from offloaded_models import here
from tiny_checkpoints import save, tiny_model
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

import moe_runtime
from moe_runtime.cli.main import main
from moe_runtime.errors import CheckpointError
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.lab.traces import read_trace
from moe_runtime.training.checkpoint import checkpoints_in, write_content
from moe_runtime.training.finetune import finetune_run as memory
from moe_runtime.training.finetune.finetune_run import FinetunePreparation, finish, prepare, start
from moe_runtime.training.loop import learning_rate
from moe_runtime.training.offload import frozen
from moe_runtime.training.optimizer import DenseAdamW

OLMOE = Family("olmoe", "OlmoeForCausalLM", config=SIZES)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that no test changes."""
    return checkpoint_of(MIXTRAL, tmp_path_factory.mktemp("models") / "first")


def in_memory(
    preparation: FinetunePreparation, model: PreTrainedModel, named: dict[str, nn.Parameter]
) -> list[float]:
    """Plain steps of AdamW on a resident model, its micro-batches one after another."""
    config = preparation.config
    adamw = DenseAdamW(named, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        windows = torch.from_numpy(preparation.batches.draw(SEQUENCES)).chunk(PARTS)
        found = []
        for ids in windows:
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            (loss / PARTS).backward()
            found.append(loss.detach())
        adamw.step(learning_rate(config.optimizer, step, STEPS))
        adamw.forget()
        losses.append(float(torch.stack(found).mean()))
    return losses


@pytest.mark.parametrize(
    ("family", "sharded"), [(GPT_OSS, False), (ERNIE, True)], ids=["gpt_oss", "ernie"]
)
def test_every_parameter_as_in_memory(tmp_path, family, sharded):
    """Losses, and the exported weights under their first names, with all experts on the disk."""
    folder = checkpoint_of(family, tmp_path / "first", sharded=sharded)
    config = smallest(config_of(folder, tmp_path))
    losses, summary = finetuned(config)
    assert summary["offload"]["experts_in_memory"] == 0
    assert summary["offload"]["read_bytes"] > 0

    model, exact = resident(folder), resident(folder, torch.float64)
    first_state = {name: tensor.clone() for name, tensor in exact.state_dict().items()}
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert bool(frozen) == (family is ERNIE)
    wanted_losses, exact_losses = (
        in_memory(prepare(config), m, dict(m.named_parameters())) for m in (model, exact)
    )
    # Two runs in fp32 add in different orders, where a library's products depend on how a matrix
    # lies in memory. AdamW divides by the gradient's size: where sums cancel, rounding becomes a
    # step. How far the run in memory is from one in fp64 shows what that comes to here; two such
    # runs lie at most twice as far apart, and twice that for tails. What neither can hold is half a
    # unit in the last place of its result.
    rounding = max(abs(a - b) for a, b in zip(wanted_losses, exact_losses, strict=True))
    atol = 4 * (rounding + 2**-24 * max(exact_losses))
    np.testing.assert_allclose(losses, wanted_losses, rtol=0, atol=atol)
    exported = AutoModelForCausalLM.from_pretrained(summary["model"], dtype=torch.float32)
    wanted, references = model.state_dict(), exact.state_dict()
    for name, tensor in exported.state_dict().items():
        reference = references[name]
        bound = 4 * ((wanted[name] - reference).norm() + 2**-24 * reference.norm())
        assert (tensor - wanted[name]).norm() <= bound, name
        if name in frozen:
            assert torch.equal(tensor.double(), first_state[name]), name
        elif family is not ERNIE:  # whose routers compute in fp32 in both
            # The bound is far below what one step does.
            assert bound < 0.05 * (reference - first_state[name]).norm(), name
    first, last = (sorted(p.name for p in Path(f).iterdir()) for f in (folder, summary["model"]))
    assert first == last

    ours = moe_runtime.load(summary["model"], device="cpu")
    ids = torch.tensor([[5, 7, 11, 13]])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, exported(ids).logits, rtol=1e-5, atol=1e-5)
    ours.moe.close()  # type: ignore[union-attr]


def test_goes_on_under_another_budget(tmp_path, mixtral):
    folder = mixtral
    whole, _ = finetuned(config_of(folder, tmp_path, run={"output": str(tmp_path / "whole")}))
    config = config_of(folder, tmp_path)
    losses = run_losses(smallest(config), stop_after=2)
    assert len(losses) == 2
    losses += run_losses(config, resume=True)
    assert losses == whole


def test_a_base_that_has_changed_is_refused(tmp_path):
    """The run would go on from other frozen weights than it began with."""
    folder = checkpoint_of(MIXTRAL, tmp_path / "first")
    config = config_of(folder, tmp_path, lora={"rank": 2, "places": ["experts"]})
    run_losses(config, stop_after=1)
    start(prepare(config), resume=True).close()
    checkpoint = checkpoints_in(tmp_path / "run/checkpoints")[-1]
    content = torch.load(checkpoint, weights_only=True)
    with torch.random.fork_rng():
        torch.manual_seed(99)
        other: Any = tiny_model(MIXTRAL)
        for parameter in other.parameters():
            torch.nn.init.normal_(parameter)
    save(other, folder, sharded=False)
    with pytest.raises(
        CheckpointError, match=r"step-00000001\.pt: was made with the model's files"
    ):
        start(prepare(config), resume=True)
    del content["settings"]["the model's files"]
    write_content(checkpoint, {name: content[name] for name in content if name != "format"})
    start(prepare(config), resume=True).close()  # of an older version


def test_adapters_as_in_memory(tmp_path):
    """PEFT's adapters on attention and ours on experts, against autograd over whole stacks."""
    folder = checkpoint_of(GPT_OSS, tmp_path / "first")
    config = config_of(folder, tmp_path, lora={"rank": 3, "scale": 1.5}, merge=True)
    preparation = prepare(smallest(config))
    trainer = start(preparation, resume=False)
    first = {name: p.clone() for name, p in here(preparation.model).items()}
    losses = train(trainer)
    summary = finish(preparation, trainer, export=True)
    trainer.close()
    assert not (tmp_path / "run" / "experts").exists()

    model, exact = (
        adapted(folder, preparation, first, dtype) for dtype in (torch.float32, torch.float64)
    )
    wanted, exact_losses = (
        in_memory(prepare(config), m, {n: p for n, p in m.named_parameters() if p.requires_grad})
        for m in (model, exact)
    )
    # Ours multiplies by W and by B A and adds the products, autograd by their sum: two runs in fp32
    # with other orders of sums. The bounds are those of `test_every_parameter_as_in_memory`.
    rounding = max(abs(a - b) for a, b in zip(wanted, exact_losses, strict=True))
    atol = 4 * (rounding + 2**-24 * max(exact_losses))
    np.testing.assert_allclose(losses, wanted, rtol=0, atol=atol)
    exported = AutoModelForCausalLM.from_pretrained(summary["model"], dtype=torch.float32)
    state, before = exported.state_dict(), resident(folder).state_dict()
    for site in preparation.sites:
        for stack in ("gate_up_proj", "down_proj"):
            in_fp32, reference = (
                getattr(m.get_submodule(site.name), stack).detach() for m in (model, exact)
            )
            found, old = (weights[f"{site.name}.{stack}"] for weights in (state, before))
            bound = 4 * ((in_fp32 - reference).norm() + 2**-24 * reference.norm())
            assert (found - in_fp32).norm() <= bound
            # The bound is far below what the adapters came to.
            assert bound < 0.2 * (reference - old).norm()


@pytest.mark.parametrize("family", [GPT_OSS, OLMOE], ids=str)
def test_experts_that_lie_as_their_module_has_them_are_not_copied(tmp_path, family, monkeypatch):
    """They are computed where they were read to, with the bits of copies."""
    folder, losses = checkpoint_of(family, tmp_path / "first"), list[list[float]]()
    for name, stand_in in (("fill_matrices", pytest.fail), ("stack_slots", lambda *_: None)):
        run = {"output": str(tmp_path / name), "steps": 2}
        config = smallest(config_of(folder, tmp_path, lora={"rank": 3}, run=run))
        trainer = start(prepare(config), resume=False)
        with monkeypatch.context() as patch:
            patch.setattr(frozen, name, stand_in)
            losses.append(train(trainer))
        trainer.close()
    assert len({*losses[0]}) == 2
    assert losses[0] == losses[1]


def test_command(tmp_path, capsys):
    folder = checkpoint_of(MIXTRAL, tmp_path / "first")
    kept = {"LICENSE", "modeling_own.py", "retrieval.json", "chat_template.jinja"}
    said = {"README.md", "eval_results.json", "all_results.json", "model-index.yml"}
    said |= {"human_eval.json", "pytorch_model.bin.index.json", "trainer_state.json"}
    for name in kept | said:
        (folder / name).write_text("{}")
    words = ["finetune", str(folder), str(write_text(tmp_path)), "-o", str(tmp_path / "out")]
    words += ["--context", "16", "--sequences", "2", "--steps", "2", "--host-memory", "1GiB"]
    assert main([*words, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["steps"] == 2
    assert plan["offload"]["experts"] == 12
    assert not (tmp_path / "out").exists()
    assert main([*words, "--export-dtype", "bfloat16", "--json"]) == 0
    shown = capsys.readouterr()
    summary = json.loads(shown.out)
    assert summary["complete"]
    assert math.isfinite(summary["loss"])
    assert "stall" in shown.err
    written = {path.name for path in Path(summary["model"]).iterdir()}
    assert written == {path.name for path in folder.iterdir()} - said
    exported = AutoModelForCausalLM.from_pretrained(summary["model"], dtype="auto")
    assert exported.dtype == torch.bfloat16
    assert main(words) == 2
    assert "--resume goes on" in capsys.readouterr().err
    words[4] = str(tmp_path / "zeroth")
    assert main([*words, "--zeroth-order", "--dry-run", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["zeroth_order"]
    assert not (tmp_path / "zeroth").exists()
    assert other["offload"]["disk_bytes"] < plan["offload"]["disk_bytes"] / 2
    assert main([*words, "--zeroth-order", "--trace", str(tmp_path / "t.npz"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["complete"]
    # both sides of a step are forward passes of their own
    trace = read_trace(tmp_path / "t.npz")
    assert trace.num_steps == 4
    own = inspect_checkpoint(folder)
    assert trace.expert_bytes == own.expert_bytes // own.total_experts


def test_a_signal_leaves_a_checkpoint(tmp_path, mixtral, capsys, monkeypatch):
    """The step in hand is finished, nothing half written stays, and --resume goes on."""
    from moe_runtime.training import loop

    number = signal.SIGTERM
    common = [str(mixtral), str(write_text(tmp_path)), "--context", "16", "--sequences", "2"]
    common += ["--steps", "3", "--host-memory", "1GiB", "--json"]
    assert main(["finetune", *common, "-o", str(tmp_path / "whole")]) == 0
    whole = json.loads(capsys.readouterr().out)
    taken = loop.Trainer._take_step

    def interrupted(trainer: loop.Trainer) -> loop.StepRecord:
        signal.raise_signal(number)
        return taken(trainer)

    monkeypatch.setattr(loop.Trainer, "_take_step", interrupted)
    before = signal.getsignal(number)
    words = ["finetune", *common, "-o", str(tmp_path / "parts")]
    assert main(words) == 128 + number
    monkeypatch.undo()
    assert signal.getsignal(number) == before
    shown = capsys.readouterr()
    assert "with a checkpoint" in shown.err
    assert "Traceback" not in shown.err
    summary = json.loads(shown.out)
    assert (summary["complete"], summary["steps"], summary["model"]) == (False, 1, None)
    left = [path.name for path in (tmp_path / "parts").rglob("*") if path.is_file()]
    assert not [name for name in left if name.endswith((".partial", ".tmp", ".part"))]
    assert main([*words, "--resume"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == whole["loss"]
    longer = [*words, "--resume"]
    longer[words.index("--steps") + 1] = "4"
    assert main(longer) == 2
    assert "add --reschedule" in capsys.readouterr().err
    assert main([*longer, "--reschedule"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 4
    assert main([*words, "--reschedule"]) == 2
    assert "give --resume too" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"data": "blank"}, "no usable text"),
        ({"data": "none"}, "no file matches"),
        ({"model": "dense"}, "has no routed experts"),
        ({"model": "missing"}, "is not a directory"),
        ({"words": ["--host-memory", "1MiB"]}, "the smallest that works is"),
        ({"words": ["--lora", "2", "--host-memory", "1MiB"]}, "the smallest that works is"),
        ({"words": ["--lora", "2", "--lora-on", "gates"]}, "adapters are for attention and"),
        ({"words": ["--zeroth-order", "--lora", "2"]}, "error: --lora and --zeroth-order are"),
        ({"words": ["--zeroth-order", "--eps", "0"]}, "error: --eps must be positive"),
        ({"words": ["--rate", "-1"]}, "error: --rate must be positive, got -1.0"),
        ({"words": ["--precision", "fp8"]}, "error: --precision is 'fp8'; known: bfloat16"),
        ({"words": ["--micro-batches", "3"]}, "error: --micro-batches must divide the 2 sequences"),
        ({"words": ["--eps", "0.1"]}, "--eps belongs to --zeroth-order"),
        ({"words": ["--context", "1000"]}, "context must be at most 128"),
        ({"words": ["--storage-dir", "nowhere"]}, "make it first"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_one_line(tmp_path, mixtral, capsys, change, expected):
    folder = mixtral
    if change.get("model") == "dense":
        family = Family("qwen3", "Qwen3ForCausalLM", config=SIZES)
        folder = checkpoint_of(family, tmp_path / "first")
    text = write_text(tmp_path)
    if change.get("data") == "blank":
        text.write_text(" \n")
    words = change.get("words", [])
    if "--context" not in words:
        words = [*words, "--context", "16"]
    model = str(tmp_path / "other") if change.get("model") == "missing" else str(folder)
    data = str(tmp_path / "other.txt") if change.get("data") == "none" else str(text)
    out = ["--sequences", "2", "-o", str(tmp_path / "out")]
    assert main(["finetune", model, data, *out, *words]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    (line,) = [line for line in shown.splitlines() if "error:" in line]
    assert expected in line


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_code_that_products_keep_is_part_of_the_smallest_budget(
    tmp_path, mixtral, monkeypatch, lora
):
    """oneDNN keeps some for each shape of an expert's matrix and each number of rows."""
    least = []
    for code_bytes in (0, 7 * 2**20):

        def count(shapes, dtype, num_rows, *, has_backward, is_trained, kept=code_bytes):
            assert {len(shape) for shape in shapes} == {2}
            assert num_rows == CONTEXT * SEQUENCES
            assert (dtype, has_backward, is_trained) == (torch.bfloat16, True, lora is None)
            return kept

        monkeypatch.setattr(memory, "experts_code_bytes", count)
        config = config_of(mixtral, tmp_path, lora=lora, run={"precision": "bfloat16"})
        least.append(int(smallest(config).run.host_memory or 0))
    assert least[1] - least[0] == 7 * 2**20
