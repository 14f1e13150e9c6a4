"""The program `moe-runtime`: its streams, and Ctrl-C from the first import to the last line.

Imports only what Python has loaded anyway: an interrupted start is quiet.
"""

import atexit
import os
import signal
import sys

from moe_runtime.cli.stopping import open_closed_streams, outlive_stderr, resend_lost_interrupts

_INTERRUPTED = 130


def program() -> int:
    if sys.getfilesystemencoding() != "utf-8":
        # prompts and file names are UTF-8; only a new process changes Python's encoding
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # the first one is called last
    resend_lost_interrupts()
    try:
        closed = open_closed_streams()
        outlive_stderr()
        if "stdout" in closed:
            print(
                "moe-runtime: error: stdout is closed, so there is no place for results; redirect "
                "it to a file or to /dev/null",
                file=sys.stderr,
            )
            return 2
        from moe_runtime.cli.main import main

        code = main()
        _end_quietly()
    except KeyboardInterrupt:
        code = _INTERRUPTED
        _end_quietly()
    return code


def _end_quietly() -> None:
    """Lets Ctrl-C end the process at once, with the usual exit code.

    At the very end of Python no handler runs; Ctrl-C is ignored there.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED))


if __name__ == "__main__":
    sys.exit(program())
