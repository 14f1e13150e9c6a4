"""The page at ``/`` in a real browser: it finds the model, watches, chats, keeps."""

import html
import importlib.resources
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from http_server import Served

CHROMIUM = shutil.which("chromium")
HELP = """
const pause = async () => {  // the browser's clock stands while it fetches
  await fetch("/ping");
  await new Promise(resolve => setTimeout(resolve, 5));
};
const until = async is => { while (!is()) await pause(); };
const answered = () => until(() => !running && $("messages").ariaBusy !== "true");
const shown = () => [...$("messages").children].map(one => [one.classList[1], one.innerText]);
const press = (box, text) =>
  [...box.querySelectorAll("button")].find(one => one.innerText === text).click();
const type = async text => { $("text").value = text; $("send").click(); await answered(); };
const over = () => document.documentElement.scrollWidth - document.documentElement.clientWidth;
const report = value => document.body.append(
  make("pre", {id: "report"}, JSON.stringify(value)));
setTimeout(async () => {
  try { report(await act()); } catch (error) { report(String(error.stack)); }
}, 1500);
"""
CHATTING = """
async function act() {
  const begun = [$("start").hidden, $("examples").children.length, $("facts").innerText];
  $("temperature").value = "0";
  $("max_tokens").value = "6";
  await type("hello");
  await until(() => $("conversations").children.length);
  const first = shown();
  $("tab-charts").click();
  const charts = [...$("charts").querySelectorAll("svg")].map(one => one.ariaLabel);
  $("new").click();
  const empty = shown();
  await until(() => $("conversations").querySelector(".title"));
  $("conversations").querySelector(".title").click();
  const raw = textOf(talk.messages[1]);
  return {begun, first, charts, empty, again: shown(), raw, spoken: $("spoken").innerText,
    gauge: $("gauge-rate").innerText, kept: (await store.all()).map(one => plain(one.messages))};
}
"""
NARROW = """
async function act() {
  const wide = [over()];
  $("text").value = "one";
  $("send").click();
  await until(() => document.querySelector(".said"));
  $("new").click();
  $("max_tokens").value = "6";  // the other one ends while the browser looks
  await type("two");
  const roles = talk.messages.map(message => message.role);
  $("tab-charts").click();
  wide.push(over());
  $("open-settings").click();
  wide.push(over(), $("key").getBoundingClientRect().right - innerWidth);
  $("close-settings").click();
  $("open-list").click();
  wide.push(over(), $("list").getBoundingClientRect().right - innerWidth);
  return {wide, roles};
}
"""
FAILING = """
async function act() {
  const real = window.fetch, events = text => new Response(text, {status: 200});
  const data = value => `data: ${JSON.stringify(value)}\\n\\n`;
  const piece = data({choices: [{delta: {content: "<img src=x>"}}]});
  const wrong = {error: {message: "too hot", param: "temperature"}};
  const answers = [
    () => { throw new TypeError("gone"); },
    () => new Response("<h1>bad</h1>", {status: 502}),
    () => new Response("{}", {status: 401}),
    () => new Response(JSON.stringify(wrong), {status: 400}),
    () => events("data: [DONE]\\n\\n"),
    () => events(piece),
    () => events(piece + data({error: {message: "it failed"}})),
  ];
  window.fetch = (path, options) =>
    path.startsWith("v1/chat") ? Promise.resolve().then(answers.shift()) : real(path, options);
  const told = [];
  while (answers.length) {
    await type("q");
    told.push([shown().at(-1), $("text").value, talk.messages.length, $("settings").open,
      [...document.querySelectorAll("#settings .wrong")].map(one => one.innerText)]);
    $("settings").close();
    $("text").value = "";
  }
  return told;
}
"""
ANSWERS = """
async function act() {
  const real = window.fetch, asked = [];
  const data = value => `data: ${JSON.stringify(value)}\\n\\n`;
  const said = delta => () => new Response(data({choices: [{delta}]}) + "data: [DONE]\\n\\n");
  const call = {index: 0, id: "c", function: {name: "now", arguments: "{}"}};
  const answers = [
    said({reasoning_content: "Hm.", content: "# Big\\n<script>x</script> ![a](https://e.f/g.png)"}),
    said({content: "second"}),
    () => new Response("", {status: 500}),
    said({content: "third"}),
    said({tool_calls: [call]}),
    said({content: "noon"}),
  ];
  window.fetch = (path, options) => {
    if (!path.startsWith("v1/chat")) return real(path, options);
    asked.push(JSON.parse(options.body).messages);
    return Promise.resolve().then(answers.shift());
  };
  $("system").value = "Be brief.";
  await type("one");
  const [{outerHTML}] = document.getElementsByClassName("assistant");
  const thought = document.querySelector(".thought").open;
  await type("two");
  press($("messages").lastChild, "Retry");
  await answered();
  const restored = talk.messages.map(textOf);
  press($("messages").firstChild, "Edit");
  $("messages").querySelector("textarea").value = "uno";
  $("messages").querySelector("form").requestSubmit();
  await answered();
  const edited = talk.messages.map(textOf);
  await until(() => $("conversations").children.length === 2);
  await type("when?");
  const folded = document.querySelector(".call").open;
  $("messages").querySelector("form textarea").value = "12:00";
  $("messages").querySelector("form").requestSubmit();
  await answered();
  let line = null;
  window.Blob = class extends Blob {
    constructor(parts, kind) { super(parts, kind); line = parts; }
  };
  HTMLAnchorElement.prototype.click = () => null;  // a download may stop the clock
  const [row] = $("conversations").children;
  press(row, "⋯");
  press(row, "Export");
  press(row, "Delete");
  const still = $("conversations").children.length;
  press(row, "Really delete");
  await until(() => $("conversations").children.length === 1);
  return {asked, outerHTML, thought, restored, edited, folded, still, line, empty: shown(),
    kept: (await store.all()).map(one => one.messages.map(textOf))};
}
"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")


@pytest.fixture
def browse(
    site: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], Any]:
    """Gives what a script of the page says, in a window of some size."""

    def told(script: str, size: str) -> Any:
        assert CHROMIUM is not None
        files, ours = importlib.resources.files, "moe_runtime.serving.http"
        folder = tmp_path / "page"
        shutil.copytree(str(files(ours) / "page"), folder)
        with open(folder / "page.js", "a", encoding="utf-8") as page:
            page.write(script + HELP)
        monkeypatch.setattr(
            importlib.resources, "files", lambda name: tmp_path if name == ours else files(name)
        )
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += ["--disable-background-networking", "--virtual-time-budget=9000"]
        command += [f"--window-size={size}", f"--user-data-dir={tmp_path / 'profile'}"]
        command += [site.address + "/"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        found = re.search('<pre id="report">(.*?)</pre>', done.stdout, re.S)
        assert found, done.stdout + done.stderr[-2000:]
        return json.loads(html.unescape(found[1]))

    return told


def test_a_browser_chats_watches_and_keeps(site, browse):
    found = browse(CHATTING, "1280,900")
    hidden, examples, facts = found["begun"]
    assert (hidden, examples) == (False, 3)
    assert re.search(
        r"pocket.*Experts in memory\s+18 MiB of 18 MiB.*budget\s+256 MiB.*512 tokens", facts, re.S
    )
    asked = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 6}
    _, answer = site.ask("/v1/chat/completions", asked)
    said = answer["choices"][0]["message"]["content"]
    assert found["raw"] == said
    (_, first), (kind, second) = found["first"]
    assert first.startswith("You\nhello")
    assert kind == "assistant"
    assert "6 tokens" in second
    assert "cut off" in second
    assert found["empty"] == []
    assert found["again"] == found["first"]
    wanted = {"role": "assistant", "content": said}
    assert found["kept"] == [[*asked["messages"], wanted]]
    assert found["spoken"].split() == said.split()
    assert len(found["charts"]) == 8
    assert re.fullmatch(r"KV cache in use: [0-9.]+ %, between .*", found["charts"][5])
    assert re.fullmatch("[0-9.]+", found["gauge"])


def test_a_narrow_window_has_all_and_what_is_left_is_forgotten(browse):
    found = browse(NARROW, "320,640")
    assert max(found["wide"]) <= 0  # nothing is beyond the right edge
    # the second conversation has one question and its answer
    assert found["roles"] == ["user", "assistant"]


def test_whatever_fails_is_said(browse):
    key = "This server wants a key: give it in the settings."
    again = [  # a question without an answer stands there to be asked again
        (["error", "The server does not answer."], "q", 0, False, []),
        (["error", "The server answers 502 to v1/chat/completions."], "q", 0, False, []),
        (["error", key], "q", 0, True, [key]),
        (["error", "too hot"], "q", 0, True, ["too hot"]),
        (["note", "The answer is empty."], "q", 0, False, []),
        (["error", "The answer breaks off: the server has ended it."], "", 2, False, []),
        (["error", "it failed"], "", 4, False, []),
    ]
    assert browse(FAILING, "1280,900") == [list(one) for one in again]


def test_answers_are_text_and_are_asked_again_changed_and_given_away(browse):
    found = browse(ANSWERS, "1280,900")
    assert "<h1>Big</h1>" in found["outerHTML"]
    assert "&lt;script&gt;" in found["outerHTML"]
    assert not re.search("<(script|img)", found["outerHTML"])
    assert found["thought"] is found["folded"] is False
    first = "# Big\n<script>x</script> ![a](https://e.f/g.png)"
    # an answer whose successor fails stays, and so does a conversation that is gone on from before
    assert found["restored"] == ["one", first, "two", "second"]
    assert found["edited"] == ["uno", "third"]
    assert found["kept"] == [found["restored"]]
    assert found["asked"][0] == [
        *({"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"})
    ]
    assert [message["role"] for message in found["asked"][-1]] == [
        *("system", "user", "assistant", "user", "assistant", "tool")
    ]
    assert found["asked"][-1][-1] == {"role": "tool", "tool_call_id": "c", "content": "12:00"}
    (line,) = found["line"]
    assert json.loads(line)["messages"] == [
        *found["asked"][-1],
        {"role": "assistant", "content": "noon"},
    ]
    assert found["still"] == 2
    assert found["empty"] == []
