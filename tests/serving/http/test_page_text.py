"""The page at ``/`` as a text: what it asks for, what it makes of answers, names of fields."""

import importlib.resources
import re
from html.parser import HTMLParser

PAGE = (importlib.resources.files("moe_runtime.serving.http") / "page.html").read_text("utf-8")
MARKUP, _, SCRIPT = PAGE.partition("<script>")
FIELDS = ("input", "select", "textarea", "button")


class FieldReader(HTMLParser):
    """Collects the fields of a page with the text that names each, and all attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, str] = {}
        self.attributes: list[tuple[str, str]] = []
        self._inside: list[str] = []
        self._field = self._label = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.attributes += given.items()
        self._inside.append(tag)
        if tag in FIELDS:
            self._field = given["id"]
            label = self._label if "label" in self._inside else ""
            self.names[self._field] = given.get("aria-label", label)
        if tag == "label":
            self._label = ""

    def handle_data(self, data: str) -> None:
        if "label" in self._inside:
            self._label += data.strip()
        elif self._inside[-1:] == ["button"]:
            self.names[self._field] += data.strip()

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass


def test_nothing_is_asked_of_another_host() -> None:
    reader = FieldReader()
    reader.feed(MARKUP)
    linking = {"src", "href", "action", "srcset", "data", "background", "poster", "style"}
    assert linking.isdisjoint(name for name, _ in reader.attributes)
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


def test_every_field_has_a_name() -> None:
    reader = FieldReader()
    reader.feed(MARKUP)
    assert reader.names == {
        "text": "message",
        "send": "Send",
        "clear": "Clear",
        "models": "model",
        "temperature": "temperature",
        "most": "most tokens",
        "key": "key",
    }
    assert '<html lang="en">' in MARKUP
    assert 'role="log"' in MARKUP
    assert 'role="status"' in MARKUP


def test_the_page_stays_small() -> None:
    assert len(PAGE.encode()) < 12 << 10


def test_a_model_is_chosen_once_its_template_is_known() -> None:
    choose = SCRIPT[SCRIPT.index("async function choose") : SCRIPT.index("async function* chunks")]
    assert choose.index("await reach") < choose.index("model = chosen.value")
    assert SCRIPT.count("model = chosen.value") == 1
