"""What policies gain by what they are told: `python benchmarks/told_policies.py`.

The pocket model answers prompts from many documents, and its routing is recorded. Two questions are
asked of the recording. What is learning worth, beside LRU, which learns nothing: a learner that
watched half of the requests hands over what it keeps, and a new one serves the other half with it
and without. Requests about one module come one after another. What are costs worth: every third
layer's experts are taken to be larger, and policies over one pool of slots are told so or not.
`--trace FILE` asks about another recording, `--out` writes it all down.
"""

from __future__ import annotations

import argparse
import inspect
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from harness.decoded_traces import decoded
from harness.machine import commit, describe_machine, machine_name, versions

import moe_runtime
from moe_runtime.files import write_text
from moe_runtime.lab.replay.untimed import replay_demand
from moe_runtime.lab.traces.format import Trace
from moe_runtime.lab.traces.readers import read_any_trace
from moe_runtime.lab.traces.routes import routes_of, split_sequences, without_repeats
from moe_runtime.lab.traces.workload import Workload, workload_of
from moe_runtime.models.pocket import pocket_path
from moe_runtime.policies.eviction import LayerShares, Setting, make_global_policy, make_policy
from moe_runtime.policies.prediction import TrackedPredictor, make_estimator
from moe_runtime.policies.prediction.base import Learner, shape_of
from moe_runtime.types import ExpertKey

LEARNERS = ("activation-aware", "reuse", "predicted")
NUM_REQUESTS = 240
PROMPT_TOKENS = 24
NEW_TOKENS = 24


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.trace or record(Path(folder) / "trace.npz")
        trace = read_any_trace(path)
    train, test = split_sequences(without_repeats(routes_of(trace)), test_share=0.5, seed=0)
    first = workload_of(decoded(train, train.num_tokens))
    second = workload_of(decoded(test, arguments.tokens))
    kept_rows: list[dict[str, Any]] = []
    cost_rows = costs(second, arguments.capacities, arguments.ratios)
    for row in cost_rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    for name in LEARNERS:
        for row in kept_start(name, first, second, arguments.capacities[0]):
            kept_rows.append(row)
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if arguments.out:
        write(arguments, trace, [train.num_sequences, test.num_sequences], kept_rows, cost_rows)


def record(path: Path, texts: Sequence[str] | None = None) -> Path:
    """Routing of the pocket model over texts, the documentation of Python's own modules if none."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pocket_path())
    model: Any = moe_runtime.load(
        pocket_path(), device="cpu", host_memory="64MiB", max_tokens=256, trace=path
    )
    torch.manual_seed(0)
    with model.moe:
        for text in documents() if texts is None else texts:
            prompt = tokenizer(text, return_tensors="pt").input_ids[:, :PROMPT_TOKENS]
            model.generate(
                prompt, max_new_tokens=NEW_TOKENS, do_sample=True, pad_token_id=0, temperature=0.8
            )
    return path


def documents(pattern: str = "*.py", most: int = NUM_REQUESTS) -> list[str]:
    """Docstrings and second halves of sources, of as many modules as there are requests.

    Args:
        pattern: of the modules' files in the standard library.
        most: texts.
    """
    import ast
    import sysconfig

    found: list[str] = []
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.glob(pattern)):
        if {"site-packages", "test", "tests"} & {*path.relative_to(library).parts}:
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        text = ast.get_docstring(ast.parse(source)) or ""
        if len(text) > 200:
            found.append(inspect.cleandoc(text))
            found.append(source[len(source) // 2 :])
        if len(found) >= most:
            break
    return found[:most]


def kept_start(
    name: str, first: Workload, second: Workload, capacity: float
) -> Iterator[dict[str, Any]]:
    """Hit rates on the second half of the requests, with what the first half taught and without.

    Served by one process, and by a process for each request.
    """
    signature = second.trace.signature
    num_slots = round(capacity * signature.num_layers * signature.num_experts)
    shape = shape_of(signature)

    def lru() -> LayerShares:
        return make_policy("lru", num_slots=num_slots, setting=Setting(shape=shape))

    def make(state: Any = None) -> LayerShares:
        predictor = TrackedPredictor(make_estimator("eam", shape)) if name == "predicted" else None
        setting = Setting(shape=shape, predictor=predictor)
        made = make_policy(name, num_slots=num_slots, setting=setting)
        if state:
            learner_of(made).restore(state)
        return made

    teacher = make()
    replay_demand(first, lambda _: teacher, num_slots)
    state = {key: array.copy() for key, array in learner_of(teacher).learned().items()}
    for resets in (False, True):
        plain = replay_demand(second, lambda _: lru(), num_slots, reset_per_sequence=resets)
        cold = replay_demand(second, lambda _: make(), num_slots, reset_per_sequence=resets)
        kept = replay_demand(second, lambda _: make(state), num_slots, reset_per_sequence=resets)
        yield {
            "policy": "predicted by eam" if name == "predicted" else name,
            "capacity": capacity,
            "processes": len(second.sequence_starts) if resets else 1,
            "lru_hit_rate": round(plain.hit_rate, 4),
            "cold_hit_rate": round(cold.hit_rate, 4),
            "kept_hit_rate": round(kept.hit_rate, 4),
        }


def learner_of(policy: LayerShares) -> Learner:
    """What of a policy learns."""
    (learner,) = policy.watchers
    assert isinstance(learner, Learner)
    return learner


def costs(
    workload: Workload, capacities: Sequence[float], ratios: Sequence[float]
) -> list[dict[str, Any]]:
    """Bytes read, over LRU's, by one pool over layers of which every third has larger experts."""
    signature = workload.trace.signature
    rows: list[dict[str, Any]] = []
    for ratio in ratios:
        sizes = {
            ExpertKey(layer, expert): round(1000 * (ratio if layer % 3 == 0 else 1.0))
            for layer in range(signature.num_layers)
            for expert in range(signature.num_experts)
        }
        for capacity in capacities:
            read = {
                name: bytes_read(workload, name.removesuffix(" told"), sizes, capacity, name)
                for name in ("lru", "lfu", "gdsf", "gdsf told", "lec", "lec told")
            }
            shares = {name: round(value / read["lru"], 4) for name, value in read.items()}
            rows.append({"size_ratio": ratio, "capacity": capacity, **shares})
    return rows


def bytes_read(
    workload: Workload, policy: str, sizes: dict[ExpertKey, int], capacity: float, name: str
) -> int:
    """What one pool of slots reads; the policy is told the sizes if its row's name says so."""
    setting = Setting(
        shape=shape_of(workload.trace.signature), costs=sizes if name != policy else None
    )
    found = replay_demand(
        workload,
        lambda _: make_global_policy(policy, setting=setting),
        round(capacity * len(sizes)),
        sizes=sizes,
    )
    assert found.loaded_bytes is not None
    return found.loaded_bytes


def write(
    arguments: argparse.Namespace,
    trace: Trace,
    requests: list[int],
    kept_rows: list[dict[str, Any]],
    cost_rows: list[dict[str, Any]],
) -> None:
    """Writes the rows with machine, versions and commit."""
    facts = describe_machine()
    result = {
        "subject": "policies told what earlier processes learned, and what a miss reads",
        "machine": facts,
        "versions": versions(),
        "commit": commit(Path(__file__).resolve().parents[1]),
        "trace": arguments.trace.name if arguments.trace else "pocket, recorded by this script",
        "layers": trace.signature.num_layers,
        "experts": trace.signature.num_experts,
        "top_k": trace.signature.top_k,
        "requests_learned_from_and_served": requests,
        "kept_start": kept_rows,
        "bytes_read_over_lru": cost_rows,
    }
    out = arguments.out
    path = out / f"told-policies-{machine_name(facts)}.json" if out.is_dir() else out
    write_text(path, json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="a trace that `moe-runtime replay` reads")
    parser.add_argument("--tokens", type=int, default=6000, help="tokens that are served, about")
    parser.add_argument("--capacities", nargs="+", type=float, default=[0.25, 0.5])
    parser.add_argument("--ratios", nargs="+", type=float, default=[1.0, 3.0, 10.0])
    parser.add_argument("--out", type=Path, help="folder or file for the results as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
