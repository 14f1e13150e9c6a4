"""Compiles the kernels that a launcher would start, for GPUs that are not there.

Launchers are called with tensors of the `meta` device, so any shape costs nothing. Instead of
running, each launch is specialised as Triton would do it (pointers and integers divisible by 16,
the integer 1 as a constant), compiled for the target, and measured from the binary.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.uint8: "u8",
}
OPTION_NAMES = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")


@dataclass(frozen=True, slots=True)
class Binary:
    """One compiled kernel.

    Attributes:
        name: Of the kernel.
        target: `sm_90`, or `gfx942`.
        registers: A thread's, of 255.
        spilled_bytes: Of stack and local memory a thread uses; registers that were spilled.
        shared_bytes: Of a program.
        instructions: PTX or AMD assembly.
        loop: Instructions of the longest loop as the GPU runs it, of kernels of packed rows.
        loop_loads: Loads of 16 bytes of a thread among them.
        loop_weights: Weights that a thread multiplies there.
    """

    name: str
    target: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: str
    loop: int = 0
    loop_loads: int = 0
    loop_weights: int = 0


def compile_launches(call: Callable[[], Any], target: str) -> list[Binary]:
    """Every kernel that `call` launches, compiled for `target` and not run."""
    with _recorded_launches() as launches:
        call()
    return [_compile(kernel, arguments, target) for kernel, arguments in launches]


@contextmanager
def _recorded_launches() -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    from triton.runtime.jit import JITFunction

    launches: list[tuple[Any, dict[str, Any]]] = []
    original = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **arguments: Any) -> None:
        launches.append((self, arguments))

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = original


def _compile(kernel: Any, arguments: dict[str, Any], target: str) -> Binary:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.tools.tensor_descriptor import TensorDescriptor

    if target.startswith("gfx") and "PRECISION" in arguments:
        # What the launcher says on AMD's GPUs, which have no TF32.
        arguments = arguments | {"PRECISION": "ieee"}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    options = {name: arguments[name] for name in OPTION_NAMES if name in arguments}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, TensorDescriptor):
            kind = f"{TYPE_NAMES[value.base.dtype]}{value.block_shape}"
            signature[parameter.name] = f"tensordesc<{kind}>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPE_NAMES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif type(value) is float:
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    if target.startswith("gfx"):
        compiled = compile(source, target=GPUTarget("hip", target, 64), options=options)
        return _read_amd(compiled, target)
    capability = int(target.removeprefix("sm_"))
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    if "CASTS" not in arguments or arguments["FORMAT"] is None:
        return _read_nvidia(compiled, target)
    weights = arguments["BLOCK_N"] * arguments["BLOCK_K"] * (1 + arguments.get("IS_GATED", False))
    return _read_nvidia(compiled, target, weights // (32 * arguments["num_warps"]))


def _read_nvidia(compiled: Any, target: str, loop_weights: int = 0) -> Binary:
    import triton

    tools, loop = Path(triton.__file__).parent / "backends" / "nvidia" / "bin", []
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()

        def ask(*words: str) -> str:
            command = [str(tools / words[0]), *words[1:], file.name]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        usage = ask("cuobjdump", "-res-usage")
        if loop_weights:
            loop = max(loops_of(ask("nvdisasm", "-c")), key=len, default=[])
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    return Binary(
        compiled.metadata.name,
        target,
        int(found["REG"]),
        int(found["STACK"]) + int(found["LOCAL"]),
        compiled.metadata.shared,
        compiled.asm["ptx"],
        len(loop),
        sum(re.search(r"\bLDG\.E\.128", one) is not None for one in loop),
        loop_weights,
    )


def loops_of(text: str) -> list[list[str]]:
    """The instructions of each loop in what `nvdisasm` prints: from a label to a jump back."""
    found: list[list[str]] = []
    instructions, labels = list[str](), dict[str, int]()
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif one := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(one[1])
            jump = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", one[1])
            if jump and jump[1] in labels:
                found.append(instructions[labels[jump[1]] :])
    return found


def _read_amd(compiled: Any, target: str) -> Binary:
    text = compiled.asm["amdgcn"]
    registers = re.search(r"\.vgpr_count:\s+(\d+)", text)
    # scalars that are spilled lie in vector registers
    spills = re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)
    scratch = re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)
    return Binary(
        compiled.metadata.name,
        target,
        int(registers[1]) if registers else 0,
        sum(map(int, spills)) + (int(scratch[1]) if scratch else 0),
        compiled.metadata.shared,
        text,
    )
