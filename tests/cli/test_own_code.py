"""Policies and predictors of one's own: `--policy FILE.py` and `--predictor FILE.py`."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from fixture_types import Patch
from page_blocks import blocks_of

from moe_runtime.cli.main import main
from moe_runtime.models.pocket import pocket_path

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
RUN = ("run", str(pocket_path()), "-p", "Lists are", "-n", "12", "--host-memory", "20MiB", "--json")


@pytest.fixture
def own_files(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The page's examples, in the working folder."""
    monkeypatch.chdir(tmp_path)
    policy, predictor = blocks_of(PAGE, "python")
    Path("first_in.py").write_text(policy)
    Path("last_experts.py").write_text(predictor)
    return tmp_path


def test_the_examples_of_the_page_run_and_change_no_text(own_files, capsys):
    texts = []
    own = ("--policy", "first_in.py", "--predictor", "last_experts.py", "--prefetch", "enforce")
    for words in (("--policy", "lru", "--prefetch", "off"), own):
        assert main([*RUN, *words, "--trace", "trace.npz"]) == 0
        outcome = json.loads(capsys.readouterr().out)
        texts.append(outcome["text"])
    assert outcome["policy"] == "first_in.py"
    assert outcome["guesses"] > 0
    assert texts[0] == texts[1]

    words = ("--policy", "first_in.py,predicted", "--predictor", "last_experts.py")
    assert main(["replay", "trace.npz", *words, "--train", "trace.npz", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    rates = {row["policy"]: row["hit_rate"] for row in rows if row["capacity"] == 0.25}
    assert rates["random"] != rates["first_in.py"] < rates["belady"]
    assert rates["predicted"] < rates["belady"]


HEAD = "from moe_runtime.policies.eviction import *\n"
REFUSED = {
    "": "expected one class that extends EvictionPolicy, found none",
    "raise KeyError('x')": "cannot be executed: KeyError",
    "def": "cannot be executed: SyntaxError: invalid syntax",
    f"{HEAD}class A(LRU): ...\nclass B(LRU): ...": "found A, B",
    f"{HEAD}class A(EvictionPolicy): ...": "A lacks __contains__, __len__, insert",
    f"{HEAD}class A(LRU):\n def __init__(self, size): ...": "cannot be called as A()",
}


@pytest.mark.parametrize("code", REFUSED, ids=range(len(REFUSED)))
def test_code_that_does_not_fit_is_refused_in_a_line(code, tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text(code)
    assert main(["run", "absent", "-p", "x", "--policy", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(file) in line
    assert REFUSED[code] in line


@pytest.mark.parametrize(
    ("victim", "said"),
    [
        ("1 / 0", "first_in.py:20: ZeroDivisionError"),
        ("None", "FirstIn.victim found no"),
        ("(9, 9)", "FirstIn.victim chose (9, 9), which is not held"),
        ("[*self.held][-1]", "which may not be evicted now"),
    ],
)
@pytest.mark.parametrize("command", ["run", "replay"])
def test_faults_of_own_code_end_in_a_line_that_names_it(command, victim, said, own_files, capsys):
    file = own_files / "first_in.py"
    file.write_text(re.sub(r"return next.*", f"return {victim}", file.read_text()))
    ids = np.random.default_rng(0).integers(0, 16, (40, 6, 2))
    np.savez("trace.npz", ids=ids)
    given = {"run": RUN, "replay": ("replay", "trace.npz", "--num-experts", "16")}[command]
    assert main([*given, "--policy", str(file)]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_hits_of_a_policy_that_miscounts_its_keys_are_refused(own_files, capsys):
    file = own_files / "first_in.py"
    file.write_text(file.read_text().replace("return len(self.held)", "return 0"))
    np.savez("trace.npz", ids=np.random.default_rng(0).integers(0, 16, (40, 6, 2)))
    assert main(["replay", "trace.npz", "--num-experts", "16", "--policy", str(file)]) == 2
    assert "FirstIn has the length 0, but was given 2" in capsys.readouterr().err


def test_predictors_need_a_name_and_files_must_be_there(tmp_path, capsys):
    file = tmp_path / "own.py"
    words = ["run", "absent", "-p", "x", "--predictor", str(file)]
    assert main(words) == 2
    assert f"{file}: No such file" in capsys.readouterr().err
    file.write_text(
        "from moe_runtime.policies.prediction import Estimator\n"
        "class A(Estimator):\n def estimate(self, contexts, now, layer): ...\n"
    )
    assert main(words) == 2
    assert f"{file}: A lacks name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("estimate", "said"),
    [
        ("np.full((len(contexts), 16), float('nan'))", ", 16), got NaN"),
        ("np.full((len(contexts), 16), 50.0)", ", 16), got 50 to 50"),
        ("np.full((len(contexts), 16), -0.5)", ", 16), got -0.5 to -0.5"),
        ("[0.5]", "got shape (1,)"),
    ],
)
def test_estimates_that_are_not_probabilities_are_refused(estimate, said, own_files, capsys):
    file = own_files / "last_experts.py"
    head, _, _ = file.read_text().partition("        return")
    file.write_text(f"import numpy as np\n{head}        return {estimate}\n")
    ids = np.random.default_rng(0).integers(0, 16, (40, 6, 2))
    np.savez("trace.npz", ids=ids, offsets=[0, 10, 20, 30, 40])
    train = ("--predictor", str(file), "--train", "trace.npz")
    for words in (
        (*RUN, "--predictor", str(file), "--prefetch", "enforce"),
        ("replay", "trace.npz", "--policy", "predicted", *train),
        ("predictor", "evaluate", "trace.npz", "--predictor", str(file)),
        ("bench", "predictors", "trace.npz", "--predictor", str(file)),
    ):
        assert main([*words]) == 2
        assert said in capsys.readouterr().err.splitlines()[-1]
