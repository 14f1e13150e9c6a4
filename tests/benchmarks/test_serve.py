import json
from argparse import Namespace
from pathlib import Path

import pytest
import serve


def options_of(**others: object) -> Namespace:
    known = {"clients": [1, 8], "requests": 16, "prompt_tokens": 32, "output_tokens": 4, "port": 1}
    return Namespace(**known | {"llama_server": "it"} | others)


def test_no_prompt_comes_twice(tmp_path: Path) -> None:
    """A line more than requests, which only the load generator's probe asks; 0: for warming up."""
    paths = serve.write_prompts(tmp_path, options_of())
    lines = {clients: path.read_text().splitlines() for clients, path in paths.items()}
    assert {clients: len(found) for clients, found in lines.items()} == {
        0: 8 + 1,
        1: 2 + 1,
        8: 16 + 1,
    }
    every = [line for found in lines.values() for line in found]
    assert len({line[:40] for line in every}) == len(every)
    assert all(127 <= len(line) < 127 + 80 for line in every)


def test_more_prompts_than_the_text_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"the text has \d+ prompts of 100000 tokens, not 29"):
        serve.write_prompts(tmp_path, options_of(prompt_tokens=100_000))
    assert not list(tmp_path.iterdir())


def test_the_median_of_a_systems_turns_counts_and_failures_do_not() -> None:
    turns = {"ours": (4.0, 9.0, 8.0), "llama.cpp": (1.0, 2.0, 5.0)}
    rows = [
        {"system": system, "cap": "7 GiB", "clients": 4, "failed": 0, "output_tokens_per_s": rate}
        for system, rates in turns.items()
        for rate in rates
    ]
    rows.append(rows[0] | {"failed": 1, "output_tokens_per_s": 1000.0})
    rows.append({"system": "ours", "cap": "none", "error": "the server ended with exit code 1"})
    ours, peer = serve.summarize(rows)
    assert (ours["output_tokens_per_s"], ours["ours_over_it"]) == (8, 1)
    assert (peer["output_tokens_per_s"], peer["ours_over_it"]) == (2, 4)


def test_every_server_has_room_for_all_clients() -> None:
    options = options_of(prompt_tokens=100, output_tokens=28)
    places = Path("model"), Path("model.gguf")
    ours = serve.server_command(serve.OURS, options, *places)
    peer = serve.server_command(serve.LLAMA_CPP, options, *places)
    assert ours[ours.index("--max-tokens") + 1] == peer[peer.index("--ctx-size") + 1] == "2048"
    assert peer[peer.index("--parallel") + 1] == "8"


def test_all_prompts_but_the_probes_are_asked(tmp_path: Path) -> None:
    paths = serve.write_prompts(tmp_path, options_of())
    command = serve.load_command("http://it", 8, paths[0], options_of())
    assert command[command.index("--requests") + 1] == "8"
    assert command[command.index("--prompts") + 1] == str(paths[0])


def test_rows_of_other_caps_are_kept_of_the_same_commit_alone(tmp_path: Path) -> None:
    file, facts = tmp_path / "serve.json", {"commit": "a", "machine": {"cpu": "x"}}
    rows = [{"cap": "none", "clients": 1}, {"cap": "7 GiB", "clients": 1}]
    options = options_of(caps=[7 << 30])
    assert serve.kept_rows(file, facts, options) == []
    file.write_text(json.dumps({**facts, "rows": rows}))
    assert serve.kept_rows(file, facts, options) == rows[:1]
    with pytest.raises(SystemExit, match="another commit"):
        serve.kept_rows(file, {**facts, "commit": "b"}, options)
