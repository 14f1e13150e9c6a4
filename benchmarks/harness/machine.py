"""What a result depends on besides the code: hardware, versions, commit."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from moe_runtime.lab.this_machine import commit as commit
from moe_runtime.lab.this_machine import describe_machine as describe_machine
from moe_runtime.lab.this_machine import versions as versions


def run_command(root: Path) -> str:
    """The command of a script that runs, as a results file has it.

    Of absolute paths only the last part: folders of this machine are nobody's business.

    Args:
        root: the checkout.
    """
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    script = Path(sys.argv[0]).resolve().relative_to(root)
    return shlex.join(["python", str(script), *words])


def machine_name(facts: dict[str, object]) -> str:
    """A file-name-safe name made of processor, cores and memory.

    Virtual machines call every AMD server "AMD EPYC": one without AVX-512 has "avx2" in its name.
    """
    gib = round(int(str(facts["memory_bytes"])) / 2**30)
    features = facts.get("cpu_features", ())
    assert isinstance(features, list | tuple)
    older = "-avx2" if "avx2" in features and "avx512f" not in features else ""
    words = f"{facts['cpu']}{older}-{facts['num_cores']}c-{gib}g".lower()
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)|processor|cpu", "", words)).strip("-")
