"""What stands for a program of `warm_python`: sends it off, and ends as it ends."""

import json
import os
import signal
import socket
import struct
import sys

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
streams = [number for number in range(256) if is_open(number)]
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    request = {"words": sys.argv[2:], "streams": streams}
    request |= {"environment": dict(os.environ), "folder": os.getcwd()}
    text = json.dumps(request).encode()
    socket.send_fds(server, [struct.pack("q", len(text))], streams)
    server.sendall(text)
    for number in SIGNALS:
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    (code,) = struct.unpack("i", server.recv(4))
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
