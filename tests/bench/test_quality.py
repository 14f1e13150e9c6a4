"""`bench quality`: perplexity and divergence are those of transformers' logits, by the formulas."""

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from bench_commands import POCKET
from fixture_types import Capsys, Patch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_runtime.benchmarks.cases import quality
from moe_runtime.benchmarks.cases.quality import QualityPlan, cut_text, score_tokens, summarize
from moe_runtime.benchmarks.commands.shared import show_results
from moe_runtime.benchmarks.suite import Rules, read_results
from moe_runtime.cli.main import main
from moe_runtime.errors import CheckpointError

CONTEXT, CHUNKS = 33, 4
WORDS = (
    "The for statement is used to iterate over the elements of a sequence, such as a string, tuple "
    "or list, or other iterable object. The expression list is evaluated once; it should yield an "
    "iterable object. An iterator is created for that iterable. The first item provided by the "
    "iterator is then assigned to the target list using the standard rules for assignments, and "
    "the suite is executed. This repeats for each item provided by the iterator. When the iterator "
    "is exhausted, the suite in the else clause, if present, is executed, and the loop terminates. "
    "A break statement executed in the first suite terminates the loop without executing the rest."
)
Model = Any


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and another model, whose gates and projections are not pocket's."""
    folder = tmp_path_factory.mktemp("quality")
    (folder / "text.txt").write_text(WORDS)
    (folder / "empty.txt").write_text("")
    (folder / "binary").write_bytes(b"one\n\xff\xfe\x00")
    model: Model = AutoModelForCausalLM.from_pretrained(POCKET)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "gate" in name or "o_proj" in name:
            noise = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            weight.data += noise * weight.std() / 4
    model.save_pretrained(folder / "other")
    AutoTokenizer.from_pretrained(POCKET).save_pretrained(folder / "other")
    return folder


@pytest.fixture(autouse=True)
def _in_place(place: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(place)


@pytest.fixture(scope="module")
def chunks() -> list[list[int]]:
    ids = AutoTokenizer.from_pretrained(POCKET)(WORDS)["input_ids"]
    found = [ids[first : first + CONTEXT] for first in range(0, len(ids), CONTEXT)]
    assert len(found) == CHUNKS + 1
    assert len(found[-1]) < CONTEXT
    return found[:-1]


@pytest.fixture(scope="module")
def expected(place: Path, chunks: list[list[int]]) -> dict[str, Any]:
    """Of every judged token, from whole passes of transformers: log-probabilities in float64."""
    first, logs = CONTEXT // 2, []
    for path in (POCKET, place / "other"):
        model: Model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.inference_mode():
            logits = model(torch.tensor(chunks)).logits[:, first:-1].double()
        logs.append((logits - logits.exp().sum(-1, keepdim=True).log()).flatten(0, 1).numpy())
    tokens = np.array([token for ids in chunks for token in ids[first + 1 :]])
    log_p, log_q = logs
    rows = np.arange(len(tokens))
    kl = (np.exp(log_p) * (log_p - log_q)).sum(1)
    return {
        "nll": -log_q[rows, tokens],
        "reference": -log_p[rows, tokens],
        "kl": kl,
        "same": log_p.argmax(1) == log_q.argmax(1),
    }


def measured(capsys: Capsys, *words: str) -> dict[str, dict[str, Any]]:
    """Systems by name."""
    given = ("--text", "text.txt", "--context", str(CONTEXT), "--json")
    assert main(["bench", "quality", *words, *given]) == 0
    results = json.loads(capsys.readouterr().out)
    return {one["system"]: one for one in results["measurements"]}


def half_of(values: Any) -> float:
    """Half of the 95 % interval of a mean, as a textbook has it."""
    count = len(values)
    variance = sum((value - np.mean(values)) ** 2 for value in values) / (count - 1)
    return student(count) * math.sqrt(variance / count)


def student(count: int) -> float:
    """The quantile of a 95 % interval of a mean."""
    from scipy.stats import t  # takes long to import

    return float(t.ppf(0.975, count - 1))


@pytest.mark.parametrize("how", [(), ("--steps",)])
def test_numbers_are_those_of_transformers(how, expected, capsys):
    found = measured(capsys, "other", "--reference", POCKET, "--dtype", "float32", *how)
    assert [*found] == ["pocket", "other"]
    nll, base, kl = expected["nll"], expected["reference"], expected["kl"]
    assert kl.mean() > 0.01  # the two differ
    # in fp32 logits of a few layers differ by far less than 1e-4
    other, pocket = (found[name]["summary"] for name in ("other", "pocket"))
    assert pocket["perplexity"]["mean"] == pytest.approx(math.exp(base.mean()), rel=1e-4)
    perplexity = math.exp(nll.mean())
    assert other["perplexity"]["mean"] == pytest.approx(perplexity, rel=1e-4)
    half = (other["perplexity"]["high"] - other["perplexity"]["low"]) / 2
    assert half == pytest.approx(perplexity * half_of(nll), rel=1e-3)
    # the error of a ratio by the covariance of both means
    covariance = np.cov(nll, base) / len(nll)
    error = math.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    ratio = math.exp(nll.mean() - base.mean())
    assert other["perplexity_ratio"]["mean"] == pytest.approx(ratio, rel=1e-4)
    half = (other["perplexity_ratio"]["high"] - other["perplexity_ratio"]["low"]) / 2
    assert half == pytest.approx(ratio * error * student(len(nll)), rel=1e-3)
    assert other["kl_nats"]["mean"] == pytest.approx(kl.mean(), rel=1e-3, abs=1e-5)
    half = (other["kl_nats"]["high"] - other["kl_nats"]["low"]) / 2
    assert half == pytest.approx(half_of(kl), rel=1e-3)
    assert other["kl_max_nats"]["mean"] == pytest.approx(kl.max(), rel=1e-3)
    assert other["kl_p99_nats"]["mean"] == pytest.approx(np.quantile(kl, 0.99), rel=1e-3)
    assert other["same_top"]["mean"] == expected["same"].mean()
    assert found["other"]["quality"] == {"compared": len(kl), "equal": expected["same"].sum()}
    assert found["pocket"]["quality"] is None
    assert ("decode_tokens_per_s" in other) == bool(how)
    assert len(found["other"]["repetitions"]) == 3  # systems take turns


@pytest.mark.long
def test_repetitions_are_of_their_chunks(expected, capsys):
    """Four chunks in three parts: one, one and two."""
    found = measured(capsys, "other", "--reference", POCKET, "--dtype", "float32")
    per_chunk = expected["kl"].reshape(CHUNKS, -1)
    wanted = [per_chunk[0].mean(), per_chunk[1].mean(), per_chunk[2:].mean()]
    given = [one["kl_nats"] for one in found["other"]["repetitions"]]
    assert given == pytest.approx(wanted, rel=1e-3)
    assert [len(one["read_bytes"]) for one in found["other"]["repetitions"]] == [1, 1, 2]


@pytest.mark.long
def test_a_small_file_of_logits_gives_the_same(monkeypatch, capsys):
    words = ("other", "--reference", POCKET, "--chunks", "4")
    before = measured(capsys, *words)
    monkeypatch.setattr(quality, "_MOST_KEPT", 1)  # a chunk at a time
    after = measured(capsys, *words)
    assert len(after["other"]["repetitions"]) == CHUNKS
    for name in ("perplexity", "kl_nats", "kl_max_nats", "same_top"):
        means = (each["other"]["summary"][name]["mean"] for each in (before, after))
        assert next(means) == pytest.approx(next(means), rel=1e-12)


@pytest.mark.long
def test_what_loses_nothing_differs_in_nothing(capsys):
    """Another budget, policy and code read other bytes and say the same."""
    words = (
        "--host-memory",
        "20MiB",
        "--steps",
        "--chunks",
        "2",
        "--vary",
        "policy=lfu-aging,reuse",
    )
    found = measured(capsys, POCKET, *words, "--vary", "cache-code=planes")
    assert [*found] == [
        *("pocket", "pocket, policy=lfu-aging", "pocket, policy=reuse", "pocket, cache-code=planes")
    ]
    assert found["pocket"]["summary"]["hit_share"]["mean"] < 1
    assert found["pocket"]["summary"]["changed_share"]["mean"] == 0
    perplexity = found["pocket"]["summary"]["perplexity"]["mean"]
    for name in [*found][1:]:
        summary = found[name]["summary"]
        assert summary["perplexity"]["mean"] == perplexity
        assert summary["kl_max_nats"]["mean"] == 0
        assert summary["same_top"]["mean"] == summary["perplexity_ratio"]["mean"] == 1


def test_a_lossy_option_is_compared_with_the_model_without_it(tmp_path, capsys):
    packed, output = str(tmp_path / "int4"), tmp_path / "results.json"
    assert main(["pack", POCKET, packed, "--quantize", "int4", "--json"]) == 0
    capsys.readouterr()
    found = measured(capsys, packed, "--activations", "int8", "-o", str(output))
    assert [*found] == ["int4", "int4, activations=int8"]
    summary = found["int4, activations=int8"]["summary"]
    assert 0 < summary["kl_nats"]["mean"] < 0.1
    assert "decode_tokens_per_s" not in summary  # it acts on prompts, too
    # each option of the list alone, for every model, against one reference
    words = (packed, POCKET, "--reference", POCKET, "--chunks", "1")
    assert [*measured(capsys, *words)] == ["pocket", "int4"]
    assert read_results(output)["ended"] == "most"
    show_results(read_results(output))
    shown = capsys.readouterr().out
    assert "±" in shown
    assert main(["bench", "compare", str(output), str(output)]) == 0
    page = tmp_path / "page.html"
    assert main(["bench", "report", str(output), "-o", str(page)]) == 0
    assert "context 33" in page.read_text()


def test_formulas_by_hand():
    generator = torch.Generator().manual_seed(1)
    logits, reference = (torch.randn(7, 5, generator=generator) * 3 for _ in range(2))
    reference[2, 1] = -math.inf  # no chance there is no divergence
    logits[4, 3] = logits[4, 0] = 9.0
    reference[4, 0] = 20.0
    tokens = torch.tensor([0, 4, 2, 1, 3, 0, 2])
    scores = score_tokens(logits, tokens, reference)
    for row in range(7):
        weights = [[math.exp(value) for value in one[row].tolist()] for one in (reference, logits)]
        p, q = ([weight / math.fsum(own) for weight in own] for own in weights)
        token = int(tokens[row])
        kl = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)
        same = float(p.index(max(p)) == q.index(max(q)))
        wanted = [-math.log(q[token]), -math.log(p[token]), kl, same]
        assert scores[row].tolist() == pytest.approx(wanted, rel=1e-12)
    alone = score_tokens(logits, tokens, None)
    assert alone.tolist() == scores[:, :1].tolist()
    assert summarize(alone).keys() == {"perplexity"}


@pytest.mark.parametrize(("row", "value"), [(3, math.nan), (0, math.inf), (0, -math.inf)])
def test_what_is_not_finite_is_refused(row, value):
    """NaN anywhere; infinite logits where the reference has a chance."""
    logits, reference = torch.zeros(5, 4), torch.zeros(5, 4)
    logits[row, 2] = value
    with pytest.raises(CheckpointError, match="not finite"):
        score_tokens(logits, torch.zeros(5, dtype=torch.long), reference)


def test_every_chunk_begins_as_the_model_begins(place, tmp_path):
    tokenizer: Model = AutoTokenizer.from_pretrained(POCKET)
    plain = tokenizer("Lists are mutable sequences. " * 20)["input_ids"]
    begin = tokenizer.bos_token_id
    template = TemplateProcessing(single="B $A", special_tokens=[("B", begin)])
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((Path(POCKET) / "config.json").read_text())
    words = "Lists are mutable sequences. " * 20
    found, vocab_size = cut_text(words, [str(tmp_path)], 16)
    assert vocab_size == 4096
    assert len(found) == (len(plain) + 1) // 16 > 3
    ids = [begin, *plain]
    assert found == [[begin, *ids[at + 1 : at + 16]] for at in range(0, len(ids) - 15, 16)]
    assert cut_text(words, [POCKET], 16)[0][0] == plain[:16]
    with pytest.raises(ValueError, match="different tokens for this text"):
        cut_text(words, [POCKET, str(tmp_path)], 16)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--context", "300"], "the text has 137 tokens"),
        (["--context", "513"], "--context 513: a text cannot be longer than the 512 positions"),
        (["--text", "empty.txt"], "empty.txt: is empty"),
        (["--text", "binary"], "binary, line 2: is not UTF-8 text"),
        (["--reference", POCKET], "is MODEL, and no option differs"),
        (["--vary", "colour=blue"], "unknown option to vary 'colour'"),
        (["--vary", "activations=int9"], "unknown activations 'int9'"),
        (["--vary", "activations=exact"], "is the value anyway"),
        (["--vary", "policy=reuse,reuse"], "pocket, policy=reuse: two are called so"),
        (["--activations", "int8"], "needs weights in GGUF's blocks"),
        (["--predictor", "eam"], "--predictor has no effect"),
        (["--context", "15"], "--context"),
    ],
)
def test_refusals_are_one_line(words, message, capsys):
    context = [] if "--context" in words else ["--context", str(CONTEXT)]
    text = [] if "--text" in words else ["--text", "text.txt"]
    given = [*text, "--quick", *context]
    assert main(["bench", "quality", POCKET, *given, *words]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("error:") == 1
    assert shown.out == ""


@pytest.mark.long
def test_a_system_that_fails_leaves_the_others_their_numbers(capsys):
    words = ["bench", "quality", POCKET, "--text", "text.txt", "--context", str(CONTEXT), "--json"]
    assert main([*words, "--vary", "activations=int8", "--vary", "policy=reuse"]) == 1
    shown = capsys.readouterr()
    rows = {one["system"]: one for one in json.loads(shown.out)["measurements"]}
    assert "needs weights in" in rows["pocket, activations=int8"]["failure"]
    assert rows["pocket, activations=int8"]["summary"] == {}
    assert rows["pocket, policy=reuse"]["summary"]["same_top"]["mean"] == 1


@pytest.fixture
def kept() -> Iterator[Any]:
    with tempfile.TemporaryFile() as file:
        yield file


@pytest.mark.parametrize(("passes", "count"), [(1, 0), (7, 1), (9, 2)])
def test_an_interruption_leaves_what_all_have_read(passes, count, chunks, kept):
    """A chunk is two passes: of three parts the first two have one chunk each."""
    left = iter(range(passes))
    plan = QualityPlan(
        chunks=chunks,
        vocab_size=4096,
        is_stepwise=False,
        is_stopping=lambda: next(left, None) is None,
        kept=kept,
    )
    options = {"host_memory": "1GiB"}
    asked = [("pocket", POCKET, options), ("again", POCKET, options)]
    results = quality.measure_quality(plan, cast(Any, asked), Rules(judged=()), {})
    assert results["ended"] == "interrupted"
    assert [len(one["repetitions"]) for one in results["measurements"]] == [count, count]
    means = [one["summary"].get("perplexity", {}) for one in results["measurements"]]
    assert means[0] == means[1]
