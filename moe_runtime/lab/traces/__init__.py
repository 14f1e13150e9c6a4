"""Routing traces: record which experts every token visited, write them, read them back.

Numpy only: a trace can be replayed where torch is not installed.
"""

from moe_runtime.lab.traces.format import PHASES, TRACE_VERSION, Trace, read_trace, write_trace
from moe_runtime.lab.traces.recorder import TraceRecorder

__all__ = ["PHASES", "TRACE_VERSION", "Trace", "TraceRecorder", "read_trace", "write_trace"]
