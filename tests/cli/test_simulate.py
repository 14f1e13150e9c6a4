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
    words = ["simulate", "--ranks", "8,16", "--degrees", "1,4", "--zipf", "0.5"]
    words += ["--algorithm", "eplb", "--replicas-per-rank", "1", "--plot", str(plot), "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_assumed"] is True
    assert len(report["points"]) == 8
    assert {point["num_ranks"] for point in report["points"]} == {8, 16}
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_machine_file_and_table(tmp_path, capsys):
    machine = tmp_path / "machine.toml"
    machine.write_text(MACHINE)
    assert main(["simulate", "--ranks", "2,4", "--machine", str(machine), "--degrees", "1"]) == 0
    out = capsys.readouterr().out
    assert "measured links and rates" in out
    assert "two levels" in out


def test_a_shortcut_hides_what_the_backbone_has_time_for(capsys):
    words = ["simulate", "--ranks", "16", "--degrees", "1", "--json", "--shortcut"]
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
    assert main(["simulate", "--ranks", "4", "--degrees", "1,2", "--shortcut", "1e-3"]) == 0
    assert "with a shortcut" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shortcut", "fast"], "must be seconds with commas"),
        (["--shortcut", "1,-1"], "must be seconds with commas"),
        (["--shortcut", "1", "--degrees", "2"], "--degrees must have 1"),
    ],
)
def test_wrong_shortcuts(words, message, capsys):
    assert main(["simulate", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


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
def test_wrong_machine_files(tmp_path, machine, message, capsys):
    path = tmp_path / "machine.toml"
    path.write_text(machine)
    assert main(["simulate", "--ranks", "2", "--machine", str(path)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


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
    ],
)
def test_wrong_words(words, message, capsys):
    assert main(["simulate", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_plot_of_another_kind_is_refused(capsys):
    assert main(["simulate", "--plot", "scaling.gif"]) == 2
    assert "scaling.gif: expected a name that ends in one of .png, .svg, .pdf" in (
        capsys.readouterr().err
    )


def test_a_plot_that_cannot_be_written_is_named(capsys):
    assert main(["simulate", "--ranks", "8", "--degrees", "1", "--plot", "/dev/full"]) == 2
    complaint = "error: /dev/full: the plot cannot be written: is a device, pipe"
    assert complaint in capsys.readouterr().err
