"""``moe-runtime report``: one page that is complete in itself, and plots that can be read."""

import dataclasses
import json
import re
import shutil
import struct
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic_routes import make_routes
from traces import trace_of

from moe_runtime.cli.main import main
from moe_runtime.lab.replay.timed import Machine
from moe_runtime.lab.report.findings import ReportSettings, find
from moe_runtime.lab.report.page import SERIES, Page, Section, render
from moe_runtime.lab.report.trace_page import trace_page
from moe_runtime.lab.traces import write_trace
from moe_runtime.policies.prediction import Shape

SHAPE = Shape(num_layers=3, num_experts=8, top_k=2)
SECTIONS = ["activation", "popularity", "reuse", "hit-rates", "recall", "traffic", "timeline"]
WORDS = ["ink", "muted", "accent"]
RUN = {
    "model": "models/<pocket>",
    "policy": "lru",
    "prefetch": "auto, on",
    "prompt_tokens": 4,
    "new_tokens": 60,
    "ttft_s": 0.05,
    "decode_tokens_per_s": 48.7,
    "hits": 660,
    "late_hits": 7,
    "misses": 76,
    "stall_s": 0.03,
    "bytes_read": 15253504,
    "readahead_bytes": 2007040,
    "expert_slots": 96,
    "slot_bytes": 200704,
    "budget_bytes": 500000000,
    "dense_bytes": 4513792,
    "expert_bytes": 18874368,
    "baseline_rss_bytes": 502222848,
    "peak_rss_bytes": 531279872,
    "load_s": 8.7,
    "guesses": 10,
    "useful_guesses": 6,
    "late_guesses": 1,
    "wasted_guesses": 3,
    "predict_s": 0.01,
}


class Reader(HTMLParser):
    """Notes tags, identifiers, and everything that an element would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.images = 0
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.images += values.get("role") == "img" and bool(values.get("aria-label"))
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"] or ""
        for name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            if name in values:
                self.fetched.append(values[name] or "")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "trace.npz"
    routes = make_routes(SHAPE, num_sequences=6, length=24)
    write_trace(path, dataclasses.replace(trace_of(routes), expert_bytes=196_608))
    return path


@pytest.fixture(scope="module")
def page(trace):
    folder = trace.parent
    args = ["report", str(trace), "-o", str(folder / "r.html")]
    assert main([*args, "--policy", "slru", "--predictor", "popularity,naive-bayes"]) == 0
    return folder / "r.html"


def png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", header[16:24])


def test_the_page_asks_for_nothing(page):
    text = page.read_text(encoding="utf-8")
    found = Reader(text)
    assert all(target.startswith(("#", "data:image/png")) for target in found.fetched)
    assert not {"script", "link", "iframe", "object", "embed"} & set(found.tags)
    assert "default-src 'none'" in found.policy
    assert "script-src" not in found.policy
    assert "@import" not in text
    assert "url(http" not in text


def test_the_page_can_be_walked_through(page):
    text = page.read_text(encoding="utf-8")
    found = Reader(text)
    assert len(found.ids) == len(set(found.ids))
    assert found.tags.count("svg") == found.images == len(SECTIONS)
    assert found.tags.count("h1") == 1
    assert [name for name in SECTIONS if f'<section id="{name}"' not in text] == []
    links = {target for target in found.fetched if target.startswith("#")}
    assert {f"#{name}" for name in SECTIONS} <= links
    assert links <= {f"#{name}" for name in found.ids}
    # colours of the drawings follow the page, light or dark
    assert "var(--ink)" in text
    assert text.count("prefers-color-scheme: dark") == 1


def luminance(colour: str) -> float:
    """WCAG's, of `#rrggbb`."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_words_and_drawings_stand_out_on_light_and_on_dark(page):
    blocks = re.findall(r":root \{(.*?)\}", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        colours = dict(re.findall(r"--(\w+): (#\w{6})", block))
        for under in ("page", "surface"):
            words = {name: contrast(colours[name], colours[under]) for name in WORDS}
            assert min(words.values()) >= 4.5, (under, words)
        assert min(contrast(colour, colours["surface"]) for colour in SERIES) >= 3


def test_experts_have_the_size_that_the_trace_says(page):
    assert "experts of 192 KiB over" in page.read_text()


def settings(**changes) -> ReportSettings:
    machine = Machine(
        bytes_per_s=1e9, latency_s=1e-4, expert_bytes=1 << 20, layer_s=1e-3, expert_s=1e-4
    )
    usual = ReportSettings(
        policies=["lfu"],
        predictors=["popularity"],
        machine=machine,
        capacity=0.5,
        max_accesses=10**6,
    )
    return dataclasses.replace(usual, **changes)


@pytest.fixture(scope="module")
def found():
    return find(trace_of(make_routes(SHAPE, num_sequences=6, length=20)), settings())


def test_every_axis_says_what_it_shows(found):
    for section in trace_page(found, "t").sections:
        assert section.figure is not None
        assert section.alt
        panels = [axes for axes in section.figure.axes if axes.get_label() != "<colorbar>"]
        assert any(axes.get_xlabel() for axes in panels), section.name
        named = [axes.get_ylabel() or axes.get_yticklabels() for axes in section.figure.axes]
        assert any(named), section.name


def test_findings_agree_with_each_other(found):
    rates = {(row.policy, row.capacity): row.hit_rate for row in found.rows}
    for capacity in (0.25, 0.375, 0.5, 0.75):
        slots = round(capacity * 8)
        of_distances = found.distances[:, :slots].sum() / found.distances.sum()
        assert rates["lru", capacity] == pytest.approx(of_distances)
        assert rates["lfu", capacity] <= rates["belady-bypass", capacity]
    assert [result.name for result in found.evaluations] == ["control", "popularity"]
    assert found.evaluations[0].recalls[0].mean_at_k == 1.0
    assert set(found.timed) == {"off", "popularity"}
    assert found.timed["off"].num_tokens == 60


@pytest.mark.long
def test_a_long_trace_is_cut_and_one_request_is_no_obstacle():
    routes = make_routes(SHAPE, num_sequences=1, length=90)
    found = find(trace_of(routes), settings(max_accesses=30 * 6))
    assert found.replayed_tokens == 30
    assert found.trace.num_tokens == 90
    assert found.evaluations == []
    assert set(found.timed) == {"off"}
    assert found.timed["off"].num_tokens == 30
    text = render(trace_page(found, "one"))
    assert "Not measured" in text


def test_names_cannot_break_out_of_the_page_and_plots_are_written_too(tmp_path, capsys):
    stats = tmp_path / "run.json"
    stats.write_text(json.dumps({**RUN, "model": "<script>alert(1)</script>"}), encoding="utf-8")
    args = ["report", str(stats), "-o", str(tmp_path / "r.html"), "--json"]
    assert main([*args, "--png", str(tmp_path / "p")]) == 0
    sections = json.loads(capsys.readouterr().out)["sections"]
    assert sections == ["requests", "bytes", "timeline", "memory"]
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert Reader(text).tags.count("svg") == 4
    plots = sorted((tmp_path / "p").iterdir())
    assert [plot.stem for plot in plots] == sorted(sections)
    assert all(min(png_size(plot)) > 200 for plot in plots)


def test_words_of_the_command_line_are_set_as_code_and_nothing_else_is_markup():
    def shown(text: str) -> str:
        section = Section(name="a", title="b", lesson=text)
        page = Page(title="t", subtitle="s", facts=(), sections=[section])
        return render(page).split('<p class="lesson">')[1].split("</p>")[0]

    assert shown("see `run <b> --json`, then `x`") == (
        "see <code>run &lt;b&gt; --json</code>, then <code>x</code>"
    )
    assert shown("one ` alone & <i>") == "one ` alone &amp; &lt;i&gt;"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "neither a trace"),
        ("[1]", "model, policy"),
        ('{"error": "no such folder"}', "the run failed: no such folder"),
        (json.dumps({**RUN, "hits": -1}), "hits missing or malformed"),
        (json.dumps({**RUN, "stall_s": True}), "stall_s missing or malformed"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, capsys, content, expected):
    stats = tmp_path / "run.json"
    stats.write_text(content, encoding="utf-8")
    assert main(["report", str(stats), "-o", str(tmp_path / "r.html")]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (["--policy", "lur"], "did you mean 'lru'"),
        (["--predictor", "next-gate"], "hidden states"),
        (["--capacity", "120%"], "at most 1"),
        (["--capacity", "10%,20%"], "one share"),
        (["--bandwidth", "0"], "--bandwidth must be positive"),
        (["-o", "no/such/folder/r.html"], "there is no folder"),
    ],
)
def test_bad_options_are_one_line(trace, tmp_path, capsys, extra, expected):
    target = [] if "-o" in extra else ["-o", str(tmp_path / "r.html")]
    assert main(["report", str(trace), *target, *extra]) == 2
    captured = capsys.readouterr().err
    assert expected in captured
    assert captured.count("\n") == 1


def test_a_run_that_made_no_token_is_drawn(tmp_path):
    stats = tmp_path / "run.json"
    nothing = {key: 0 if isinstance(value, int | float) else value for key, value in RUN.items()}
    nothing |= {"ttft_s": None, "decode_tokens_per_s": None}
    stats.write_text(json.dumps(nothing), encoding="utf-8")
    assert main(["report", str(stats), "-o", str(tmp_path / "r.html")]) == 0


CHROMIUM = shutil.which("chromium")
