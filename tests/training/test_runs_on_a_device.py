"""`train` and `finetune` on a device: the CPU's losses, portable files, refusals."""

import inspect
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import CROSSINGS, NAME, PLACES
from computing_devices import computing_on
from finetuning_runs import MIXTRAL, checkpoint_of, config_of, finetuned, train, with_run
from offloaded_models import batches, budget_for, stack
from safetensors.torch import load_file
from training_runs import write_run

import moe_runtime
from moe_runtime.cli.commands.finetune import finetune
from moe_runtime.cli.main import main
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.research.zeroth_order import ZerothOrderFinetuneConfig
from moe_runtime.training.config_tree import read_tree
from moe_runtime.training.finetune.finetune_run import device_of, prepare
from moe_runtime.training.run_config import TrainConfig
from moe_runtime.training.train_run import finish, start
from moe_runtime.training.train_run import prepare as prepare_training

TOLERANCE = 1e-3
"""Of losses after few steps, on a GPU, whose sums have another order: they are of about 6."""


@pytest.mark.parametrize("name", PLACES)
def test_all_parameters_of_a_checkpoint(tmp_path, name):
    """The emulated device computes with the CPU's kernels, but for attention and experts."""
    folder = checkpoint_of(MIXTRAL, tmp_path / "model")
    found: dict[str, Any] = {}
    for kind in ("cpu", name):
        (tmp_path / kind).mkdir()
        with computing_on(name) as place:
            device = "cpu" if kind == "cpu" else str(place)
            config = with_run(config_of(folder, tmp_path / kind), device=device, steps=2)
            losses, summary = finetuned(config)
        weights = load_file(Path(summary["model"]) / "model.safetensors")
        found[kind] = losses, weights
    assert found[name][0] == pytest.approx(found["cpu"][0], abs=TOLERANCE)
    assert found[name][1].keys() == found["cpu"][1].keys()


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("host_memory", [None, "1GiB"], ids=["in-memory", "offloaded"])
def test_a_run_of_train(tmp_path, name, host_memory):
    """Steps, held-out text, a resumed checkpoint, and an exported model."""
    found: dict[str, list[float]] = {}
    file = write_run(tmp_path)
    for kind in ("cpu", name):
        with computing_on(name) as place:
            device = "cpu" if kind == "cpu" else str(place)
            settings = [f"run.device={device}", f"run.output={kind}", "run.steps=2"]
            # `Module.to` keeps what is tied where it may exchange data, which is not so here
            settings.append("model.tie_embeddings=false")
            if host_memory is not None:
                settings.append(f"run.host_memory={host_memory}")
            config = read_tree(TrainConfig, file, settings=tuple(settings))
            preparation = prepare_training(config, tmp_path)
            trainer = start(preparation, resume=False)
            losses = train(trainer, stop_after=1)
            trainer.close()
            preparation = prepare_training(config, tmp_path)
            trainer = start(preparation, resume=True)
            found[kind] = losses + train(trainer, stop_after=2)
            finish(preparation, trainer, export=True)
            trainer.close()
    assert found[name] == pytest.approx(found["cpu"], abs=TOLERANCE)
    assert len(found[name]) == 2
    for kind in ("cpu", name):
        assert (tmp_path / kind / "model" / "model.safetensors").exists()


def test_what_computes_on_the_cpu_alone_is_refused_on_a_device(tmp_path):
    folder = checkpoint_of(MIXTRAL, tmp_path / "model")
    config = config_of(folder, tmp_path, kind=ZerothOrderFinetuneConfig, zeroth_order={})
    with computing_on(NAME) as place:
        with pytest.raises(UnsupportedModelError, match="--zeroth-order computes on the CPU"):
            prepare(with_run(config, device=str(place)))
        assert prepare(with_run(config, device="auto")).device == torch.device("cpu")


def test_command_and_configuration_compute_on_the_cpu_unless_told(tmp_path, monkeypatch):
    """On machines with a GPU too; "auto" takes it, except for --zeroth-order."""
    folder = checkpoint_of(MIXTRAL, tmp_path / "model")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    by_command = inspect.signature(finetune).parameters["device"].default
    of_method: dict[str, Any] = {"kind": ZerothOrderFinetuneConfig, "zeroth_order": {}}
    for changes, there in (({}, "cuda"), ({"lora": {"rank": 2}}, "cuda"), (of_method, "cpu")):
        config = config_of(folder, tmp_path, **changes)
        by_default = device_of(config)
        assert by_default == device_of(with_run(config, device=by_command)) == torch.device("cpu")
        assert device_of(with_run(config, device="auto")) == torch.device(there)


def test_a_checkpoint_takes_one_copy_of_what_is_dense_and_the_budget_has_it(tmp_path):
    """It is written during the next step, with the values of the step before."""
    settings = moe_runtime.AdamW()
    with computing_on(NAME) as place:
        model = stack(impl="torch", num_layers=2, num_experts=4).to(place)
        budget = budget_for(model, settings, experts_in_memory=0.5)
        training = moe_runtime.offload_training(
            model, host_memory=budget, activation_memory=2**16, storage_dir=tmp_path,
            optimizer=settings, update_stride=None,
        )  # fmt: skip
        inputs = [x.to(place) for x in batches(2, 7)]
        training.backward([partial(model.loss, inputs[0])])
        training.step()
        state = {"model": model.state_dict(), "optimizer": training.state_dict()}
        before = CROSSINGS.from_device_bytes
        written: list[Any] = []
        may_go, values = threading.Event(), model.last.weight.detach().cpu()

        def job(found: Any) -> None:
            may_go.wait()
            written.append(found)

        try:
            training.write(state, lambda found: found["optimizer"], job)
            crossed = CROSSINGS.from_device_bytes - before - values.numel() * 4
            training.backward([partial(model.loss, inputs[1])])
            training.step()
        finally:
            may_go.set()
        training.wait()
        memory = training.memory
        assert 0 < crossed <= memory.saved_bytes
        assert memory.slot_bytes + memory.link_bytes + memory.saved_bytes <= memory.budget_bytes
        (found,) = written
        assert torch.equal(found["model"]["last.weight"], values)
        assert not torch.equal(model.last.weight.detach().cpu(), values)
        training.close()


def test_memory_of_a_device_that_is_not_there(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    folder = checkpoint_of(MIXTRAL, tmp_path / "model")
    config_of(folder, tmp_path)
    line = ["finetune", str(folder), str(tmp_path / "text.txt"), "-o", str(tmp_path / "out")]
    assert main([*line, "--device-memory", "1GiB"]) == 2
    assert "device_memory is for a GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
