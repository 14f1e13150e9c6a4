"""Batches and a service on a Ray cluster of two nodes, of which one is killed."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from moe_runtime.cli.main import main
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.batches.offline import AnswerFile

ray: Any = pytest.importorskip("ray", reason="needs moe-runtime[ray]: make test-clients")
Cluster: Any = pytest.importorskip("ray.cluster_utils").Cluster
on_ray: Any = pytest.importorskip("moe_runtime.integrations.ray")

OPTIONS = ["--host-memory", "64MiB", "--dtype", "float32", "--policy", "lru", "--prefetch", "off"]
SMALL = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
BEGINNINGS = ["The for statement", "A class is", "def main(", "Lists are mutable", "An exception"]
MOST_S = 120


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes of one processor each; the first is the head."""
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    found = Cluster(initialize_head=True, head_node_args=SMALL)
    found.add_node(**{name: SMALL[name] for name in ("num_cpus", "object_store_memory")})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield found
    ray.shutdown()
    found.shutdown()
    for one, handler in handlers.items():
        signal.signal(one, handler)


def write_prompts(folder: Path, count: int) -> Path:
    """With prompts that occur more than once, and some in OpenAI's format."""
    lines: list[Any] = []
    for n in range(count):
        one = {"prompt": BEGINNINGS[n % 5], "max_tokens": 5 + n % 12}
        wrapped = {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": one}
        lines.append(wrapped if n % 7 == 3 else one)
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def generate(prompts: Path, output: Path, *words: str) -> int:
    named = ["--prompts", str(prompts), "-o", str(output)]
    return main(["generate", str(pocket_path()), *named, *OPTIONS, *words])


def texts(path: Path) -> list[tuple[str, str]]:
    """Every answer's id and text."""
    found = []
    for line in path.read_text().splitlines():
        one = json.loads(line)
        body = (one.get("response") or {}).get("body")
        found.append((one["id"], body["choices"][0]["text"] if body else one["text"]))
    return found


def test_a_batch_ends_complete_though_a_node_is_killed(cluster, tmp_path, monkeypatch, capsys):
    """Answers are those of one process, in the order of the prompts, each once; an interruption
    before, and a line that a kill cut short, change nothing."""
    prompts, output = write_prompts(tmp_path, 60), tmp_path / "out.jsonl"
    assert generate(prompts, tmp_path / "alone.jsonl") == 0
    expected = texts(tmp_path / "alone.jsonl")
    real, written, real_give, begun = AnswerFile.add, [], on_ray._Pool._give, []

    def give(pool: Any, _: Any) -> None:
        """Waits for both engines, so that the killed node has work however slow its start was."""
        if pool in begun or all(worker.is_ready for worker in pool._workers):
            begun.append(pool)
            for worker in pool._workers:
                if worker.is_ready:
                    real_give(pool, worker)

    def add(self: AnswerFile, record: Any) -> None:
        real(self, record)
        written.append(record["id"])
        if len(written) == 4:
            signal.raise_signal(signal.SIGTERM)
        if len(written) == 12:
            (node,) = cluster.worker_nodes
            cluster.remove_node(node, allow_graceful=False)

    monkeypatch.setattr(AnswerFile, "add", add)
    monkeypatch.setattr(on_ray._Pool, "_give", give)
    assert generate(prompts, output, "--ray", cluster.address) == 143
    assert "the same command goes on from there" in capsys.readouterr().err
    with output.open("a") as file:
        file.write('{"id": "batch_req_7')
    assert generate(prompts, output, "--ray", cluster.address, "--max-running", "4") == 0
    assert "an engine on Ray was lost" in capsys.readouterr().err
    assert texts(output) == expected
    assert sorted(written) == sorted(one for one, _ in expected)


def test_a_busy_cluster_is_told_of(cluster, tmp_path, monkeypatch):
    """It goes on when the other work ends."""
    ray.init(cluster.address, logging_level="ERROR")
    holder = ray.remote(num_cpus=1)(lambda: time.sleep(MOST_S))
    held = [holder.remote() for _ in range(2)]
    while ray.available_resources().get("CPU", 0):
        time.sleep(0.1)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        for one in held:
            ray.cancel(one, force=True)

    monkeypatch.setattr("moe_runtime.cli.console.say_line", say)
    monkeypatch.setattr(on_ray, "PLACED_S", 0.5)
    prompts, output = write_prompts(tmp_path, 3), tmp_path / "out.jsonl"
    assert generate(prompts, output, "--ray", cluster.address) == 0
    assert "the cluster is busy: an engine waits for 1 processors on one machine" in said[0]
    assert len(texts(output)) == 3


def test_errors_of_engines_are_one_line(cluster, tmp_path, capsys, monkeypatch):
    prompts, output = write_prompts(tmp_path, 3), tmp_path / "out.jsonl"

    def refused(*words: str) -> str:
        named = ["--prompts", str(prompts), "-o", str(output), "--ray", *words]
        assert main(["generate", str(pocket_path()), *named]) == 2
        err = capsys.readouterr().err
        assert err.count("error:") == 1
        return err

    assert "--max-tokens 4 is too small" in refused(cluster.address, "--max-tokens", "4")
    said = "--ray-engines 3: the cluster has 2 free processors"
    assert said in refused(cluster.address, "--ray-engines", "3")
    assert "no cluster answers there" in refused("127.0.0.1:1")
    assert "expected the cluster's HOST:PORT" in refused("ray://127.0.0.1:1")
    one = [{"Alive": True, "Resources": {"CPU": 2.0}}]
    monkeypatch.setattr(on_ray.ray, "nodes", lambda: one)
    said = "2 engines on 1 machines: --host-memory must say what each may take"
    assert said in refused(cluster.address, "--ray-engines", "2")
    assert not output.exists()


def test_an_engine_that_ends_again_and_again(cluster, tmp_path, monkeypatch, capsys):
    class Dying(on_ray.BatchEngine):
        def load(self, needs: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(on_ray, "BatchEngine", Dying)
    prompts, output = write_prompts(tmp_path, 3), tmp_path / "out.jsonl"
    assert generate(prompts, output, "--ray", cluster.address) == 2
    assert "4 engines on Ray ended without an answer in between" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("cpus", "gpus", "device", "wanted", "expected"),
    [
        ([8, 8], [0, 0], "auto", None, (2, 8, 0)),
        ([8, 4], [0, 0], "cpu", None, (2, 4, 0)),
        ([8, 4], [0, 0], "cpu", 3, (3, 4, 0)),
        ([8, 4, 0], [0, 0, 0], "auto", 12, (12, 1, 0)),
        ([8, 8], [4, 2], "auto", None, (6, 1, 1)),
        ([8, 8], [4, 2], "cuda", 5, (5, 1, 1)),
        ([8, 8], [4, 2], "cpu", None, (2, 8, 0)),
    ],
)
def test_how_a_cluster_is_divided(cpus, gpus, device, wanted, expected):
    nodes = [{"CPU": cpu, "GPU": gpu} for cpu, gpu in zip(cpus, gpus, strict=True)]
    found = on_ray._layout(nodes, device, wanted)
    assert (found.num_engines, found.num_cpus, found.num_gpus) == expected


def test_a_cluster_without_room():
    with pytest.raises(ValueError, match="has 2 free processors"):
        on_ray._layout([{"CPU": 2.0}], "auto", 3)
    with pytest.raises(ValueError, match="has 0 GPUs"):
        on_ray._layout([{"CPU": 2.0}], "cuda", None)


def test_the_text_that_replicas_are_chosen_by():
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    other = {"stream": False, "messages": chat["messages"], "model": "m"}
    found = [on_ray.beginning_of(json.dumps(one).encode()) for one in (chat, other)]
    assert found[0] == found[1]
    longer = {"messages": [*chat["messages"], {"role": "assistant", "content": "Ho"}]}
    assert on_ray.beginning_of(json.dumps(longer).encode())[: len(found[0]) - 2] == found[0][:-2]
    assert all(on_ray.beginning_of(body) for body in (b"", b"[1]", b"{", b"{}"))


def test_wrong_options_of_the_application():
    for options, said in (
        ({}, "expected model=PATH"),
        ({"model": "m", "max_replicas": "two"}, "max_replicas must be a number, got 'two'"),
        ({"model": "m", "min_replicas": "2"}, "1 <= min_replicas <= max_replicas"),
    ):
        with pytest.raises(ValueError, match=said):
            on_ray.application(options)


def test_a_service_goes_on_though_a_node_is_killed(cluster):
    """Two replicas; prompts that begin alike go to one; text, streams and errors as of `serve`."""
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ray.init(cluster.address, logging_level="ERROR", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    options = {"model": str(pocket_path()), "host_memory": "64MiB", "max_tokens": "1024"}
    counts = {"min_replicas": "2", "max_replicas": "2"}
    serve.run(on_ray.application({**options, **counts, "dtype": "float32"}))
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=MOST_S) as http:
        assert http.get("/v1/models").json()["data"][0]["id"] == "pocket"
        assert http.post("/v1/completions", json={"prompt": 7}).status_code == 400
        long = "The import statement is used to load modules. " * 8
        cached = [ask(http, f"{long}{n}")["usage"] for n in range(6)]
        shared = [one["prompt_tokens_details"]["cached_tokens"] for one in cached]
        assert [count > 0 for count in shared] == [False] + [True] * 5
        whole = ask(http, "A class is")["choices"][0]["text"]
        body = {"model": "pocket", "prompt": "A class is", "max_tokens": 8, "stream": True}
        body["temperature"] = 0
        with http.stream("POST", "/v1/completions", json=body) as response:
            events = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
        assert "".join(json.loads(one)["choices"][0]["text"] for one in events) == whole
        assert len(events) > 1
        (node,) = cluster.worker_nodes
        cluster.remove_node(node, allow_graceful=False)
        deadline = time.monotonic() + MOST_S
        answered = 0
        while answered < 5:
            assert time.monotonic() < deadline
            response = http.post("/v1/completions", json={**body, "stream": False})
            if response.status_code == 200:
                assert response.json()["choices"][0]["text"] == whole
                answered += 1
    serve.shutdown()


def ask(http: Any, prompt: str) -> Any:
    body = {"model": "pocket", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()
