"""Caps of memory: whose group is taken, when systemd is asked, what a peer over its cap says."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.benchmarks.suite import PeerFailedError
from moe_runtime.benchmarks.suite import memory_cap as caps
from moe_runtime.benchmarks.suite.memory_cap import (
    CGROUP_ROOT,
    CapUnavailableError,
    ScopeCap,
    make_group,
    memory_cap,
    require_scopes,
    set_limit,
    usable_parents,
    why_unavailable,
)
from moe_runtime.benchmarks.suite.peers import find_peer, started
from moe_runtime.cli.main import main

NO_CAPS = why_unavailable()
needs_caps = pytest.mark.skipif(NO_CAPS is not None, reason=f"no memory caps here: {NO_CAPS}")


def left_groups() -> list[Path]:
    return list(CGROUP_ROOT.glob(f"**/moe-benchmark-{os.getpid()}-*"))


@needs_caps
def test_a_process_over_its_cap_is_killed_and_the_group_removed():
    script = "data = bytearray(300 << 20); print(len(data))"
    with memory_cap(100 << 20) as cap:
        command = cap.wrap([sys.executable, "-c", script])
        over = subprocess.run(command, capture_output=True, check=False)
        assert over.returncode == -signal.SIGKILL
        if not isinstance(cap, ScopeCap):
            assert cap.num_oom_kills() == 1
    with memory_cap(600 << 20) as cap:
        under = subprocess.run(cap.wrap([sys.executable, "-c", script]), check=False)
        assert under.returncode == 0
        assert cap.num_oom_kills() == 0
    assert not left_groups()


@needs_caps
def test_the_page_cache_counts_against_the_cap(tmp_path):
    file = tmp_path / "large"
    file.write_bytes(bytes(200 << 20))
    os.sync()
    caps.forget([file])
    script = f"open({str(file)!r}, 'rb').readinto(bytearray(200 << 20))"
    with memory_cap(400 << 20) as cap:
        subprocess.run(cap.wrap([sys.executable, "-c", script]), check=True)
        names = ("memory.peak", "memory.max_usage_in_bytes")
        peaks = [] if isinstance(cap, ScopeCap) else [cap.folder / name for name in names]
        found = [int(one.read_text()) for one in peaks if one.is_file()]
    if not found:
        pytest.skip("this kernel keeps no peak counter")
    (peak,) = found
    assert peak > 350 << 20


@needs_caps
def test_a_peer_over_its_cap_says_so(tmp_path):
    file = tmp_path / "greedy.py"
    file.write_text(
        "INSTALL = 'pip install nothing'\nPACKAGES = ()\n"
        "class Peer:\n"
        "    def __init__(self, settings):\n        pass\n"
        "    def load(self):\n        self.data = bytearray(300 << 20)\n"
        "    prefill = step = close = load\n"
    )
    (tmp_path / "model").mkdir()
    settings = {"num_threads": 1, "model": str(tmp_path / "model"), "cap_bytes": 100 << 20}
    with started(find_peer(str(file), settings), 600.0) as process:
        process.ask("start", settings=settings)
        with pytest.raises(PeerFailedError, match=r"more than the cap of 100|SIGKILL"):
            process.ask("load")
    assert not left_groups()


def test_the_nearest_group_that_hands_memory_down_is_taken(tmp_path):
    """A user's own part of the tree of the second version: systemd hands it down, with memory."""
    service = tmp_path / "user.slice" / "user@7.service"
    own = service / "app.slice" / "shell.scope"
    own.mkdir(parents=True)
    for group, controllers in ((tmp_path, "memory cpu"), (service, "memory pids"), (own, "")):
        (group / "cgroup.subtree_control").write_text(controllers)
    (service / "app.slice" / "cgroup.subtree_control").write_text("pids")
    membership = "0::/user.slice/user@7.service/app.slice/shell.scope\n"
    assert usable_parents(tmp_path, membership, unified=True) == [service, tmp_path]
    # A container may not see the group that it is in.
    assert usable_parents(tmp_path, "0::/elsewhere/deep\n", unified=True) == [tmp_path]


def test_the_first_version_has_a_tree_for_memory(tmp_path):
    (tmp_path / "box").mkdir()
    memberships = "5:cpu,cpuacct:/other\n4:memory:/box\n0::/\n"
    assert usable_parents(tmp_path, memberships, unified=False) == [tmp_path / "box", tmp_path]


def test_a_group_is_made_where_we_may(tmp_path):
    absent = tmp_path / "absent"
    made = make_group([absent, tmp_path])
    assert made.parent == tmp_path
    with pytest.raises(CapUnavailableError, match=os.strerror(errno.ENOENT)):
        make_group([absent])
    with pytest.raises(CapUnavailableError, match="hands down its memory controller"):
        make_group([])
    # No kernel has filled this folder with files.
    with pytest.raises(CapUnavailableError, match="does not hand down"):
        set_limit(made, 1 << 30, unified=True)
    (made / "memory.max").write_text("max")
    set_limit(made, 1 << 30, unified=True)
    assert (made / "memory.max").read_text() == str(1 << 30)
    assert (made / "memory.swap.max").read_text() == "0"


SCOPES = {
    "limit in force": ("echo 1073741824", None),
    "limit dropped": ("echo max", "scopes of this user have no memory limit"),
    "no session": (
        "echo 'Failed to connect to bus: No medium found' >&2; exit 1",
        "systemd-run --user: Failed to connect to bus: No medium found",
    ),
}


@pytest.mark.parametrize("name", SCOPES)
def test_systemd_is_believed_when_its_limit_is_in_force(name, tmp_path):
    script, complaint = SCOPES[name]
    program = tmp_path / "systemd-run"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\n{script}\n')
    program.chmod(0o755)
    reason = CapUnavailableError("no rights")
    if complaint is None:
        found = require_scopes(reason, lambda _: str(program))
        assert ScopeCap(found, 5).wrap(["a", "b c"])[-3:] == ["--", "a", "b c"]
    else:
        with pytest.raises(CapUnavailableError, match=f"no rights; .*{complaint}"):
            require_scopes(reason, lambda _: str(program))
    words = (tmp_path / "words").read_text()
    expected = "--user --scope --quiet --collect -p MemoryMax=1073741824 -p MemorySwapMax=0 -- "
    assert words.startswith(expected)


def test_without_groups_and_systemd_the_reason_is_one_line():
    with pytest.raises(CapUnavailableError, match=r"^no rights; there is no systemd-run either"):
        require_scopes(CapUnavailableError("no rights"), lambda _: None)


@pytest.mark.parametrize(
    ("cap", "reason", "complaint"),
    [
        ("2GiB", "nobody may", "--cap 2GiB: memory cannot be capped here: nobody may"),
        ("much", None, "--cap: "),
        ("0", None, "--cap must be positive"),
    ],
)
def test_a_cap_that_cannot_be_is_one_line(cap, reason, complaint, monkeypatch, capsys):
    monkeypatch.setattr(caps, "why_unavailable", lambda: reason)
    assert main(["bench", "latency", "models/pocket", "--cap", cap]) == 2
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("case", ["latency", "throughput"])
def test_the_cap_arrives_at_every_system(case, monkeypatch):
    seen: list[Mapping[str, Any]] = []

    def measure(ours: Any, peers: Any, _: Any, __: Any, settings: Mapping[str, Any]) -> None:
        seen.append(settings)
        assert [one.cap_bytes for one in (ours, *peers)] == [7 << 30, 7 << 30]
        assert peers[0].settings["cap_bytes"] == settings["cap_bytes"] == 7 << 30
        # `moe_runtime.load` has no such argument.
        assert "cap_bytes" not in ours.settings
        raise ValueError("arrived")

    monkeypatch.setattr(caps, "why_unavailable", lambda: None)
    monkeypatch.setattr("moe_runtime.benchmarks.cases.texts.measure_texts", measure)
    model = Path(__file__).resolve().parents[2] / "models" / "pocket"
    words = ["bench", case, str(model), "--cap", "7GiB", "--peer", "transformers"]
    assert main(words) == 2
    assert len(seen) == 1
