"""The program ``moe-runtime``: its streams, and Ctrl-C from the first import to the last line.

Nothing is imported here but what Python has loaded anyway, so that an interrupted start is as quiet
as an interrupted command.
"""

import signal
import sys

from moe_runtime.cli.streams import open_closed_streams, outlive_stderr


def program() -> int:
    """Runs the command line of this process and returns the exit code."""
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
    except KeyboardInterrupt:
        code = 130
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # What is left is Python's own end, where another Ctrl-C would only make noise.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


if __name__ == "__main__":
    sys.exit(program())
