"""The page at ``/`` in a real browser: it finds the model, watches, and chats."""

import importlib.resources
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from http_server import Served

CHROMIUM = shutil.which("chromium")
TYPING = """<script>
setTimeout(async () => {
  const typed = {temperature: "0", most: "6", text: "hello"};
  for (const id in typed) $(id).value = typed[id];
  $("send").click();
  while (running) await fetch("/ping");
}, 1500);
</script>"""
"""What a user does, behind the page's own script. The browser's clock stands while it fetches."""
FAILING = """<script>
setTimeout(async () => {
  const asked = [], real = window.fetch, events = text => new Response(text, {status: 200});
  const piece = 'data: {"choices": [{"delta": {"content": "<img src=x>"}}]}\\n\\n';
  const answers = [
    () => { throw new TypeError("gone"); },
    () => new Response("<h1>bad</h1>", {status: 502}),
    () => new Response("{}", {status: 401}),
    () => events(piece),
    () => events(piece + 'data: {"error": {"message": "it failed"}}\\n\\n'),
    () => events("data: [DONE]\\n\\n"),
  ];
  window.fetch = (path, options) =>
    path.startsWith("/v1/chat") ? Promise.resolve().then(answers.shift()) : real(path, options);
  while (answers.length) {
    $("text").value = "q";
    $("send").click();
    while (running) await real("/ping");
    asked.push($("text").value);
  }
  document.title = asked.join();
}, 1500);
</script>"""
"""A server that fails in one way after the other."""
CLEARING = """<script>
setTimeout(async () => {
  const said = [], answered = async () => { while (running) await fetch("/ping"); };
  for (const text of ["one", "two"]) {
    $("text").value = text;
    $("send").click();
    if (text === "one") {
      while (!document.querySelector(".assistant")) await fetch("/ping");
      $("clear").click();
      $("most").value = "6";  // the other one ends while the browser looks
    }
    await answered();
    said.push(history.map(message => message.role).join());
  }
  const {scrollWidth, clientWidth} = document.documentElement;
  document.title = [...said, scrollWidth - clientWidth, $("key").offsetWidth > 0].join(" ");
}, 1500);
</script>"""
"""One answer is given up for another conversation."""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")


@pytest.fixture
def browse(
    site: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], str]:
    """Asks for the document that a browser has after a script, in a window of some size."""

    def shown(script: str, size: str) -> str:
        assert CHROMIUM is not None
        files, ours = importlib.resources.files, "moe_runtime.serving.http"
        page = (files(ours) / "page.html").read_text("utf-8")
        (tmp_path / "page.html").write_text(page + script, "utf-8")
        monkeypatch.setattr(
            importlib.resources, "files", lambda name: tmp_path if name == ours else files(name)
        )
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += ["--disable-background-networking", "--virtual-time-budget=6000"]
        command += [f"--window-size={size}", f"--user-data-dir={tmp_path / 'profile'}"]
        command += [site.address + "/"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert '<h1 id="model">pocket</h1>' in done.stdout, done.stderr[-2000:]
        return done.stdout

    return shown


def test_a_browser_chats_and_watches(site: Served, browse: Callable[[str, str], str]) -> None:
    shown = browse(TYPING, "1280,900")
    gauges = dict(re.findall(r"<span>([^<]+)</span><b>([^<]*)</b>", shown))
    assert len(gauges) == 8
    for name in ("tokens/s", "read MB/s", "running", "waiting", "KV cache %"):
        assert re.fullmatch(r"[0-9.]+", gauges[name]), gauges
    talk = re.findall(r'<div class="message (\w+)">([^<]*)</div>', shown)
    asked = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 6}
    _, answer = site.ask("/v1/chat/completions", asked)
    said = answer["choices"][0]["message"]["content"]
    assert said
    assert talk[:2] == [("user", "hello"), ("assistant", said)]
    assert [kind for kind, _ in talk[2:]] == ["note"]  # that says why it ends


def test_a_narrow_window_has_all_and_what_is_cleared_is_forgotten(
    browse: Callable[[str, str], str],
) -> None:
    (title,) = re.findall("<title>(.*)</title>", browse(CLEARING, "600,900"))
    # the second conversation has one question and its answer; nothing is beyond the right edge
    assert title == " user,assistant 0 true"


def test_whatever_fails_is_said(browse: Callable[[str, str], str]) -> None:
    shown = browse(FAILING, "1280,900")
    talk = re.findall(r'<div class="message (\w+)">([^<]*)</div>', shown)
    text = ("assistant", "&lt;img src=x&gt;")
    assert [one for one in talk if one != ("user", "q")] == [
        ("error", "The server does not answer."),
        ("error", "The server answers 502 to /v1/chat/completions."),
        ("error", "This server wants a key: give it in the field “key”."),
        text,
        ("error", "The answer breaks off: the server has ended it."),
        text,
        ("error", "it failed"),
        ("note", "The answer is empty."),
    ]
    # a question without an answer stands there to be asked again
    assert re.findall("<title>(.*)</title>", shown) == ["q,q,q,,,q"]
