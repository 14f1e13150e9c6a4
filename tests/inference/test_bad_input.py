"""Bad checkpoints are refused with one line that has the expected and the found value."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from text_checkpoint import tiny_text_model, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import moe_runtime
from moe_runtime.errors import CapacityError, CheckpointError, UnsupportedModelError
from moe_runtime.inference import loading
from moe_runtime.inference.generation import generate_text
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.memory import source as source_module

VOCAB = 300


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    tiny_text_model(VOCAB).save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(sound, tmp_path) -> Path:
    return shutil.copytree(sound, tmp_path / "model")


def load(path, **options):
    return moe_runtime.load(path, **({"device": "cpu", "host_memory": "1GiB"} | options))


def refused(path, error=CheckpointError, **options) -> str:
    """The message of the refusal, which must be one line."""
    with pytest.raises(error) as caught:
        load(path, **options).moe.close()
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def change_config(checkpoint: Path, **values) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensors(checkpoint: Path, change) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_no_checkpoint(tmp_path, checkpoint):
    told = refused(tmp_path / "nothing")
    wanted = "expected the folder of a checkpoint, a .gguf file, or OWNER/NAME on the hub"
    assert f"nothing is not a directory; {wanted}" in told
    with pytest.raises(CheckpointError, match=wanted):
        inspect_checkpoint("nothing-here")
    assert "is a file; expected a checkpoint's folder" in refused(checkpoint / "config.json")
    assert "nobody/nothing is neither a directory nor" in refused("nobody/nothing")


UP, DOWN = (
    f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
    for layer, expert, name in ((1, 3, "up"), (0, 0, "down"))
)
NORM = "model.norm.weight"


def drop_a_layer(tensors) -> None:
    for name in [name for name in tensors if "layers.2.mlp.experts" in name]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.update({UP: t[UP].to(torch.int8)}), f"{UP} is I8"),
        (lambda t: t.pop(UP), f"{UP}: expected experts 0 to 7"),
        (drop_a_layer, "no tensors for model.layers.2.mlp.experts"),
        (
            lambda t: t.update({DOWN: t[DOWN][:, :5].contiguous()}),
            f"{DOWN}: expected [64, 48] as other experts have",
        ),
        (lambda t: t.pop(NORM), NORM),
        (
            lambda t: t.update({NORM: t[NORM][:7].contiguous()}),
            f"{NORM}: expected [64], the checkpoint has [7]; fetch",
        ),
    ],
)
def test_odd_tensors(checkpoint, change, expected):
    change_tensors(checkpoint, change)
    assert expected in refused(checkpoint, (CheckpointError, UnsupportedModelError))


def test_no_sound_config(checkpoint):
    change_config(checkpoint, model_type="olmo_e")
    message = refused(checkpoint, UnsupportedModelError)
    assert "knows no model_type 'olmo_e'; install one" in message
    change_config(checkpoint, model_type="bailing_moe")  # whose name is near that of others
    message = refused(checkpoint, UnsupportedModelError)
    assert message.endswith("'bailing_moe'; install one that does, if there is one")
    change_config(checkpoint, model_type="olmoe", hidden_size=48)
    refused(checkpoint)
    (checkpoint / "config.json").write_text("{")
    assert "config.json cannot be read" in refused(checkpoint)
    (checkpoint / "config.json").unlink()
    assert "has no config.json" in refused(checkpoint)


def test_an_adapter_in_the_checkpoint_is_refused(checkpoint):
    """transformers would apply it."""
    (checkpoint / "adapter_config.json").write_text("{}")
    message = refused(checkpoint, UnsupportedModelError)
    assert "has an adapter (adapter_config.json)" in message
    (checkpoint / "config.json").unlink()
    assert refused(checkpoint, UnsupportedModelError) == message


def test_code_of_the_checkpoint_is_not_run(checkpoint):
    change_config(
        checkpoint, model_type="telepathy", auto_map={"AutoConfig": "configuration_x.XConfig"}
    )
    (checkpoint / "configuration_x.py").write_text("raise SystemExit('it was run')")
    refused(checkpoint, UnsupportedModelError)


def test_a_dense_model_runs_in_plain_transformers(tmp_path):
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=50,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert "runs in plain transformers" in refused(tmp_path, UnsupportedModelError)


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "compressed-tensors", "gptq", "bitsandbytes"])
def test_quantised_experts(checkpoint, method):
    """Unsupported formats, and supported ones without any weight in them."""
    how = {"config_groups": {}, "load_in_8bit": True, "bits": 4, "group_size": 32}
    how |= {"quant_method": method, "zero_point": True, "version": "gemm"}
    change_config(checkpoint, quantization_config=how)
    message = refused(checkpoint, UnsupportedModelError)
    is_read = method != "bitsandbytes"
    expected = "found none among" if is_read else f"quant_method '{method}' cannot be read yet"
    assert expected in message


def test_a_config_that_describes_no_model(checkpoint):
    for changes, reason in (
        ({"hidden_act": "telepathy"}, "'telepathy'"),
        ({"hidden_act": "silu", "rope_parameters": {"rope_type": "odd"}}, "'odd'"),
    ):
        change_config(checkpoint, **changes)
        message = refused(checkpoint)
        assert "config.json does not describe" in message
        assert reason in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_experts_per_tok", 9),
        ("num_experts_per_tok", "2"),
        ("num_experts_per_tok", True),
        ("hidden_size", 0),
        ("hidden_size", [64]),
        ("hidden_size", 64.5),
        ("num_hidden_layers", 10**30),
        ("num_attention_heads", {}),
        ("num_experts", 10**9),
        ("model_type", None),
        ("architectures", [None]),
        ("rope_parameters", "lots"),
        ("rope_theta", "large"),
        ("rms_norm_eps", [1e-6, "small"]),
        ("text_config", {"hidden_size": -1}),
    ],
)
def test_odd_values_in_the_config(checkpoint, name, value):
    change_config(checkpoint, **{name: value})
    message = refused(checkpoint)
    assert "config.json" in message or "expected" in message
    assert name in message or name in ("hidden_size", "hidden_act", "text_config")
    with pytest.raises(CheckpointError):
        inspect_checkpoint(checkpoint)


def test_more_layers_than_there_are_tensors_for_are_refused_before_they_are_built(
    checkpoint, monkeypatch
):
    def build(checkpoint):
        raise AssertionError("a model was built")

    change_config(checkpoint, num_hidden_layers=9000)
    monkeypatch.setattr(loading, "build_on_meta", build)
    assert "expected num_hidden_layers to be at most 8" in refused(checkpoint)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "Expecting value"),
        (b"[]", "[]"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"model_type": "olmoe\xff"}', "invalid start byte"),
        (b'{"a": NaN}', "NaN"),
        (b'{"model_type": "olmoe", "model_type": "x"}', "twice"),
        (b'{"a": ' + b'{"a": ' * 40_000, "bracket"),
        (b'{"a": ' + b"9" * 5000 + b"}", "5000 characters"),
    ],
)
def test_files_of_settings_that_are_no_sound_json(checkpoint, content, found):
    before = (checkpoint / "config.json").read_bytes()
    for name in ("config.json", "generation_config.json"):
        (checkpoint / name).write_bytes(content)
        message = refused(checkpoint, (CheckpointError, UnsupportedModelError))
        assert name in message
        assert name != "config.json" or found in message
        (checkpoint / "config.json").write_bytes(before)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("config.json", "/dev/zero"),
        ("generation_config.json", "folder"),
        ("model.safetensors", "itself"),
        ("model.safetensors", "/dev/zero"),
    ],
)
def test_a_folder_or_device_instead_of_a_file_is_refused(checkpoint, name, target):
    (checkpoint / name).unlink(missing_ok=True)
    if target == "folder":
        (checkpoint / name).mkdir()
    else:
        (checkpoint / name).symlink_to(name if target == "itself" else target)
    assert name in refused(checkpoint)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eos_token_id", "</s>"),
        ("eos_token_id", []),
        ("eos_token_id", 2**63),
        ("max_length", {}),
        ("temperature", "hot"),
        ("temperature", float("inf")),
        ("do_sample", 1),
        ("num_beams", -1),
        ("cache_implementation", "none of them"),
    ],
)
def test_odd_settings_of_generation(checkpoint, name, value):
    (checkpoint / "generation_config.json").write_text(json.dumps({name: value}))
    message = refused(checkpoint)
    assert "generation_config.json" in message
    assert name in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1), ("temperature", 1e-30), ("top_p", 0), ("top_p", 1.5), ("min_p", -0.5),
        ("min_p", 2), ("repetition_penalty", 0), ("repetition_penalty", -2),
    ],
)  # fmt: skip
def test_settings_of_sampling_that_no_request_may_ask_for(checkpoint, name, value):
    """They would be refused at each request, as if a client had asked for them."""
    file = checkpoint / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, name: value}))
    message = refused(checkpoint)
    assert f"generation_config.json: expected {name} to be " in message
    assert message.endswith(f"found {value}")
    if name != "repetition_penalty":  # nothing is sampled
        file.write_text(json.dumps({"do_sample": False, name: value}))
        load(checkpoint).moe.close()


def test_bad_generation_settings_are_blamed_on_the_checkpoint(checkpoint):
    (checkpoint / "generation_config.json").write_text(json.dumps({"bad_words_ids": "words"}))
    model = load(checkpoint)
    with model.moe, pytest.raises(CheckpointError, match="settings of generation cannot be used"):
        generate_text(model, tiny_tokenizer(), "a", max_new_tokens=2)


def test_errors_of_the_model_are_not_blamed_on_the_checkpoint(checkpoint):
    def fail(module, inputs):
        raise TypeError("a fault of ours")

    model = load(checkpoint)
    model.get_submodule("model.layers.0").register_forward_pre_hook(fail)
    with model.moe, pytest.raises(TypeError, match="a fault of ours"):
        generate_text(model, tiny_tokenizer(), "a", max_new_tokens=2)


def test_a_tokenizer_of_another_model(checkpoint):
    model = load(checkpoint)
    tokenizer = tiny_tokenizer()
    assert len(tokenizer) > VOCAB
    with model.moe, pytest.raises(CheckpointError, match=f"vocabulary of {VOCAB}"):
        generate_text(model, tokenizer, "naïve façades 日本語 argument", max_new_tokens=2)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"policy": "lru2"}, "did you mean 'lru'"),
        ({"shares": "adaptiv"}, "did you mean 'adaptive'"),
        ({"device": "tpu"}, "device must be"),
        ({"device": "cuda:3"}, "device cuda:3: torch sees no GPU here; use cpu or auto"),
        ({"dtype": "int3"}, "dtype must be"),
        ({"dtype": "float64"}, "dtype must be auto, float32, bfloat16 or float16, got float64"),
        ({"dtype": torch.float64}, "dtype must be auto, float32"),
        ({"dtype": "nn"}, "dtype must be auto, float32"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"io_threads": 0}, "io_threads must be"),
        ({"host_memory": "lots"}, "host_memory"),
        ({"device": "cpu", "device_memory": "1GiB"}, "device_memory is for models on a GPU"),
        ({"trace": ""}, "trace: is empty, expected the name of a file"),
        ({"timeline": "there/"}, "timeline there/: is a folder, expected the name of a file"),
    ],
)
def test_options(checkpoint, option, text):
    if option == {"device": "cuda:3"} and torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA device")
    assert text in refused(checkpoint, ValueError, **option)


def test_a_checkpoint_of_a_type_that_nothing_computes_in(checkpoint):
    change_config(checkpoint, dtype="float64")
    error = refused(checkpoint, UnsupportedModelError)
    assert "own type is torch.float64; name another one" in error
    load(checkpoint, dtype="float32").moe.close()


def test_too_little_memory(checkpoint):
    with pytest.raises(CapacityError) as caught:
        load(checkpoint, host_memory=1000)
    load(checkpoint, host_memory=caught.value.smallest_bytes).moe.close()
    with pytest.raises(CapacityError):
        load(checkpoint, host_memory=caught.value.smallest_bytes - 1)


def test_a_trace_that_cannot_be_written(checkpoint, tmp_path):
    refused(checkpoint, trace=tmp_path / "nowhere" / "trace.npz")


def test_a_read_that_fails_while_generating_ends_cleanly(checkpoint, monkeypatch):
    monkeypatch.setattr(source_module, "native_library", lambda: None)  # reads in Python can fail
    with pytest.raises(CapacityError) as caught:
        load(checkpoint, host_memory=1000)
    model = load(checkpoint, host_memory=caught.value.smallest_bytes)
    real, calls = os.preadv, []

    def failing(fd, buffers, offset):
        calls.append(offset)
        if len(calls) > 20:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(source_module.os, "preadv", failing)
    prompt = torch.arange(6)[None]
    with model.moe:
        with pytest.raises(
            CheckpointError, match=r"expert \d+ of MoE layer \d+ from .*tensors: In"
        ):
            model.generate(prompt, max_new_tokens=50, do_sample=False)
        model.moe.check()
        monkeypatch.undo()
        model.generate(prompt, max_new_tokens=3, do_sample=False)  # nothing is lost
        model.moe.check()


@pytest.mark.parametrize(
    ("name", "value"), [("sliding_window", -1), ("return_dict", False), ("model_type", 5)]
)
def test_settings_that_no_model_computes_with(checkpoint, name, value):
    change_config(checkpoint, **{name: value})
    message = refused(checkpoint)
    assert f"expected {name} to be" in message
    assert len(message) < 300
