"""``moe-runtime predictor``: train predictors from traces, and measure them honestly."""

import inspect
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.cli import console, options
from moe_runtime.cli.prompts import read_text
from moe_runtime.cli.strict import StrictCommand, argument, expanded, refuse_given
from moe_runtime.config import nearest
from moe_runtime.lazy import is_code_file

if TYPE_CHECKING:
    import numpy as np

    from moe_runtime.policies.prediction import Estimator, Routes
    from moe_runtime.types import ModelSignature

Traces = Annotated[
    list[Path] | None, argument("Recorded traces of one model (.npz).", metavar="[TRACE...]")
]


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """Which predictors are measured, and on what.

    Args:
        predictor: Predictor to measure. Repeatable; all when omitted.
        test_share: Share of the sequences kept from training.
        seed: Seed of the split into training and test sequences.
        distances: Layers to look ahead, separated by commas.
        max_tokens: Measure a sample of this many tokens.
    """

    predictor: list[str] | None = None
    test_share: Annotated[float, typer.Option(min=0.01, max=0.99)] = 0.5
    seed: options.Natural = 0
    distances: str = "1,2,4"
    max_tokens: options.Count | None = None

    @property
    def ahead(self) -> tuple[int, ...]:
        """Layers to look ahead."""
        expected = "positive numbers such as 1,2,4"
        found = options.numbers_of(
            self.distances, "--distances", expected, int, is_sound=lambda layers: layers > 0
        )
        return tuple(found)

    def require_layers(self, ctx: typer.Context, num_layers: int) -> None:
        """Refuses given distances beyond the last layer."""
        source = ctx.get_parameter_source("distances")
        is_given = source is not None and source.name == "COMMANDLINE"
        if is_given and max(self.ahead) >= num_layers:
            raise ValueError(
                f"--distances must be below {num_layers}, the layers with experts, got "
                f"{max(self.ahead)}"
            )


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Data for training predictors: recorded traces, or a text that a model reads.

    Args:
        model: Instead of traces: a checkpoint that reads --text.
        text: Text that the model reads, to record its hidden states.
    """

    traces: Traces = None
    model: str | None = None
    text: Path | None = None
    host_memory: options.HostMemory = "auto"

    def read(self, ctx: typer.Context, names: list[str]) -> "Sequences":
        """Reads the data for the named predictors."""
        if (self.model is None) != (self.text is None):
            raise ValueError("--model and --text belong together: the model reads the text")
        if bool(self.traces) == (self.model is not None):
            raise ValueError("give either traces, or --model MODEL with --text FILE")
        for name in names:
            check_trainable(name, from_text=self.model is not None)
        if self.model is None or self.text is None:
            why = "is for the model that reads --text; give --model too"
            refuse_given(ctx, ("host_memory",), why)
            routes, signature = read_sequences(self.traces or [])
            return Sequences(routes=routes, signature=signature)
        return _read_text(ctx.obj, self.model, self.text, self.host_memory)


def predictor_app() -> typer.Typer:
    """The group of commands."""
    app = typer.Typer(
        help="Train and measure predictors of the next experts.", no_args_is_help=True
    )
    app.command("list", cls=StrictCommand)(expanded(show))
    app.command(cls=StrictCommand)(expanded(fit))
    app.command(cls=StrictCommand)(expanded(evaluate))
    app.command(cls=StrictCommand)(expanded(teach))
    return app


def show(as_json: options.Json = False) -> None:
    """List the predictors and the data that they use."""
    from moe_runtime.policies.prediction import PREDICTORS

    about = {
        name: inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
        for name, kind in PREDICTORS.items()
    }
    facts = {"predictors": about} if as_json else about
    console.print_facts("predictors", facts, as_json=as_json)


def fit(
    ctx: typer.Context,
    *,
    output: options.Output,
    sources: Sources,
    predictor: str = "combined",
    as_json: options.Json = False,
) -> None:
    """Train a predictor on all sequences of traces, for `run --predictor FILE`.

    With --model and --text instead of traces the model reads the text, so that hidden-lookahead,
    which uses hidden states, can be trained too.

    Args:
        output: File to write (.npz).
        predictor: Which predictor; `predictor list` shows them.
    """
    from moe_runtime.lab.traces.learned import write_predictor

    if is_code_file(predictor):
        raise ValueError(f"--predictor {predictor}: a predictor of your own code has no file")
    if output.suffix != ".npz":
        raise ValueError(
            f"--output {output}: expected a name that ends in .npz, by which `run --predictor` "
            "tells a file from a predictor's name"
        )
    read = sources.read(ctx, [predictor])
    routes = read.routes
    estimator = read.trained(predictor, list(range(routes.num_sequences)))
    write_predictor(output, estimator, read.signature)
    facts: dict[str, Any] = {
        "predictor": predictor,
        "file": str(output),
        "file_bytes": output.stat().st_size,
        "tokens": routes.num_tokens,
        "sequences": routes.num_sequences,
    }
    console.print_facts("trained", facts, as_json=as_json)


def evaluate(
    ctx: typer.Context,
    *,
    sources: Sources,
    measuring: Measuring,
    as_json: options.Json = False,
) -> None:
    """Measure predictors on sequences held out from their training, without repeated prompts.

    recall@K and @2K are the shares of the visited experts among the K or 2K most likely. The
    control knows the answer: if it is below 100 %, the measurement is wrong. With --model and
    --text instead of traces, predictors that use hidden states are measured too.
    """
    from moe_runtime.lab.replay.evaluation import evaluate as measure
    from moe_runtime.lab.traces.routes import split_unrepeated
    from moe_runtime.policies.prediction import PREDICTORS, EamCollection

    names = list(dict.fromkeys(measuring.predictor or ())) or [
        name for name, kind in PREDICTORS.items() if sources.model or not kind.needs_hidden
    ]
    ahead, seed = measuring.ahead, measuring.seed
    read = sources.read(ctx, names)
    routes = read.routes
    measuring.require_layers(ctx, routes.shape.num_layers)
    windows, held_out = split_unrepeated(routes, test_share=measuring.test_share, seed=seed)
    test, hidden = read.part(held_out)
    estimators = [read.trained(name, windows) for name in names]
    sample = {"max_tokens": measuring.max_tokens, "seed": seed}
    results = measure(estimators, test, distances=ahead, hidden_TLD=hidden, **sample)
    facts: dict[str, Any] = {
        "sequences": routes.num_sequences,
        "repeated_sequences": routes.num_sequences - len(windows) - len(held_out),
        "training_sequences": len(windows),
        "test_sequences": test.num_sequences,
    }
    for matched in (one for one in estimators if isinstance(one, EamCollection)):
        facts.setdefault("eam_coverage", matched.coverage(test))
    if as_json:
        shown = [
            {
                "predictor": one.name,
                "tokens": one.num_tokens,
                "call_s": one.call_s,
                "calibration_error": _finite(one.calibration_error),
                "calibration": [list(row) for row in one.calibration],
                "recalls": [_recall_json(recall) for recall in one.recalls],
            }
            for one in results
        ]
        console.print_json({**facts, "results": shown})
        return
    console.print_rows("data", [(k, f"{value:g}") for k, value in facts.items()], to_stderr=False)
    numbers = ("layers ahead", "@K", "@2K", "gate mass @2K", "calibr. error", "us per call")
    header = [("predictor", "left"), *((number, "right") for number in numbers)]
    rows = [
        (
            result.name,
            str(recall.distance),
            _shown(recall.mean_at_k, 3),
            _shown(recall.mean_at_2k, 3),
            _shown(recall.mean_mass_at_2k, 3),
            _shown(result.calibration_error, 4),
            f"{1e6 * result.call_s:.0f}",
        )
        for result in results
        for recall in result.recalls
    ]
    console.print_table("recall on held-out sequences", header, rows)


def teach(
    ctx: typer.Context, model: options.Model, traces: Traces = None, as_json: options.Json = False
) -> None:
    """Train the policy reuse, and a predictor for prefetching, on a model's routing.

    Without traces it learns from the routing that runs of the model kept. It is compared with reuse
    without a network on the latest fifth, which it does not learn from. If it misses less, later
    runs with `--policy reuse` begin with it.
    """
    import numpy as np

    from moe_runtime.inference.inspection import inspect_checkpoint
    from moe_runtime.lab.replay.teaching import teach_reuse
    from moe_runtime.lab.traces.format import join_traces
    from moe_runtime.lab.traces.readers import read_trace_of
    from moe_runtime.lab.traces.recent import read_recent

    console.quiet_transformers(ctx.obj)
    summary = inspect_checkpoint(model)
    recorded, num_requests = [], 0
    for path in traces or ():
        trace = read_trace_of(path, summary.signature, model)
        requests = trace.token_request + np.int32(num_requests)
        num_requests = int(requests.max(initial=0)) + 1
        recorded.append(replace(trace, token_request=requests, signature=summary.signature))
    if not traces:
        recent = read_recent(summary.signature, summary.path)
        if recent is None:
            raise ValueError(
                f"no routing of {model} was kept yet: run it with `--policy auto`, or give traces "
                "of `run --trace`"
            )
        recorded = [recent]
    with console.loading_bar() as progress:
        lesson = teach_reuse(join_traces(recorded), summary.path, lambda what: progress(what, 0, 0))
    counted = zip(("lru", "reuse", "taught"), lesson.lesson.misses.tolist(), strict=True)
    facts = {
        "tokens": lesson.tokens,
        "held_out_tokens": lesson.held_out_tokens,
        "capacities": lesson.lesson.capacities.tolist(),
        **{f"{name}_misses": misses for name, misses in counted},
        "policy_s": lesson.lesson.policy_s,
        "recall": lesson.lesson.recall,
        "file": None if lesson.kept is None else str(lesson.kept),
    }
    if not as_json and lesson.kept is None:
        facts["file"] = "none: it would miss no less than without"
    console.print_facts("taught", facts, as_json=as_json)


def check_trainable(name: str, *, from_text: bool = False) -> str:
    """The name of a predictor that can be trained on traces, or with a model and a text."""
    from moe_runtime.policies.prediction import PREDICTORS

    if name not in PREDICTORS:
        raise ValueError(f"--predictor: unknown predictor {name!r}: {nearest(name, PREDICTORS)}")
    if PREDICTORS[name].needs_hidden and not from_text:
        raise ValueError(
            f"--predictor {name} looks at hidden states, which traces do not hold; `moe-runtime "
            "predictor` takes --model and --text instead"
        )
    return name


def read_sequences(paths: list[Path]) -> "tuple[Routes, ModelSignature]":
    """The sequences of traces of one model, and the model."""
    from moe_runtime.lab.traces.readers import read_any_trace, read_trace_of
    from moe_runtime.lab.traces.routes import join_routes, routes_of

    first = read_any_trace(paths[0])
    first.require_choices(paths[0])
    others = [read_trace_of(path, first.signature, str(paths[0])) for path in paths[1:]]
    return join_routes([routes_of(trace) for trace in (first, *others)]), first.signature


def _recall_json(recall: Any) -> dict[str, Any]:
    names = ("at_k", "at_2k", "mass_at_2k")
    means = {f"mean_{name}": _finite(getattr(recall, f"mean_{name}")) for name in names}
    by_layer = {name: [*map(_finite, getattr(recall, name).tolist())] for name in names}
    return {"distance": recall.distance, **means, **by_layer}


def _finite(value: float) -> float | None:
    """The value for JSON: None for a mean of no values."""
    return value if math.isfinite(value) else None


def _shown(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


WINDOW_TOKENS = 128
"""Tokens of a sequence; the text is cut into such windows, and the rest is not read."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """Recorded routing of one model, with hidden states if the model read a text."""

    signature: "ModelSignature"
    routes: "Routes"
    model: Any = None
    hidden_TLD: "np.ndarray | None" = None

    def part(self, numbers: list[int]) -> "tuple[Routes, np.ndarray | None]":
        """Some of the sequences, with their hidden states."""
        import numpy as np

        routes = self.routes.select(numbers)
        if self.hidden_TLD is None:
            return routes, None
        rows = [np.arange(*self.routes.tokens_of(one).indices(10**9)[:2]) for one in numbers]
        return routes, self.hidden_TLD[np.concatenate(rows)]

    def trained(self, name: str, numbers: list[int]) -> "Estimator":
        """The named predictor, trained on some of the sequences."""
        from moe_runtime.policies.prediction import HiddenLookahead, NextGate, make_estimator

        routes, hidden = self.part(numbers)
        if hidden is not None and name in (HiddenLookahead.name, NextGate.name):
            from moe_runtime.inference.prediction import fit_lookahead, next_gate

            if name == NextGate.name:
                return next_gate(self.model, routes.shape)
            return fit_lookahead(self.model, routes, hidden)
        estimator = make_estimator(name, routes.shape)
        estimator.fit(routes)
        return estimator


def _read_text(session: console.Session, model: str, text: Path, host_memory: str) -> Sequences:
    """Records the routing of a model that reads a text file window by window."""
    words = read_text(text)
    console.quiet_transformers(session)
    from moe_runtime.checkpoints.opening import find_checkpoint, load_tokenizer

    tokenizer = load_tokenizer(find_checkpoint(model, weights=False))
    ids = tokenizer(words)["input_ids"]
    windows = [ids[at : at + WINDOW_TOKENS] for at in range(0, len(ids), WINDOW_TOKENS)]
    windows = [window for window in windows if len(window) == WINDOW_TOKENS]
    if len(windows) < 2:
        raise ValueError(
            f"{text}: has {len(ids)} tokens, expected at least {2 * WINDOW_TOKENS} to learn from"
        )
    import moe_runtime
    from moe_runtime.inference.prediction import record_hidden

    with console.loading_bar() as progress:
        loaded: Any = moe_runtime.load(
            model, host_memory=host_memory, max_tokens=WINDOW_TOKENS, progress=progress
        )
        with loaded.moe:
            routes, hidden = record_hidden(
                loaded, windows, progress=lambda n: progress(f"window {n} of {len(windows)}", 0, 0)
            )
    return Sequences(
        model=loaded, signature=loaded.moe.facts.signature, routes=routes, hidden_TLD=hidden
    )
