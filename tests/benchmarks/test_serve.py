import json
from argparse import Namespace
from pathlib import Path

import pytest
import serve


def options_of(**others: object) -> Namespace:
    known = {"clients": [1, 8], "requests": 16, "prompt_tokens": [32], "output_tokens": 4}
    return Namespace(**known | {"port": 1, "llama_server": "it", "systems": ["ours"]} | others)


def test_no_prompt_comes_twice(tmp_path: Path) -> None:
    """A line more than requests, for the load generator's probe; the first file warms up."""
    options = options_of(prompt_tokens=[32, 64])
    pressing = [
        (load, path.read_text().splitlines())
        for load, path in serve.write_prompts(tmp_path, options)
    ]
    assert [(*load, len(lines)) for load, lines in pressing] == [
        (8, 32, 4, 8 + 1),
        (1, 32, 4, 2 + 1),
        (8, 32, 4, 16 + 1),
        (1, 64, 4, 2 + 1),
        (8, 64, 4, 16 + 1),
    ]
    every = [line for _, lines in pressing for line in lines]
    assert len({line[:40] for line in every}) == len(every)
    for load, (*lines, probe) in pressing:
        for tokens, line in ((32, probe), *((load.prompt_length, line) for line in lines)):
            assert 4 * tokens - 1 <= len(line) < 4 * tokens + 79


def test_more_prompts_than_the_text_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="too short for 8 more prompts of 100000 tokens"):
        serve.write_prompts(tmp_path, options_of(prompt_tokens=[100_000]))
    assert not list(tmp_path.iterdir())


def test_the_median_of_a_systems_turns_counts_and_failures_do_not() -> None:
    turns = {"ours": (4.0, 9.0, 8.0), "llama.cpp": (1.0, 2.0, 5.0)}
    load = serve.Load(4, 64, 1)
    rows = [
        {"system": system, "cap": "7 GiB", **load._asdict(), "failed": 0}
        | {"output_tokens_per_s": rate, "input_tokens_per_s": 64 * rate}
        for system, rates in turns.items()
        for rate in rates
    ]
    rows.append(rows[0] | {"failed": 1, "output_tokens_per_s": 1000.0})
    rows.append(rows[0] | {"prompt_length": 256, "output_tokens_per_s": 3.0})
    rows.append({"system": "ours", "cap": "none", "error": "the server ended with exit code 1"})
    ours, peer, longer = serve.summarize(rows)
    assert (ours["output_tokens_per_s"], ours["ours_over_it"]) == (8, 1)
    assert (peer["output_tokens_per_s"], peer["ours_over_it"]) == (2, 4)
    assert peer["input_tokens_per_s"] == 128
    assert (longer["prompt_length"], longer["output_tokens_per_s"]) == (256, 3)


def test_every_server_has_room_for_all_clients() -> None:
    options = options_of(prompt_tokens=[32, 100], output_tokens=28)
    places = Path("model"), Path("model.gguf")
    ours = serve.server_command(serve.OURS, options, *places)
    peer = serve.server_command(serve.LLAMA_CPP, options, *places)
    assert ours[ours.index("--max-tokens") + 1] == peer[peer.index("--ctx-size") + 1] == "2048"
    assert peer[peer.index("--parallel") + 1] == "8"


def test_all_prompts_but_the_probes_are_asked(tmp_path: Path) -> None:
    load, path = serve.write_prompts(tmp_path, options_of())[0]
    command = serve.load_command(1, load, path)
    assert command[command.index("--requests") + 1] == "8"
    assert command[command.index("--prompts") + 1] == str(path)


def test_rows_of_other_caps_systems_and_loads_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    measured = {"system": "ours", "cap": "7 GiB", **serve.Load(1, 32, 4)._asdict()}
    others = [{"cap": "none"}, {"system": "llama.cpp"}, {"clients": 2}, {"answer_length": 1}]
    rows = [measured, *(measured | other for other in others)]
    options = options_of(caps=[7 << 30])
    assert serve.kept_rows(file, options) == []
    file.write_text(json.dumps({"rows": rows}))
    assert serve.kept_rows(file, options) == rows[1:]
