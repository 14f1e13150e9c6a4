"""``bench quality``: the price of a lossy option or format in perplexity and divergence."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import typer

from moe_runtime.benchmarks.commands.shared import QuickRun, say_repetition
from moe_runtime.cli import options
from moe_runtime.cli.console import fetch_model, quiet_transformers
from moe_runtime.cli.prompts import read_text
from moe_runtime.config import require_known
from moe_runtime.digests import digest

_QUICK_CHUNKS = 3
_SHARED = frozenset(
    ("host_memory", "device_memory", "policy", "shares", "cache_code", "prefetch", "predictor")
) | {"device", "dtype"}
"""Lossless options, which the reference shares with all systems."""
_EVERYWHERE = _SHARED | {"activations"}
"""Options that affect prompts and decode steps alike."""


@dataclass(frozen=True, kw_only=True)
class QualityLoading(options.Loading):
    """How models are loaded; prefetching and learning are off by default."""

    policy: options.Policy = "lru"
    prefetch: options.Prefetch = "off"

    __doc__ = options.Loading.__doc__


def bench_quality(
    run: QuickRun,
    models: Annotated[list[str], typer.Argument(metavar="MODEL...")],
    text: Path,
    loading: QualityLoading,
    reference: Annotated[str | None, typer.Option(metavar="MODEL")] = None,
    vary: Annotated[list[str] | None, typer.Option(metavar="OPTION=VALUE[,VALUE...]")] = None,
    context: Annotated[int, typer.Option(min=16, max=1 << 20)] = 512,
    chunks: options.Count | None = None,
    steps: bool = False,
    config: options.Config = None,
) -> None:
    """Measure perplexity on a text, and the price of lossy options and formats.

    The text is split into chunks, as by llama-perplexity. Every chunk starts with the BOS token, if
    the model has one, and the tokens of its second half count. Lossy options are compared with the
    same model without them: ratio of perplexities, KL divergence, share of equal top tokens, speed.
    ± is half of a 95 % confidence interval. Ctrl-C shows what was measured so far.

    Args:
        models: Folders of safetensors checkpoints, GGUF files, or names on the hub.
        text: UTF-8 text that the models predict; - reads standard input.
        reference: Model to compare with, for instance before quantisation; the first MODEL when
            omitted. It runs without lossy options.
        vary: Also measure every MODEL with each of these values of an option, as in
            activations=int8; repeatable.
        context: Tokens of a chunk.
        chunks: Chunks to read; the whole text when omitted.
        steps: Read the counted half token by token, as in decoding. This is the default if an
            option differs that affects only decoding.
    """
    asked = systems_of(run.ctx, models, reference, loading, vary or ())
    _, _, lossless = asked[0]
    words = read_text(text)
    if not words:
        raise ValueError(f"{text}: is empty, expected a text that the models predict")
    quiet_transformers(run.session)
    from moe_runtime.benchmarks.cases.quality import QualityPlan, cut_text, measure_quality
    from moe_runtime.benchmarks.suite import Rules

    asked = [(name, str(fetch_model(model)), given) for name, model, given in asked]
    cut, vocab_size = cut_text(words, [*dict.fromkeys(path for _, path, _ in asked)], context)
    cut = cut[: chunks or (_QUICK_CHUNKS if run.quick else None)]
    is_stepwise = steps or any(
        given[name] != lossless[name] for *_, given in asked for name in given.keys() - _EVERYWHERE
    )
    settings = {
        **{"model": asked[0][0], "text": text.name, "text_digest": digest(words.encode())},
        **{"chunks": len(cut), "context": context, "steps": is_stepwise},
        **{name: lossless[name] for name in sorted(_SHARED - {"device"})},
    }
    with run.stopping() as stop, TemporaryFile() as kept:
        plan = QualityPlan(
            chunks=cut,
            vocab_size=vocab_size,
            is_stepwise=is_stepwise,
            is_stopping=lambda: stop.is_set,
            kept=kept,
        )
        rules = Rules(judged=(), on_repetition=say_repetition, is_stopping=plan.is_stopping)
        results = measure_quality(plan, asked, rules, settings)
    run.end(results)


def systems_of(
    ctx: typer.Context,
    models: Sequence[str],
    reference: str | None,
    loading: options.Loading,
    vary: Sequence[str],
) -> list[tuple[str, str, dict[str, Any]]]:
    """Every model with every variant, the reference first."""
    lossy = {
        one.name: one.default for one in dataclasses.fields(loading) if one.name not in _SHARED
    }
    first = (reference or models[0], dataclasses.replace(loading, **lossy))
    variants = [loading, *(one for words in vary for one in _changed(ctx, words, loading))]
    asked = [one for one in product(models, variants) if one != first]
    if reference is not None and not asked:
        raise ValueError(
            f"--reference {reference}: is MODEL, and no option differs; give another model, or an "
            "option that loses something"
        )
    common, found = first[1].settings(), dict[str, tuple[str, str, dict[str, Any]]]()
    for model, chosen in (first, *asked):
        given = chosen.settings()
        changes = [f"{n.replace('_', '-')}={v}" for n, v in given.items() if v != common[n]]
        name = ", ".join([Path(model).name, *changes])
        if name in found:
            raise ValueError(f"{name}: two are called so; leave out a MODEL or a value of --vary")
        found[name] = (name, model, given)
    return [*found.values()]


def _changed(ctx: typer.Context, words: str, loading: options.Loading) -> Iterator[options.Loading]:
    """The variants of one ``--vary``."""
    key, _, values = words.partition("=")
    name = key.strip().replace("-", "_")
    require_known("option to vary", name, [one.name for one in dataclasses.fields(loading)])
    [param] = [one for one in ctx.command.params if one.name == name]
    for value in values.split(","):
        changed = dataclasses.replace(loading, **{name: param.process_value(ctx, value)})
        if changed == loading:
            raise ValueError(f"--vary {key}={value}: is the value anyway; leave it out")
        yield changed
