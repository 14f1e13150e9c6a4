"""Servers that a benchmark starts: what is left of them when it has ended."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from moe_runtime.benchmarks.cases import serve as started_server
from moe_runtime.benchmarks.suite.programs import running

SERVER = """
import http.server, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[3]], stdout=subprocess.PIPE)
child.stdout.readline()  # it has said what it does with SIGTERM
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
class Models(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Models).serve_forever()
"""
CHILD = """
import os, pathlib, signal, sys, time
place = pathlib.Path(sys.argv[1])
def end(*_):
    place.with_suffix(".ended").touch()
    {end}
signal.signal(signal.SIGTERM, end)
place.write_text(str(os.getpid()))
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("end", "patience_s"), [("time.sleep(0.5); os._exit(0)", 20.0), ("pass", 0.5)]
)
def test_no_process_of_a_server_outlives_the_benchmark(tmp_path, monkeypatch, end, patience_s):
    """Its first process ends at SIGTERM; another one takes longer, or does not."""
    monkeypatch.setattr(started_server, "_END_S", patience_s)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    place = tmp_path / "child"
    words = [sys.executable, "-c", SERVER, str(port), CHILD.replace("{end}", end), str(place)]
    url = f"http://127.0.0.1:{port}"
    given = {"cap_bytes": None, "timeout_s": 60.0, "is_stopping": lambda: False}
    with started_server.started_server(words, url, **given) as server:
        assert isinstance(server, started_server.StartedServer)
        child = psutil.Process(int(place.read_text()))
        group = os.getpgid(child.pid)
    if end != "pass":  # else it may have been killed before it ran again
        assert place.with_suffix(".ended").exists()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    groups = []
    for one in psutil.process_iter(["status"]):
        if one.info["status"] != psutil.STATUS_ZOMBIE:
            with contextlib.suppress(ProcessLookupError):
                groups.append(os.getpgid(one.pid))
    assert group not in groups


def test_who_does_not_want_to_wait_has_it_killed(tmp_path, monkeypatch):
    """A second Ctrl-C comes while the first one's SIGTERM is waited for."""
    words = [sys.executable, "-c", CHILD.replace("{end}", "pass"), str(tmp_path / "child")]

    def struck(_: float) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    program = running(words, asked=signal.SIGTERM, grace_s=60.0, stdout=subprocess.PIPE)
    process = program.__enter__()
    assert process.stdout is not None
    process.stdout.readline()
    monkeypatch.setattr(time, "sleep", struck)
    with pytest.raises(KeyboardInterrupt):
        program.__exit__(None, None, None)
    assert process.returncode == -signal.SIGKILL
