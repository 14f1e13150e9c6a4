"""One layer of experts beside the backends of transformers: `python benchmarks/experts.py`.

Times the experts module of a transformers model on random weights, with
`experts_implementation="moe_runtime"` and with those of transformers, forward and with backward.
The implementations take turns, block by block; the median of each counts. Every call has other
routing than the one before, so that at few tokens the weights come from memory, as in a model.
`--isa avx512` (or `avx2`) holds ours, oneDNN, MKL and torch to the instructions of an older
processor; these results are saved in a file of their own.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness.machine import commit, describe_machine, machine_name, versions
from torch import Tensor

import moe_runtime
from moe_runtime.files import write_text
from moe_runtime.kernels.native import require_native

PEERS = ("eager", "grouped_mm", "batched_mm")
OURS = "moe_runtime"
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """One layer's experts: E, K, D, F, and the transformers model that has them."""

    model_type: str
    experts_class: str
    num_experts: int
    top_k: int
    dim_model: int
    dim_hidden: int

    def expert_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one expert's three matrices."""
        return 3 * self.dim_model * self.dim_hidden * dtype.itemsize


SHAPES = {
    "olmoe-1b-7b": ExpertsShape("olmoe", "OlmoeExperts", 64, 8, 2048, 1024),
    "qwen3-30b-a3b": ExpertsShape("qwen3_moe", "Qwen3MoeExperts", 128, 8, 2048, 768),
    "mixtral-8x7b": ExpertsShape("mixtral", "MixtralExperts", 8, 2, 4096, 14336),
    "gpt-oss-20b": ExpertsShape("gpt_oss", "GptOssExperts", 32, 4, 2880, 2880),
}
TOKENS = (1, 16, 64, 256, 2048)
# batched_mm copies an expert for every row; beyond this many bytes it is no contender.
BATCHED_BYTES = 2 << 30
# A peer that takes as many times longer than the quickest peer has one turn only.
FAR = 3
# What holds the libraries of torch to an instruction set, from the start of the process.
OLDER = {
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    },
}
# A call as long as this needs no other to warm up before it.
LONG_S = 4.0
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    arguments = _arguments()
    if arguments.isa:
        _hold_to(arguments.isa)
    moe_runtime.register_with_transformers()
    facts = describe_machine()
    head = commit(Path(__file__).parent.parent)
    print(f"{facts['cpu']}, {facts['num_cores']} cores; torch {versions()['torch']}; commit {head}")
    dtype = DTYPES[arguments.dtype]
    rows: list[dict[str, Any]] = []
    for name in arguments.shapes:
        module = make_experts(SHAPES[name], dtype)
        for passes in arguments.passes:
            for num_tokens in arguments.tokens:
                row = {
                    "shape": name,
                    "pass": passes,
                    "tokens": num_tokens,
                    "dtype": arguments.dtype,
                }
                row |= measure(module, SHAPES[name], num_tokens, passes, arguments)
                rows.append(row)
                print(_line(row), flush=True)
        del module
        gc.collect()
    if arguments.save:
        _save(rows, facts, head, arguments.isa)


def _hold_to(isa: str) -> None:
    """Selects our instruction set, and starts the process anew if torch was not held to it."""
    if any(os.environ.get(name) != value for name, value in OLDER[isa].items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | OLDER[isa])
    require_native().select_isa(isa)


def make_experts(shape: ExpertsShape, dtype: torch.dtype) -> Any:
    """The experts module of a model, with random weights."""
    from transformers import CONFIG_MAPPING
    from transformers.models import gpt_oss, mixtral, olmoe, qwen3_moe

    home = {"mixtral": mixtral, "olmoe": olmoe, "qwen3_moe": qwen3_moe, "gpt_oss": gpt_oss}[
        shape.model_type
    ]
    config_class: Any = CONFIG_MAPPING[shape.model_type]
    config = config_class(
        hidden_size=shape.dim_model,
        intermediate_size=shape.dim_hidden,
        moe_intermediate_size=shape.dim_hidden,
        num_experts=shape.num_experts,
        num_local_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
    )
    module_name = f"modeling_{shape.model_type}"
    with torch.device("meta"):
        module = getattr(getattr(home, module_name), shape.experts_class)(config)
    module = module.to(dtype).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        # One expert is drawn, the others are its rows in another order: drawing all takes minutes.
        pattern = torch.randn(parameter.shape[1:], generator=generator).to(dtype) * 0.02
        for expert in range(len(parameter)):
            parameter.data[expert] = pattern.roll(expert, dims=0)
    return module


def routing(shape: ExpertsShape, num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Uniform top-k ids and normalised gate weights."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, shape.num_experts, generator=generator)
    weights, ids = scores.topk(shape.top_k)
    return ids, weights / weights.sum(-1, keepdim=True)


def measure(
    module: Any, shape: ExpertsShape, num_tokens: int, passes: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Median milliseconds of one call by implementation, and the ratio to the best peer."""
    trains = passes == "forward+backward"
    module.requires_grad_(trains)
    dtype = next(module.parameters()).dtype
    calls = [routing(shape, num_tokens, seed) for seed in range(4)]
    generator = torch.Generator().manual_seed(99)
    x = torch.randn(num_tokens, shape.dim_model, generator=generator).to(dtype)

    def run(index: int) -> None:
        ids, weights = calls[index % len(calls)]
        weights = weights.to(dtype)
        if not trains:
            with torch.no_grad():
                module(x, ids, weights)
            return
        leaf, weights = x.clone().requires_grad_(), weights.requires_grad_()
        module(leaf, ids, weights).backward(x)
        module.zero_grad(set_to_none=True)

    contenders = _contenders(shape, num_tokens, dtype, trains=trains)
    seconds: dict[str, list[float]] = {name: [] for name in (OURS, *contenders)}
    for _ in range(arguments.rounds):
        for name, values in seconds.items():
            is_peer = name != OURS and bool(values) and not arguments.all_peers
            if is_peer and values[0] > FAR * min(seconds[peer][0] for peer in contenders):
                continue
            module.config._experts_implementation_internal = name
            values.append(_time_block(run, arguments.block_s))
    medians = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    best = min(contenders, key=medians.__getitem__)
    ratios = [b / a for a, b in zip(seconds[OURS], seconds[best], strict=True)]
    return {
        "rounds": arguments.rounds,
        "ms": medians,
        "ratio": medians[best] / medians[OURS],
        "ratios": ratios,
    }


def _contenders(
    shape: ExpertsShape, num_tokens: int, dtype: torch.dtype, *, trains: bool
) -> list[str]:
    """The peers that have room: batched_mm copies an expert for every row, and its gradient."""
    copied = num_tokens * shape.top_k * shape.expert_bytes(dtype) * (2 if trains else 1)
    # Eager's backward on many experts takes a minute.
    no_room = {"batched_mm"} if copied > BATCHED_BYTES else set()
    slow = {"eager"} if trains and shape.num_experts > 8 else set()
    return [name for name in PEERS if name not in no_room | slow]


def _time_block(run: Callable[[int], None], block_s: float) -> float:
    """Seconds of one call: one call untimed, then as many as fit into the block, at least one."""
    start = time.perf_counter()
    run(0)
    first_s = time.perf_counter() - start
    if first_s > LONG_S:
        return first_s
    count = max(1, min(200, math.ceil(block_s / first_s) - 1))
    samples = []
    for index in range(count):
        start = time.perf_counter()
        run(index + 1)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _line(row: dict[str, Any]) -> str:
    times = "  ".join(f"{name} {value:9.2f}" for name, value in row["ms"].items())
    return (
        f"{row['shape']:>14} {row['dtype']} {row['pass']:>16} T={row['tokens']:<5} {times} ms"
        f"  {row['ratio']:5.2f}x"
    )


def _save(rows: list[dict[str, Any]], facts: dict[str, object], head: str, isa: str | None) -> None:
    """Adds the rows to this machine's results; rows of the same case are replaced."""
    path = RESULTS / f"experts-{f'{isa}-' if isa else ''}{machine_name(facts)}.json"
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {_case(row) for row in rows}
    rows = [row for row in kept if _case(row) not in new] + [row | {"commit": head} for row in rows]
    rows.sort(key=lambda row: (row["shape"], row["dtype"], row["pass"], row["tokens"]))
    command = f"python benchmarks/experts.py{f' --isa {isa}' if isa else ''} --save"
    report = {"command": command, "machine": facts, "versions": versions(), "rows": rows}
    write_text(path, json.dumps(report, indent=1) + "\n")
    print(f"written to {path.name}")


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["shape"], row["dtype"], row["pass"], row["tokens"]


def _arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    passes = ("forward", "forward+backward")
    parser.add_argument("--passes", nargs="+", choices=passes, default=list(passes))
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every implementation")
    parser.add_argument("--block-s", type=float, default=0.5, help="seconds of one turn")
    parser.add_argument(
        "--all-peers", action="store_true", help="as many turns for peers that are far behind"
    )
    parser.add_argument("--isa", choices=OLDER, help="the instructions of an older processor")
    parser.add_argument("--save", action="store_true", help="add to this machine's results file")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
