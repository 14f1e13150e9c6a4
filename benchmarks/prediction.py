"""How well experts can be predicted: `python benchmarks/prediction.py [TRACE ...]`.

Without a trace the bundled pocket model reads held-out documents and its routing is recorded.
Whole sequences, repeated ones left out, are split into training and test. For every predictor:
recall@K and @2K and gate mass @2K by look-ahead distance, calibration, seconds of a call. The
control row knows the answer: where it does not read 100 % the measurement is wrong, and nothing is
written. Several traces must be of one model.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from harness.machine import commit, describe_machine, machine_name, versions

from moe_runtime.files import write_text
from moe_runtime.lab.replay.evaluation import Evaluation, evaluate
from moe_runtime.lab.traces.readers import read_any_trace
from moe_runtime.lab.traces.routes import join_routes, routes_of, split_sequences, without_repeats
from moe_runtime.policies.prediction import PREDICTORS, Routes, make_estimator

DOCUMENT_TOKENS = 128


def main() -> None:
    arguments = _arguments()
    names = arguments.predictors or [
        name for name, kind in PREDICTORS.items() if not kind.needs_hidden
    ]
    subject, routes = read_routes(arguments)
    unique = without_repeats(routes)
    train, test = split_sequences(unique, test_share=0.5, seed=arguments.seed)
    print(f"{subject}: {train.num_sequences} sequences to train, {test.num_sequences} to test")
    estimators = []
    for name in names:
        print(f"  training {name}", flush=True)
        estimators.append(make_estimator(name, train.shape))
        estimators[-1].fit(train)
    results = evaluate(
        estimators,
        test,
        distances=arguments.distances,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
    )
    check_control(results[0])
    _print(results)
    if arguments.out:
        facts = describe_machine()
        report = {
            "subject": "recall of predictors on held-out sequences",
            "machine": facts,
            "versions": versions(),
            "commit": commit(Path(__file__).resolve().parents[1]),
            "trace": subject,
            "layers": routes.shape.num_layers,
            "experts": routes.shape.num_experts,
            "top_k": routes.shape.top_k,
            "sequences": routes.num_sequences,
            "repeated_sequences": routes.num_sequences - unique.num_sequences,
            "training_sequences": train.num_sequences,
            "training_tokens": train.num_tokens,
            "test_sequences": test.num_sequences,
            "seed": arguments.seed,
            "results": [as_json(result) for result in results],
        }
        out = arguments.out
        path = out / f"prediction-{machine_name(facts)}.json" if out.is_dir() else out
        write_text(path, json.dumps(report, indent=1) + "\n")
        print(f"written to {path}")


def read_routes(arguments: argparse.Namespace) -> tuple[str, Routes]:
    """The sequences to learn from and to test on, and what they are called."""
    if arguments.traces:
        traces = [read_any_trace(p, num_experts=arguments.num_experts) for p in arguments.traces]
        return ", ".join(p.name for p in arguments.traces), join_routes(
            list(map(routes_of, traces))
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pocket.npz"
        record_pocket(path, arguments.documents)
        return "pocket model, held-out documents", routes_of(read_any_trace(path))


def record_pocket(path: Path, num_documents: int) -> None:
    """Lets the bundled model read the beginnings of documents that it was not trained on."""
    import torch
    from transformers import AutoTokenizer

    import moe_runtime
    from moe_runtime.models.pocket import pocket_path
    from moe_runtime.models.pocket.corpus import gather

    tokenizer = AutoTokenizer.from_pretrained(pocket_path())
    model = moe_runtime.load(pocket_path(), device="cpu", trace=path, max_tokens=DOCUMENT_TOKENS)
    moe: Any = model.moe
    with moe, torch.inference_mode():
        read = 0
        for document in gather():
            if read == num_documents or not document.held_out:
                continue
            ids = tokenizer(document.text, return_tensors="pt")["input_ids"][:, :DOCUMENT_TOKENS]
            if ids.shape[1] == DOCUMENT_TOKENS:
                model(input_ids=ids)
                read += 1


def check_control(control: Evaluation) -> None:
    """Holds the measurement against the answer.

    Raises:
        SystemExit: what is there was not all found.
    """
    if any(recall.mean_at_k != 1.0 for recall in control.recalls):
        raise SystemExit(f"the control row must read 100 %, got {control.recalls}")


def as_json(result: Evaluation) -> dict[str, Any]:
    """One predictor's numbers."""
    return {
        "predictor": result.name,
        "tokens": result.num_tokens,
        "call_us": round(1e6 * result.call_s, 1),
        "calibration_error": round(result.calibration_error, 5),
        "calibration": [[round(p, 4), round(q, 4), n] for p, q, n in result.calibration],
        "by_distance": [
            {
                "distance": recall.distance,
                "recall_at_k": round(recall.mean_at_k, 4),
                "recall_at_2k": round(recall.mean_at_2k, 4),
                "gate_mass_at_2k": round(recall.mean_mass_at_2k, 4),
                "recall_at_2k_by_layer": [
                    None if math.isnan(value) else round(value, 4)
                    for value in recall.at_2k.tolist()
                ],
            }
            for recall in result.recalls
        ],
    }


def _print(results: list[Evaluation]) -> None:
    header = ("ahead", "@K", "@2K", "mass", "calibr.", "us")
    widths = (6, 7, 7, 7, 8, 7)
    columns = " ".join(f"{name:>{width}}" for name, width in zip(header, widths, strict=True))
    print(f"\n{'predictor':>16} {columns}")
    for result in results:
        for recall in result.recalls:
            print(
                f"{result.name:>16} {recall.distance:>6} {recall.mean_at_k:>7.1%} "
                f"{recall.mean_at_2k:>7.1%} {recall.mean_mass_at_2k:>7.1%} "
                f"{result.calibration_error:>8.4f} {1e6 * result.call_s:>7.0f}"
            )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, nargs="*", help="traces that `replay` reads")
    parser.add_argument("--predictors", nargs="+", choices=sorted(PREDICTORS), metavar="NAME")
    parser.add_argument("--distances", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--documents", type=int, default=96, help="documents of the pocket model")
    parser.add_argument("--max-tokens", type=int, default=3000, help="tokens that are judged")
    parser.add_argument("--num-experts", type=int, help="where a trace does not say")
    parser.add_argument("--seed", type=int, default=0, help="of the split")
    parser.add_argument("--out", type=Path, help="folder or file for the results as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
