"""Makes the benchmarks' own package `harness` importable, as it is for `serve_soak.py`."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
