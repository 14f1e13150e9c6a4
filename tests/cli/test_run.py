"""`moe-runtime run`: options reach the runtime, text and numbers reach the user."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_runtime.cli.commands.run import outcome_rows
from moe_runtime.cli.main import main
from moe_runtime.errors import CapacityError, CheckpointError, UnsupportedModelError
from moe_runtime.inference.generation import GenerationResult

PROMPT = "The store reads"


def reference_text(checkpoint: Path, num_tokens: int) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    output = model.generate(ids, max_new_tokens=num_tokens, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def words_of_run(checkpoint: Path | str, *options: str, prompt: str | None = PROMPT) -> list[str]:
    prompts = [] if prompt is None else ["--prompt", prompt]
    return ["run", str(checkpoint), *prompts, *options]


def run(checkpoint: Path | str, *options: str, prompt: str | None = PROMPT) -> int:
    return main(words_of_run(checkpoint, *options, prompt=prompt))


def test_text_goes_to_stdout_and_the_table_to_stderr(checkpoint, fake_load, capsys):
    assert run(checkpoint, "-n", "12") == 0
    out, err = capsys.readouterr()
    assert out == reference_text(checkpoint, 12) + "\n"
    assert "what the runtime did" in err
    assert "12 new" in err
    assert "90.0% in memory, 4 on their way, 6 read" in err
    assert "3 MiB, waited 0.25 s" in err
    assert fake_load.runtime.closed


UNNEEDED = "auto, off: too little to save; in use for 0 of 7 steps"
UNTRIED = "auto, not tried yet; in use for 0 of 7 steps"


@pytest.mark.parametrize(
    ("prefetch", "verbose", "rows"),
    [
        (UNTRIED, False, [("policy", "lru, even shares"), ("prefetch", "auto, not tried yet")]),
        (UNNEEDED, False, [("policy", "lru, even shares"), ("prefetch", "auto, off")]),
        (
            UNNEEDED,
            True,
            [
                ("policy", "lru, even shares: all experts fit"),
                ("prefetch", UNNEEDED),
                ("prefetched", "3 experts: 1 in time, 0 late, 2 wasted; guessing took 0.25 s"),
            ],
        ),
    ],
)
def test_the_table_gives_reasons_when_asked(fake_load, prefetch, verbose, rows):
    stats = replace(
        fake_load.runtime.stats(),
        policy="lru",
        shares="even",
        policy_reason="all experts fit",
        prefetch=prefetch,
        guesses=3,
        useful_guesses=1,
        late_guesses=0,
        wasted_guesses=2,
        predict_s=0.25,
    )
    result = GenerationResult(
        text="text",
        token_ids=tuple(range(8)),
        prompt_tokens=2,
        new_tokens=8,
        ttft_s=0.1,
        decode_tokens_per_s=5.0,
        finish_reason="length",
    )
    assert outcome_rows([result], stats, verbose=verbose)[-len(rows) :] == rows


def test_verbose_and_json_exclude_each_other(checkpoint, fake_load, capsys):
    assert run(checkpoint, "--json", "--verbose") == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["error"] == err.removeprefix("moe-runtime: error: ").removesuffix("\n")
    assert "give one of them" in err


def test_a_terminal_sees_the_prompt_dimmed_and_no_escape_sequences(
    checkpoint, fake_load, capsys, monkeypatch
):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run(checkpoint, "-n", "1", prompt="one\n\033[31mtwo") == 0
    assert capsys.readouterr().out.startswith("\033[2mone\n[31mtwo\033[0m")


def test_json_is_one_object_with_the_promised_keys(checkpoint, fake_load, capsys):
    assert run(checkpoint, "-n", "5", "--json") == 0
    out, err = capsys.readouterr()
    outcome = json.loads(out)
    assert outcome["text"] == reference_text(checkpoint, 5)
    assert outcome["new_tokens"] == 5
    assert outcome["prompt_tokens"] > 0
    assert outcome["ttft_s"] > 0
    assert outcome["decode_tokens_per_s"] > 0
    promised = {
        "load_s": 0.5,
        "hits": 90,
        "misses": 6,
        "late_hits": 4,
        "bytes_read": 3 * 2**20,
        "stall_s": 0.25,
        "expert_slots": 12,
        "peak_rss_bytes": 2**29,
        "budget_bytes": 2**30,
    }
    assert outcome | promised == outcome
    assert err == ""


def test_tokens_are_chosen_as_the_checkpoint_says(checkpoint, fake_load, tmp_path, capsys):
    """Of what an option does not say; the reference draws from transformers' own `generate`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    own = {"do_sample": True, "temperature": 1.75, "top_k": 3, "top_p": 0.9}
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, **own}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    for given, values in ((), own), (("--temperature", "2.5"), {**own, "temperature": 2.5}):
        assert run(folder, "-n", "12", "--seed", "5", *given, "--json") == 0
        printed = json.loads(capsys.readouterr().out)
        torch.manual_seed(5)
        output = model.generate(ids, max_new_tokens=12, **values)
        assert printed["text"] == tokenizer.decode(output[0, ids.shape[1] :])
        used = {"top_k": 3, "top_p": 0.9, "min_p": 0.0, "temperature": values["temperature"]}
        assert printed["sampling"] == used
    assert run(folder, "-n", "2") == 0
    assert "temperature 1.75, top_p 0.9, top_k 3" in capsys.readouterr().err
    assert run(folder, "-n", "12", "--temperature", "0") == 0
    out, err = capsys.readouterr()
    assert out == reference_text(checkpoint, 12) + "\n"
    assert "greedy" in err


def test_the_prompt_can_come_from_a_file_or_standard_input(
    checkpoint, fake_load, tmp_path, capsys, monkeypatch
):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    for source in (str(file), "-"):
        assert run(checkpoint, "-n", "6", "--prompt-file", source, prompt=None) == 0
        assert capsys.readouterr().out == reference_text(checkpoint, 6) + "\n"


def test_a_config_file_gives_defaults_that_the_command_line_overrides(
    checkpoint, fake_load, tmp_path
):
    file = tmp_path / "run.toml"
    file.write_text('max-new-tokens = 3\nhost_memory = "5GiB"\npolicy = "other"\n')
    assert run(checkpoint, "--config", str(file), "--policy", "lru") == 0
    assert fake_load.options["host_memory"] == "5GiB"
    assert fake_load.options["policy"] == "lru"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("host-memry = '1GiB'", "unknown key 'host_memry'; did you mean 'host_memory'?"),
        ("model = 'x'", "unknown key 'model'"),
        ("config = 'x'", "unknown key 'config'"),
        ("policy = ['lru']", "policy must be a single value"),
        ("max-new-tokens = 'many'", "max-new-tokens"),
        ("policy = ", "not a TOML file"),
        ("max-new-tokens = 3.7", "--max-new-tokens"),
        ("max-new-tokens = true", "max_new_tokens must be a single value, got True"),
        ("chat = 1", "chat must be true or false, got 1"),
    ],
)
def test_a_wrong_config_file_gets_one_line(
    checkpoint, fake_load, tmp_path, refused, content, message
):
    file = tmp_path / "run.toml"
    file.write_text(content)
    assert message in refused(*words_of_run(checkpoint, "--config", str(file)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host-memory", "lots"], "--host-memory must be a size, a share such as 0.25, or"),
        (["--host-memory", "0"], "--host-memory must be a positive number"),
        (["--device-memory", "7 parsecs"], "--device-memory"),
        (["--max-new-tokens", "many"], "--max-new-tokens"),
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--temperature", "1", "--top-p", "2"], "top_p"),
        (["--chat"], "no chat template"),
        (["--max-tokens", "4"], "--max-tokens 4 is too small"),
        (["--prompt-file", "x"], "expected one of --prompt TEXT, --prompt-file FILE"),
        (["--max-new-tokens", "9999"], "positions"),
        (["superfluous"], "superfluous"),
    ],
)
def test_wrong_options_get_one_line(checkpoint, fake_load, refused, options, message):
    assert message in refused(*words_of_run(checkpoint, *options))


def test_a_wrong_prompt_gets_one_line(checkpoint, fake_load, tmp_path, refused):
    (tmp_path / "binary").write_bytes(b"one\n\xff\xfe\x00")
    for words, message in (
        ((), "expected one of --prompt TEXT, --prompt-file FILE"),
        (("--prompt", ""), "prompt is empty"),
        (("--prompt-file", str(tmp_path / "missing")), "No such file"),
        (("--prompt-file", str(tmp_path / "binary")), "binary, line 2: is not UTF-8"),
    ):
        assert message in refused("run", str(checkpoint), *words)


def test_a_wrong_folder_gets_one_line(checkpoint, fake_load, tmp_path, refused):
    (tmp_path / "file").write_text("x")
    for name in ("bare", "odd"):
        (tmp_path / name).mkdir()
        shutil.copy(checkpoint / "config.json", tmp_path / name)
    shutil.copy(checkpoint / "tokenizer_config.json", tmp_path / "odd")
    (tmp_path / "odd" / "tokenizer.json").write_text("{}")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    shutil.copytree(checkpoint, tmp_path / "strange")
    (tmp_path / "strange" / "config.json").write_text('{"model_type": "nobodys"}')
    cases = {
        tmp_path / "missing": "is not a directory",
        tmp_path / "file": "is a file",
        tmp_path: "no config.json",
        tmp_path / "damaged": "config.json cannot be read: ",
        tmp_path / "strange": " knows no model_type 'nobodys'; ",
        tmp_path / "bare": "no tokenizer files",
        tmp_path / "odd": "its files are damaged",
    }
    for folder, message in cases.items():
        assert message in refused(*words_of_run(folder))


def test_a_model_that_is_not_on_this_machine_gets_one_line_offline(fake_load, refused):
    """The suite sets HF_HUB_OFFLINE, so the hub's own errors come up."""
    assert "nobody/never-was" in refused(*words_of_run("nobody/never-was"))


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("shard 2 is missing\nfrom the folder"),
        CapacityError("needs 1 GiB", smallest_bytes=2**30),
        UnsupportedModelError("a dense model"),
        ValueError("unknown policy 'lur'; did you mean 'lru'?"),
        OSError("the disk left"),
        PermissionError(13, "Permission denied", "model.safetensors"),
        MemoryError(),
    ],
)
def test_what_the_runtime_refuses_gets_one_line(checkpoint, fake_load, refused, capsys, error):
    fake_load.error = error
    words = str(error).split()
    last = words[-1].strip("'") if words else "memory"
    assert last in refused(*words_of_run(checkpoint))
    assert run(checkpoint, "--json") == 2
    out, err = capsys.readouterr()
    assert err == f"moe-runtime: error: {json.loads(out)['error']}\n"


def test_a_bug_of_ours_says_so_and_shows_its_place_on_request(checkpoint, fake_load, capsys):
    fake_load.error = KeyError("surprise")
    assert run(checkpoint) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), "--debug shows where" in err) == ("", 1, True)
    assert run(checkpoint, "--debug") == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_while_loading_ends_quietly(checkpoint, fake_load, capsys):
    fake_load.error = KeyboardInterrupt()
    assert run(checkpoint) == 130
    assert capsys.readouterr() == ("", "")
