"""Files of peers with the faults of a first try: one line each that says what and where."""

from pathlib import Path

import pytest

from moe_runtime.benchmarks.suite import PeerFailedError
from moe_runtime.benchmarks.suite.peers import find_peer, started

PEER = """
INSTALL = "pip install nothing"
PACKAGES = ()
class Peer:
    def __init__(self, settings):
        pass
    def load(self):
        pass
    def prefill(self, ids):
        return 5
    def step(self, token):
        return 6
    def close(self):
        pass
"""
STREAM = """
    def stream(self, ids, num_new):
        yield 5
        {}
"""


def written(folder: Path, *changes: tuple[str, str]) -> str:
    text = PEER
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "first_try.py").write_text(text)
    return str(folder / "first_try.py")


def failure_of(file: str) -> str:
    """What is said of it, at whatever step it fails."""
    program = find_peer(file, {"num_threads": 1, "device": "cpu"})
    with started(program, 30.0) as process:
        try:
            process.ask("start", settings=program.settings)
            process.ask("load")
            process.ask("measure", prompts=[[1, 2]], num_new=4, given=None)
        except PeerFailedError as error:
            return str(error)
    raise AssertionError("it did not fail")


AT_ONCE = (
    "    def prefill(self, ids):\n        return 5\n    def step(self, token):\n        return 6\n"
)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("INSTALL", "import nobodys\nINSTALL"),
            "No module named 'nobodys' (first_try.py, line 2)",
        ),
        (
            ("settings):\n        pass", "settings):\n        raise OSError"),
            "OSError (first_try.py",
        ),
        (("(self, settings)", "(self)"), "TypeError: Peer.__init__() takes 1 positional argument"),
        (("return 6", "raise ValueError('a\\nb')"), "ValueError: a (first_try.py, line 12)"),
        (("return 6", "return 6.0"), "a token must be its number, an int, got 6.0 (float)"),
        ((AT_ONCE, STREAM.format("return")), "RuntimeError: 1 tokens came, 4 were asked for"),
        ((AT_ONCE, STREAM.format("while True: yield 5")), "more tokens came, 4 were asked for"),
        (
            (AT_ONCE, STREAM.replace("yield 5", "return [5] * 4").format("")),
            "as they are made; it returned list",
        ),
    ],
)
def test_a_fault_is_one_line_with_its_place(change, said, tmp_path):
    failure = failure_of(written(tmp_path, change))
    assert said in failure
    assert failure.count("\n") == 0


def test_errors_of_this_project_say_by_themselves_what_to_change(tmp_path):
    raising = "from moe_runtime.errors import CapacityError; raise CapacityError('too small')"
    assert failure_of(written(tmp_path, ("return 6", raising))) == "too small"


def test_numbers_of_numpy_are_numbers(tmp_path):
    file = written(tmp_path, ("return 6", "import numpy; return numpy.int64(6)"))
    program = find_peer(file, {"num_threads": 1})
    with started(program, 30.0) as process:
        process.ask("start", settings={})
        assert process.ask("measure", prompts=[[1]], num_new=3, given=None)["ids"] == [[5, 6, 6]]


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ("    def close(self):\n        pass\n", "its class Peer has no close"),
        ("    def load(self):\n        pass\n", "its class Peer has no load"),
        ("    def step(self, token):\n        return 6\n", "its class Peer has no step"),
        (AT_ONCE, "its class Peer has no prefill and no step"),
    ],
)
def test_a_method_that_is_not_there_is_named_before_anything_is_measured(old, said, tmp_path):
    file = written(tmp_path, (old, ""))
    with pytest.raises(ValueError, match=f"^--peer {file}: {said}$"):
        find_peer(file, {"num_threads": 1})
