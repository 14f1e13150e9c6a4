"""What `doctor` says of the kernels is what they choose."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fixture_types import Patch
from quantized_matrices import random_matrix

from moe_runtime.cli.commands import doctor as machine
from moe_runtime.kernels import native
from moe_runtime.kernels.quantized import BLOCKS, WeightFormat

NATIVE = native.LIBRARY_PATH.parent
GROUPS = (0, 4, 8, 12, 16, 32, 48, 128, 384)


def choice(isa: str, folder: Path) -> ctypes.CDLL:
    """The function of an instruction set that chooses the products, for any processor."""
    names = {"avx2": "quantized_avx2.h", "portable": "quantized_template.h"}
    text = (NATIVE / "formats" / names.get(isa, "quantized_avx512.h")).read_text()
    found = re.search(r"^static int (quantized_kind.*?^})", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    dot = f"#define HAS_BF16_DOT {int(isa in ('amx', 'avx512bf16'))}"
    source, made = folder / "choice.c", folder / "choice.so"
    source.write_text(f'#include "formats/quantized.h"\n{dot}\nint {found[1]}\n')
    subprocess.run(["cc", "-shared", "-fPIC", f"-I{NATIVE}", "-o", made, source], check=True)
    return ctypes.CDLL(str(made))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("isa", ["amx", "avx512bf16", "avx512", "avx2", "portable"])
def test_doctor_says_what_the_kernels_choose(tmp_path: Path, monkeypatch: Patch, isa: str) -> None:
    chosen = choice(isa, tmp_path)
    least = machine._IN_REGISTERS.get(isa, 0)
    kinds = [WeightFormat("uint4", "f16", group_cols=group) for group in GROUPS]
    for kind in (*kinds, WeightFormat("e4m3", "f32", 128, 128), *map(WeightFormat, BLOCKS)):
        record = random_matrix(kind, 2, 768, torch.Generator()).native_struct()
        assert record is not None
        described = ctypes.c_void_p(record[1].buffer_info()[0])
        in_registers = bool(chosen.quantized_kind(described, 0))  # else KIND_F32, which is 0
        group = kind.group_cols
        is_power = not group or (group >= least and group & (group - 1) == 0)
        is_said = bool(least) and (is_power or kind.block_codes > 0)
        assert in_registers == is_said, kind
    monkeypatch.setattr(native, "describe", lambda: SimpleNamespace(isa=isa))
    value = machine._quantised_kernels().value
    assert value.startswith("mxfp4, ")
    assert "gguf, planes: from their codes" in value
    assert (f"groups of {least}," in value) == bool(least)
    assert ("GGUF's blocks in registers" in value) == bool(least)
