"""What a result depends on besides the code: hardware, versions, commit."""

from __future__ import annotations

import re

from moe_runtime.bench.results import commit as commit
from moe_runtime.lab.this_machine import describe_machine as describe_machine
from moe_runtime.lab.this_machine import num_usable_cores as num_usable_cores
from moe_runtime.lab.this_machine import total_memory_bytes as total_memory_bytes
from moe_runtime.lab.this_machine import versions as versions


def machine_name(facts: dict[str, object]) -> str:
    """A file-name-safe name made of processor, cores and memory.

    A processor that has AVX2 and no AVX-512 says so: "AMD EPYC" is the name of both kinds.
    """
    gib = round(int(str(facts["memory_bytes"])) / 2**30)
    features = facts.get("cpu_features")
    features = features if isinstance(features, list) else []
    kind = "-avx2" * ("avx2" in features and "avx512f" not in features)
    words = f"{facts['cpu']}{kind}-{facts['num_cores']}c-{gib}g".lower()
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)|processor|cpu", "", words)).strip("-")
