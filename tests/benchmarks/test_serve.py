from argparse import Namespace
from pathlib import Path

import pytest
import serve


def test_prompts_are_of_a_length_and_none_begins_as_another(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    serve.write_prompts(path, 40, 32)
    lines = path.read_text().splitlines()
    assert len(lines) == len({line[:40] for line in lines}) == 40
    assert all(127 <= len(line) < 127 + 80 for line in lines)


def test_more_prompts_than_the_text_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"the text has \d+ prompts of 100000 tokens, not 90"):
        serve.write_prompts(tmp_path / "prompts.txt", 90, 100_000)
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
    options = Namespace(
        clients=[1, 8], prompt_tokens=100, output_tokens=28, port=1, threads=2, llama_server="it"
    )
    places = Path("model"), Path("model.gguf")
    ours = serve.server_command(serve.OURS, options, *places)
    peer = serve.server_command(serve.LLAMA_CPP, options, *places)
    assert ours[ours.index("--max-tokens") + 1] == peer[peer.index("--ctx-size") + 1] == "2048"
    assert peer[peer.index("--parallel") + 1] == "8"
