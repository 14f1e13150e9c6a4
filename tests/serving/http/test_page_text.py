"""The page at ``/`` as a text: what it asks for, what it makes of answers, names of fields."""

import importlib.resources
import re

PAGE = (importlib.resources.files("moe_runtime.serving.http") / "page.html").read_text("utf-8")
MARKUP, _, SCRIPT = PAGE.partition("<script>")


def test_nothing_is_asked_of_another_host() -> None:
    linking = {"src", "href", "action", "srcset", "data", "background", "poster", "style"}
    tags = " ".join(re.findall(r"<[^>]*>", MARKUP))
    assert linking.isdisjoint(re.findall(r"\s([\w-]+)=", tags))
    assert not re.search(r"url\(|@import|@font-face", MARKUP)
    assert not re.search(r"\bhttps?:|\bwss?:|[\"'`]//", PAGE)
    assert not re.search(r"\b(import|WebSocket|EventSource|XMLHttpRequest|sendBeacon)\b", SCRIPT)
    asked = re.findall(r"\breach\((?:canChat \? )?([^\s,)]*)", SCRIPT.replace("function reach", ""))
    assert len(asked) == 4
    assert all(path.startswith('"/') for path in asked)
    assert re.findall(r"\bfetch\(([^,]*)", SCRIPT) == ["path"]


def test_what_a_server_says_is_text() -> None:
    makers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|srcdoc"
    assert not re.search(makers, PAGE)
    assert not re.search(r"setTimeout\([\"'`]|\son\w+=", PAGE)
