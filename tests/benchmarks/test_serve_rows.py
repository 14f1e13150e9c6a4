"""The rows, from answers whose times are known."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import serve_rows


class Scripted(serve_rows.Client):
    """Answers at times that depend on the prompts alone."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", range(1000))
        self.asked: list[list[int]] = []

    def ask(
        self, prompt: Sequence[int], num_new: int, model: str | None = None
    ) -> tuple[list[float], list[int]]:
        self.asked.append(list(prompt))
        known = [earlier for earlier in self.asked[:-1] if prompt[: len(earlier)] == earlier]
        first_s = 1.0 + 0.01 * (len(prompt) - max(map(len, known), default=0))
        return [first_s + 0.5 * place for place in range(num_new)], [7] * num_new


def test_prompts_never_come_twice() -> None:
    client = Scripted()
    prompts = [tuple(client.prompt(300)) for _ in range(200)]
    assert len(set(prompts)) == len(prompts)
    assert {len(prompt) for prompt in prompts} == {300}
    assert prompts[0] == tuple(range(300))


def test_a_second_turn_goes_on_behind_the_first_and_its_answer() -> None:
    client = Scripted()
    found = serve_rows.turn(client, None, 2)
    assert found["first_s"] == pytest.approx(1 + 5.12)
    assert found["second_s"] == pytest.approx(1 + 0.64)  # 32 of the answer, 32 new
    assert found["ratio"] == pytest.approx(1.64 / 6.12)
    first, second = client.asked[:2]
    assert second[:512] == first
    assert second[512:544] == [7] * 32


def test_answers_count_while_all_go_on() -> None:
    """A token each second of each, whose beginnings and ends are not the same; 240 bytes a time."""
    read = SimpleNamespace(bytes_read=7)

    class Late(Scripted):
        def ask_all(
            self, prompts: Sequence[Sequence[int]], num_new: int, models: Any = None
        ) -> Any:
            read.bytes_read += 240
            return [
                ([place + late / 4 for place in range(num_new)], [7] * num_new)
                for late in range(len(prompts))
            ]

    found = serve_rows.decode(Late(), SimpleNamespace(moe=SimpleNamespace(stats=lambda: read)), 1)
    # 1 to 23 s, and the 22.25 s from 0.75 to 23: of one 23, of three 22
    assert found["tokens_per_s"][1] == 1.0
    assert found["ratio"][4] == pytest.approx((23 + 3 * 22) / 22.25)
    assert found["read_bytes_per_token"] == {1: 10, 4: 2.5, 16: 0.625}


def test_the_pauses_of_answers_count_not_their_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_rows.time, "sleep", lambda seconds: None)
    found = serve_rows.stall(Scripted(), None, 1)
    assert found["without_p99_s"] == pytest.approx(0.5)
    assert found["ratio"] == pytest.approx(1.0)
    assert found["long_prompt_first_token_s"] == pytest.approx(1 + 0.01 * serve_rows.LONG_PROMPT)
