"""Several keys of one server: none tells another what was asked with it."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from http_server import Served, served_engine

from moe_runtime.serving.engine import Engine
from moe_runtime.serving.http.answer_text import Vocabulary
from moe_runtime.serving.http.grammars import Grammars
from moe_runtime.serving.http.server import Access
from moe_runtime.serving.prefixes import PrefixDisk

PROMPT = list(range(100, 180))
FIRST, SECOND = "first key", "second key"


def cached(site: Served, key: str, prompt: list[int] = PROMPT) -> int:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    found = site.answer("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
    return found["usage"]["prompt_tokens_details"]["cached_tokens"]


def site_of(
    model: Any, tokenizer: Any, folder: Path, stack: contextlib.ExitStack, **access: Any
) -> Served:
    disk = PrefixDisk(folder, 1 << 24, b"pocket")
    engine = stack.enter_context(Engine(model, prefix_disk=disk))
    found = served_engine(engine, tokenizer, access=Access(keys=[FIRST, SECOND], **access))
    return stack.enter_context(found)


@pytest.mark.parametrize("shares", [False, True])
def test_a_key_finds_no_prefix_of_another_in_memory_or_on_the_disk(
    pocket, tokenizer, tmp_path, shares
):
    theirs = 64 if shares else 0
    with contextlib.ExitStack() as stack:
        site = site_of(pocket, tokenizer, tmp_path, stack, shares_prefixes=shares)
        found = [cached(site, key) for key in (FIRST, SECOND, FIRST, SECOND)]
        assert found == [0, theirs, 64, 64]
        assert cached(site, FIRST, PROMPT[:48] + [7] * 40) == 48
        assert cached(site, SECOND, PROMPT[:48] + [7] * 40) == (80 if shares else 48)
    with contextlib.ExitStack() as stack:
        site = site_of(pocket, tokenizer, tmp_path / "other", stack, shares_prefixes=shares)
        assert cached(site, FIRST) == 0
    with contextlib.ExitStack() as stack:
        site = site_of(pocket, tokenizer, tmp_path, stack, shares_prefixes=shares)
        other = [9, *PROMPT[1:]]
        assert [cached(site, key, other) for key in (FIRST, SECOND)] == [0, theirs]
        assert [cached(site, key) for key in (FIRST, SECOND)] == [64, 64]


def test_a_key_is_answered_no_sooner_for_a_grammar_of_another(tokenizer):
    grammars = Grammars(Vocabulary(tokenizer, 4096, [0]))
    first = grammars.compile('start: "a"', "it", FIRST)
    assert grammars.compile('start: "a"', "it", FIRST) is first
    assert grammars.compile('start: "a"', "it", SECOND) is not first
    for number in range(40):
        grammars.compile(f'start: "{number}"', "it", SECOND)
    assert grammars.compile('start: "a"', "it", FIRST) is not first  # few are kept


def test_no_name_of_a_file_or_prefix_holds_a_key(tmp_path):
    access = Access(keys=[FIRST, SECOND])
    owners = {access.owner_of(key) for key in access.keys}
    assert len(owners) == 2
    assert not any(word in owner for owner in owners for word in ("first", "second", "key"))
    assert not Access().owner_of("")
