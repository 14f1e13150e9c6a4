"""A Python that has imported torch, transformers and this project before it is started."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib
import itertools
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

# Imported when the first program is asked for.
PRELOAD = (
    *("torch", "torch._dynamo", "torch.distributed", "torch.distributed.checkpoint"),
    *("torch.distributed.fsdp", "torch.distributed.tensor", "moe_runtime.benchmarks.suite"),
    *("moe_runtime.cli.main", "moe_runtime.cli.commands.run", "moe_runtime.inference.loading"),
    *("moe_runtime.kernels.expert_mlp", "moe_runtime.models.lm.parallel", "moe_runtime.parallel"),
    *("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "moe_runtime.training.train_run"),
    *("transformers.generation.utils", "transformers.models.qwen3_moe.modeling_qwen3_moe"),
    *("transformers.models.olmoe.modeling_olmoe",),
)
CLIENT = Path(__file__).with_name("warm_python_client.py")
WHERE = "MOE_SUITE_WARM_PYTHON"
"""In the environment, which the processes of pytest inherit."""


def warm_python() -> str:
    """The path of an interpreter that knows `-m MODULE`, `-c CODE` and `FILE`."""
    return os.environ[WHERE]


@contextlib.contextmanager
def warm_python_server() -> Iterator[None]:
    """Has a server that ends with the block, and with this process: a pipe that it watches."""
    with tempfile.TemporaryDirectory(prefix="warm-python-") as folder:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/socket")
            listener.listen(16)
            number = listener.fileno()
            server = subprocess.Popen(
                [sys.executable, "-P", __file__, str(number)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                pass_fds=[number], start_new_session=True,
            )  # fmt: skip
        python = Path(folder, "python")
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {CLIENT} {folder}/socket "$@"\n')
        python.chmod(0o700)
        os.environ[WHERE] = str(python)
        with server:
            yield


def serve(listener: socket.socket) -> list[str]:
    """Forks a program for each request; returns in the program alone, with its words."""
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        _bury()
        for name in PRELOAD:
            importlib.import_module(name)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _program(connection)
        connection.close()
    _bury()
    os._exit(0)


def _bury() -> None:
    """Takes note of those that have ended, so that what they took is counted to this process."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _program(connection: socket.socket) -> list[str]:
    size, streams, _, _ = socket.recv_fds(connection, 8, 253)
    request = json.loads(connection.recv(struct.unpack("q", size)[0], socket.MSG_WAITALL))
    program = os.fork()
    if program:
        for stream in streams:
            os.close(stream)
        _watch(connection, program)
    connection.close()
    # first to where none of them belongs
    moved = [fcntl.fcntl(stream, fcntl.F_DUPFD, 512) for stream in streams]
    for number in (0, 1, 2, *streams):
        os.close(number)
    for number, stream in zip(request["streams"], moved, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.executable = os.environ.get(WHERE, sys.executable)
    random.seed()
    sys.modules["numpy"].random.seed()
    return request["words"]


def _watch(connection: socket.socket, program: int) -> None:
    """Passes on signals, and how the program ends; it is killed where its client is."""
    handle = os.pidfd_open(program)
    while handle not in select.select([handle, connection], [], [])[0]:
        asked = connection.recv(1)
        os.kill(program, asked[0] if asked else signal.SIGKILL)
        if not asked:
            break
    _, status = os.waitpid(program, 0)
    with contextlib.suppress(OSError):
        connection.sendall(struct.pack("i", os.waitstatus_to_exitcode(status)))
    os._exit(0)


def run(words: list[str]) -> None:
    """What Python does with its words, in a `__main__` of its own."""
    options = list(itertools.takewhile(lambda word: word[0] == "-" and word[1] not in "cm", words))
    words = words[len(options) :]
    if words[0] not in ("-c", "-m") and "-P" not in options:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.modules.pop(words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def end(code: int) -> NoReturn:
    """As Python ends, but for taking apart all modules: more than a second of a processor."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (AttributeError, OSError, ValueError):  # which Python tells in its own way
        sys.exit(code)
    os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        asked = serve(requests)
    program, code = os.getpid(), 0
    try:
        run(asked)
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            raise
        code = error.code or 0
    if os.getpid() != program:  # its own children end as children do
        sys.exit(code)
    end(code)
