"""A run keeps within its budget: peak less baseline, whatever reads, records or computes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

POCKET = Path(__file__).parents[2] / "models" / "pocket"
PROMPT = " ".join(f"The for statement is used to iterate {i} over" for i in range(9))

_RUN = """
import sys
from moe_runtime.cli.main import main
if sys.argv.pop(1) == "hidden":
    from moe_runtime.kernels import native
    native._load = lambda: (None, "it is hidden by a test")
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("native", ["native", pytest.param("hidden", marks=pytest.mark.long)])
def test_a_run_keeps_within_its_budget(native, tmp_path):
    records = ["--trace", str(tmp_path / "t.npz"), "--timeline", str(tmp_path / "t.json")]
    options = ["--policy", "reuse", "--prefetch", "enforce", *records]
    words = ["run", str(POCKET), "--prompt", PROMPT, "--max-new-tokens", "8", "--json"]
    run = subprocess.run(
        [sys.executable, "-P", "-c", _RUN, native, *words, "--host-memory", "24MiB", *options],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    stats = json.loads(run.stdout)
    assert stats["prompt_tokens"] > 64  # experts get many different numbers of rows
    used = stats["peak_rss_bytes"] - stats["baseline_rss_bytes"]
    assert used <= stats["budget_bytes"] == 24 * 2**20
