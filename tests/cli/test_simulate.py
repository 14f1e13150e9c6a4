"""``moe-runtime simulate``: numbers, plots, machine files, and one line for what is wrong."""

import json

import pytest

from moe_runtime.cli.main import main

MACHINE = """
ranks_per_node = 2
flops_per_s = 1e12

[intra]
alpha_s = 1e-5
bytes_per_s = 1e9
occupies_compute = true

[inter]
alpha_s = 5e-5
bytes_per_s = 1e8
"""


def test_json_and_plot(tmp_path, capsys):
    plot = tmp_path / "scaling.png"
    words = ["simulate", "layer", "--ranks", "8,16", "--degrees", "1,4", "--zipf", "0.5"]
    words += ["--algorithm", "eplb", "--replicas-per-rank", "1", "--plot", str(plot), "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_assumed"] is True
    assert report["machine"]["memory_bytes"] is None
    assert len(report["points"]) == 8
    assert {point["num_ranks"] for point in report["points"]} == {8, 16}
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_machine_file_and_table(tmp_path, capsys):
    machine = tmp_path / "machine.toml"
    machine.write_text(MACHINE)
    assert (
        main(["simulate", "layer", "--ranks", "2,4", "--machine", str(machine), "--degrees", "1"])
        == 0
    )
    out = capsys.readouterr().out
    assert "measured links and rates" in out
    assert "two levels" in out


def test_a_shortcut_hides_what_the_backbone_has_time_for(capsys):
    words = ["simulate", "layer", "--ranks", "16", "--degrees", "1", "--json", "--shortcut"]
    blocks = []
    for backbone in ("0", "1,1,1", "0.0,2e-3,1e-3"):
        assert main([*words, backbone]) == 0
        report = json.loads(capsys.readouterr().out)
        (found,) = report["shortcut"]
        blocks.append(found["block_s"] - sum(map(float, backbone.split(","))))
        layers = [point["prediction"] for point in report["points"]]
    fastest = min(layers, key=lambda layer: layer["layer_s"])
    assert blocks[0] == pytest.approx(fastest["layer_s"])
    assert blocks[1] == pytest.approx(fastest["compute_s"])
    assert blocks[1] <= blocks[2] <= blocks[0]
    assert (
        main(["simulate", "layer", "--ranks", "4", "--degrees", "1,2", "--shortcut", "1e-3"]) == 0
    )
    assert "with a shortcut" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ("ranks_per_nod = 2", "did you mean 'ranks_per_node'"),
        ("ranks_per_node = 2\nflops_per_s = 1.0", "lacks inter, intra"),
        (MACHINE.replace("1e9", "0"), "bytes_per_s must be positive"),
        (MACHINE.replace("alpha_s = 5e-5", "alpha = 1"), "did you mean 'alpha_s'"),
        (MACHINE.replace("flops_per_s = 1e12", "flops_per_s = 'fast'"), "expected a number"),
        ("= 2", "not a TOML file"),
    ],
)
def test_wrong_machine_files(tmp_path, machine, message, refused):
    path = tmp_path / "machine.toml"
    path.write_text(machine)
    assert message in refused("simulate", "layer", "--ranks", "2", "--machine", str(path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "8,x"], "--ranks must be numbers"),
        (["--ranks", "0"], "--ranks must be numbers"),
        (["--ranks", "12"], "12 ranks do not divide into nodes of 8"),
        (["--degrees", ""], "--degrees must be numbers"),
        (["--algorithm", "eplc"], "did you mean 'eplb'"),
        (["--machine", "missing.toml"], "missing.toml: No such file"),
        (["--plot", "no/folder/x.png"], "no folder"),
        (["--plot", "/dev/full"], "/dev/full: the plot cannot be written: is a device, pipe"),
        (["--plot", "x.gif"], "x.gif: expected a name that ends in one of .png, .svg, .pdf"),
        (["--shortcut", "fast"], "must be seconds with commas"),
        (["--shortcut", "1,-1"], "must be seconds with commas"),
        (["--shortcut", "1", "--degrees", "2"], "--degrees must have 1"),
    ],
)
def test_wrong_words(words, message, refused):
    assert message in refused("simulate", "layer", *words)


SIZES = """
num_layers = 2
model_dim = 1024
num_experts = 16
top_k = 2
expert_hidden = 512
dense_parameters = 1e7
kv_bytes_per_token = 4096
"""


@pytest.fixture
def sizes(tmp_path):
    path = tmp_path / "sizes.toml"
    path.write_text(SIZES)
    return str(path)


def points_of(words, capsys):
    assert main(["simulate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["points"]


def test_a_service_by_rate_and_ranks(sizes, capsys):
    words = ["serve", sizes, "--ranks", "2,8", "--requests", "60", "--new-tokens", "8"]
    found = points_of([*words, "--rates", "1,200000"], capsys)
    assert [one["num_ranks"] for one in found] == [2, 2, 8, 8]
    for calm, busy in (found[:2], found[2:]):
        assert calm["first_token_s"]["p95"] < busy["first_token_s"]["p95"]
        assert calm["tokens_per_s"] < busy["tokens_per_s"]
    assert found[1]["tokens_per_s"] < found[3]["tokens_per_s"]
    assert [one["requests_per_s"] for one in found] == [1, 200_000] * 2
    assert all(one["good_share"] == 1 for one in found)
    strict = points_of([*words, "--first-token", "1e-6"], capsys)
    assert [one["good_share"] for one in strict] == [0, 0]
    longer = points_of([*words, "--prompt-tokens", "90000"], capsys)
    assert longer[0]["first_token_s"]["p50"] > found[0]["first_token_s"]["p50"]
    assert main(["simulate", *words]) == 0
    assert "assumed links and rates" in capsys.readouterr().out


def test_recorded_arrivals(sizes, tmp_path, capsys):
    file = tmp_path / "a.csv"
    lines = [f"2023-11-16 18:17:{n:02}.5000000,{10 + n},{1 + n % 5}" for n in range(60)]
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    words = ["serve", sizes, "--ranks", "4", "--arrivals", str(file)]
    plain, fast, apart = (
        points_of([*words, *more], capsys)[0]
        for more in ([], ["--rates", "4"], ["--prefill-ranks", "2"])
    )
    assert plain["requests_per_s"] == pytest.approx(1)  # one each second
    assert fast["requests_per_s"] == pytest.approx(4)
    assert apart["requests_per_s"] == plain["requests_per_s"]
    assert main(["simulate", *words, "--requests", "9"]) == 2
    assert "--requests is for requests that --arrivals does not name" in capsys.readouterr().err


def test_requests_of_one_token_have_no_time_between_tokens(sizes, tmp_path, capsys):
    """Requests an hour apart do not delay each other: without those of one token it is the same."""
    file, head = tmp_path / "a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    every = [f"2023-11-16 {n:02}:00:00,10,{1 if n % 4 else 8}\n" for n in range(24)]
    found = []
    for lines in (every, every[::4]):
        file.write_text(head + "".join(lines))
        found += points_of(["serve", sizes, "--ranks", "4", "--arrivals", str(file)], capsys)
    assert found[0]["between_tokens_s"] == pytest.approx(found[1]["between_tokens_s"])
    assert found[0]["between_tokens_s"]["p50"] > 0
    file.write_text(head + 2 * every[1])
    words = ["serve", sizes, "--ranks", "4", "--arrivals", str(file)]
    (point,) = points_of(words, capsys)
    assert point["between_tokens_s"] == {"p50": None, "p95": None}
    assert point["requests_per_s"] is None, "both came at once"
    assert point["good_share"] == 1
    assert main(["simulate", *words]) == 0
    assert " - " in capsys.readouterr().out


def test_training_with_failures(sizes, tmp_path, capsys):
    machine = tmp_path / "m.toml"
    machine.write_text(MACHINE.replace("\n[intra]", "disk_bytes_per_s = 1e9\n[intra]", 1))
    words = ["train", sizes, "--ranks", "2,64", "--machine", str(machine), "--tokens", "512"]
    calm, failing = (points_of([*words, *more], capsys) for more in ([], ["--failure-days", "0.1"]))
    for one, other in zip(calm, failing, strict=True):
        assert other["tokens_per_s"] == pytest.approx(one["tokens_per_s"] * other["useful_share"])
    assert failing[1]["useful_share"] < failing[0]["useful_share"] < 1
    assert main(["simulate", *words]) == 0
    assert "useful" in capsys.readouterr().out


def test_layouts_are_shown_fastest_first(sizes, capsys):
    words = ["train", sizes, "--ranks", "4,8", "--tokens", "512"]
    found = points_of([*words, "--layouts", "3"], capsys)
    assert [one["num_ranks"] for one in found] == [4] * 3 + [8] * 3
    for given, best in zip(points_of(words, capsys), found[::3], strict=True):
        assert best["tokens_per_s"] >= given["tokens_per_s"]
        whole = {"stages": 1, "expert_ranks": given["num_ranks"], "tokens": 512, "micro_batches": 1}
        assert given["layout"] == whole
    assert found[0]["tokens_per_s"] >= found[1]["tokens_per_s"] >= found[2]["tokens_per_s"]
    assert main(["simulate", *words, "--layouts", "3"]) == 0
    assert "stages" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--rates", "0"], "--rates must be positive numbers"),
        (["serve", "--restart-seconds", "9"], "is for failures: give --failure-days too"),
        (["serve", "--prefill-ranks", "8", "--ranks", "8"], "8 of 8 ranks leave none"),
        (["train", "--algorithm", "eplc"], "did you mean 'eplb'"),
        (["train", "--ranks", "12"], "12 ranks do not divide into nodes of 8"),
    ],
)
def test_wrong_words_of_a_system(sizes, words, message, refused):
    command, *rest = words
    assert message in refused("simulate", command, sizes, *rest)
