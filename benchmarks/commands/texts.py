"""``bench latency`` and ``bench throughput``: continue text and compare with other systems."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moe_runtime.benchmarks.commands.layers import require_one
from moe_runtime.benchmarks.commands.shared import Peers, Threads, TimedRun, cap_bytes
from moe_runtime.cli import options
from moe_runtime.cli.console import fetch_model, quiet_transformers, require_address_space, say_line
from moe_runtime.cli.prompts import read_prompts
from moe_runtime.cli.strict import refuse_given
from moe_runtime.config import parse_budget, require_known
from moe_runtime.files import at_home, require_not_read

if TYPE_CHECKING:
    from moe_runtime.benchmarks.cases.routed import RecordedRouting
    from moe_runtime.benchmarks.cases.texts import Ids
    from moe_runtime.benchmarks.suite.peers import PeerProgram
    from moe_runtime.benchmarks.synthetic.shape_checkpoint import Shape

_START_S = 300.0
"""A peer may compile its operators on the first import."""
_CAUTION = (
    "random weights flatter predictors: their layers change the gates' inputs less than trained "
    "layers do; --routing TRACE uses real routing"
)


def _known_shape(name: str | None) -> str | None:
    """Refuse unknown shapes before torch is imported."""
    if name is None or name.endswith(".json"):
        return name
    require_address_space()
    from moe_runtime.benchmarks.synthetic.gguf_files import GGUF_SHAPES
    from moe_runtime.benchmarks.synthetic.model_shapes import SHAPES

    if name.isprintable():
        require_known("shape", name, (*SHAPES, *GGUF_SHAPES))
    return name


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The model, the work, and the systems that do it.

    Args:
        model: Folder of a safetensors checkpoint, a GGUF file, or a name on the hub.
        shape: Instead of MODEL: random weights in a shape such as olmoe-1b-7b, qwen3-30b-a3b,
            gpt-oss-20b or olmoe-small (a wrong name lists all), or in that of a configuration,
            CONFIG.json. The files go to the user's cache folder and are removed afterwards;
            llama_cpp gets a GGUF file.
        layers: Number of layers of --shape; all when omitted.
        keep_shape: Keep the files of --shape for later runs.
        peer: Another system to measure; repeatable. transformers (variants eager, grouped_mm),
            accelerate, llama_cpp, openvino, ftllm (cpu, disk), vllm, sglang, moe_runtime (this
            project with int8, planes, or the drafts none, lookup, mtp), or a file PEER.py.
            PYTHON is the interpreter of its environment, MODEL the same model in its own format.
        prompts: File with one prompt per line, as for `run`; with --shape its last tokens are the
            text that follows. Built-in text when omitted.
        prompt_tokens: Length of the built-in prompts.
        max_new_tokens: Tokens after each prompt. [32; quick: 16]
        routing: Route by a recorded trace of the same model instead of its gates; each text takes
            one request. The results then include bounds by reads and computation. CPU only.
        train: With --routing: other requests, which teach `--peer moe_runtime:reuse+taught`.
        cap: Limit each system's memory, page cache included, as in 7GiB, with a control group or
            systemd. Each repetition then starts with the model out of the page cache.
        agreement: Minimum share of a peer's top tokens that must equal ours.
    """

    model: Annotated[str | None, typer.Argument(metavar="MODEL")] = None
    shape: Annotated[str | None, typer.Option(callback=_known_shape)] = None
    layers: Annotated[int, typer.Option(min=1, max=1000)] | None = None
    keep_shape: bool = False
    peer: Peers = None
    prompts: Path | None = None
    prompt_tokens: options.Count = 64
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", "-n", min=2)] = None
    device: options.Device = "auto"
    host_memory: options.HostMemory = "auto"
    device_memory: options.DeviceMemory = "auto"
    misses: options.Misses = "device"
    policy: options.Policy = "auto"
    prefetch: options.Prefetch = "auto"
    predictor: options.Predictor = "auto"
    draft: options.Draft = "none"
    routing: Annotated[Path | None, typer.Option(metavar="TRACE")] = None
    train: Annotated[Path | None, typer.Option(metavar="TRACE")] = None
    threads: Threads = None
    cap: options.Size | None = None
    agreement: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.9
    config: options.Config = None


def bench_latency(run: TimedRun, asked: TextOptions) -> None:
    """Time single sequences: the first token, each further token, memory and bytes read.

    Systems take turns. Every repetition is a new process, until the means are known to --precision
    or the time is up. All systems get the same tokens; one whose top tokens differ gets no numbers.
    With --shape the tokens are text, unless a peer generates its own. Ctrl-C shows what was
    measured so far.
    """
    _measure(run, asked, "latency", 1, 2 if run.quick else 4)


def bench_throughput(
    run: TimedRun,
    asked: TextOptions,
    batch: Annotated[int, typer.Option(min=1, max=4096)] = 8,
    batches: options.Count | None = None,
) -> None:
    """Time batches of sequences: new tokens per second, prompts and steps.

    Works like `bench latency`. Shorter prompts are padded to the longest of their batch; padding
    does not count as work. Ctrl-C shows what was measured so far.

    Args:
        batch: Sequences in a batch.
        batches: Batches of built-in prompts. [2; quick: 1]
    """
    _measure(run, asked, "throughput", batch, batch * (batches or (1 if run.quick else 2)))


def _measure(
    run: TimedRun, asked: TextOptions, case_name: str, batch: int, num_built_in: int
) -> None:
    require_one(asked.model, asked.shape, "what is measured?")
    if asked.shape is None and (asked.layers is not None or asked.keep_shape):
        raise ValueError(f"{'--keep-shape' if asked.keep_shape else '--layers'} belongs to --shape")
    parse_budget(asked.host_memory, name="--host-memory")
    from moe_runtime.benchmarks.suite.peers import find_peers, our_program, writes_own_text

    names, shape = asked.peer or (), asked.shape
    find_peers(names, {}, case_name)  # refuses unknown peers before torch is imported
    device, gpus, memory = choose_device(run.ctx, asked.device, asked.device_memory)
    setting = "cpu" if device == "cpu" else "cuda:0"  # a GPU is the first one that systems see
    if asked.prompts is not None:
        words = "has no effect where --prompts says what to ask"
        refuse_given(run.ctx, {"prompt_tokens", "batches"} & run.ctx.params.keys(), words)
    if asked.routing is not None:
        refuse_given(run.ctx, {"prompts"}, "has no effect: --routing says what is asked")
    texts = None if asked.prompts is None else read_prompts(None, None, asked.prompts)
    limit = cap_bytes(asked.cap)
    found = find_peers(names, {"device": setting}, case_name)
    peers = [replace(one, gpus=gpus) for one in found]
    run.refuse_peer_files(peers)
    num_new = asked.max_new_tokens or (16 if run.quick else 32)
    batches = in_batches(range(num_built_in), batch)
    refuse_unrouted(asked, peers, device, num_built_in, num_new)
    quiet_transformers(run.session)
    from moe_runtime.benchmarks.cases.texts import CERTAIN, TextPlan, measure_texts
    from moe_runtime.lab.this_machine import num_usable_cores

    def read_ids(path: str) -> "Ids":
        given = texts, asked.prompt_tokens, num_built_in, num_new
        return prompt_ids(path, *given, has_after=shape is not None)

    with asked_model(asked, peers, read_ids, output=run.output) as model:
        given, after, routing = model.ids, None, None
        if asked.routing is not None:
            routing = routing_of(asked, model, batches, num_new)
            given = routing.token_ids
        if shape is not None or routing is not None:  # the last ids are the text that follows
            given, after = ([one[:-num_new] for one in given], [one[-num_new:] for one in given])
        facts = dict(model.facts)
        if asked.routing is not None:
            names_of = {"routing": asked.routing, "train": asked.train}
            facts |= {name: path.name for name, path in names_of.items() if path is not None}
        own = [one.name for one in peers if writes_own_text(one) and not model.failures[one.name]]
        if shape is not None and own:
            say_line(f"{own[0]} writes its own text: prompts go on as this project finds likeliest")
            facts["followed_by"], after = "likeliest tokens", None
        ours = {
            "model": model.path,
            "num_threads": asked.threads or num_usable_cores(),
            "max_tokens": (max(map(len, given)) + num_new) * min(batch, len(given)),
            "device": setting,
            "host_memory": asked.host_memory,
            "device_memory": memory,
            **{one: getattr(asked, one) for one in ("misses", "policy", "prefetch", "predictor")},
        }
        if routing is not None:
            ours["routes"] = str(routing.saved(model.cache))
            if shape is not None and asked.predictor == "auto":
                ours["predictor"] = "running-counts"  # random hidden states predict nothing
        if asked.draft != "none":
            ours["draft"] = asked.draft
        of_peers = ours | {"cap_bytes": limit}
        programs = [our_program(ours, limit), *find_peers(names, of_peers, case_name)]
        measured, *others = (replace(model.given_to(one), gpus=gpus) for one in programs)
        settings = {
            **{name: value for name, value in ours.items() if name not in ("model", "routes")},
            **facts,
            "device": device,
            "draft": Path(asked.draft).name,
            "cap_bytes": limit,
            **({"batch": batch} if case_name == "throughput" else {}),
            "prompt_tokens": [len(ids) for ids in given],
            "new_tokens": num_new,
            "agreement": asked.agreement,
        }
        plan = TextPlan(
            case=case_name,
            batches=in_batches(given, batch),
            num_new=num_new,
            agreement=asked.agreement,
            continuations=None if after is None else in_batches(after, batch),
            routing=routing,
        )
        with run.rules(*CERTAIN[case_name]) as rules:
            results = measure_texts(measured, others, plan, rules, settings)
    if "caution" in facts:
        say_line(facts["caution"])
    run.end(results, percentiles=(*CERTAIN["latency"], "step_tokens_per_s"))


def in_batches(ids: Sequence[Any], size: int) -> list[Any]:
    """Batches of ``size`` sequences; the last may be smaller."""
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def _words(program: "PeerProgram") -> list[str]:
    """The parts of a peer's variant."""
    return str(program.settings.get("variant") or "").split("+")


def refuse_unrouted(
    asked: TextOptions,
    peers: "Sequence[PeerProgram]",
    device: str,
    num_requests: int,
    num_new: int,
) -> None:
    """Refuse runs that a trace cannot route, and options that need one."""
    from moe_runtime.benchmarks.suite.peers import OURS

    taught = [one.name for one in peers if "taught" in _words(one)]
    for one in peers:
        if "trained" in _words(one) and one.name not in taught:
            raise ValueError(f"{one.name}: `trained` needs `taught`, which trains the predictor")
    if asked.routing is None:
        if asked.train is not None or taught:
            raise ValueError(f"{taught[0] if taught else '--train'} belongs to --routing TRACE")
        return
    if others := [one.name for one in peers if one.file.stem != OURS]:
        raise ValueError(
            f"--routing: {others[0]} follows its own gates; leave out --peer {others[0]}"
        )
    if device != "cpu":
        raise ValueError("--routing: a GPU's recorded steps follow the gates; give --device cpu")
    if (asked.train is not None) != bool(taught):
        raise ValueError("--train TRACE and --peer moe_runtime:reuse+taught belong together")
    from moe_runtime.policies.prediction import PREDICTORS

    named = {asked.predictor, *(word for one in peers for word in _words(one))}
    hidden = [name for name in named & PREDICTORS.keys() if PREDICTORS[name].needs_hidden]
    if hidden and asked.shape is not None:
        raise ValueError(
            f"--predictor {hidden[0]} looks at hidden states, which --routing has nothing to do "
            "with in random weights; name one that looks at routing alone, such as running-counts"
        )
    from moe_runtime.benchmarks.cases.routed import TracedModel, read_layers, take_routes
    from moe_runtime.benchmarks.synthetic.model_shapes import ModelShape
    from moe_runtime.types import ModelSignature

    if asked.shape is None or not isinstance(
        shape := _shape_of(asked.shape, asked.layers), ModelShape
    ):
        return  # found out from its files
    sizes = ("num_layers", "num_experts", "top_k", "vocab_size")
    signature = ModelSignature(
        model_type=str(shape.config()["model_type"]),
        **{one: getattr(shape, one) for one in sizes},
    )
    wanted = TracedModel(asked.shape, signature, _shape_of(asked.shape, None).num_layers)
    take_routes(asked.routing, wanted, num_requests, asked.prompt_tokens + num_new)
    if asked.train is not None:
        read_layers(asked.train, wanted)


def routing_of(
    asked: TextOptions, model: "AskedModel", batches: Sequence[Sequence[int]], num_new: int
) -> "RecordedRouting":
    """The routing of all texts. With --train, also train the network of ``reuse``."""
    from moe_runtime.benchmarks.cases.routed import RecordedRouting, teach
    from moe_runtime.checkpoints.opening import read_config
    from moe_runtime.inference.generation import check_length

    assert asked.routing is not None
    check_length(read_config(Path(model.path)), asked.prompt_tokens, num_new)
    layers = model.facts.get("layers_of_shape")
    routing = RecordedRouting(
        asked.routing, Path(model.path), layers, batches, asked.prompt_tokens, num_new
    )
    if asked.train is not None:
        say_line(f"the network of reuse is taught by {asked.train}")
        teach(asked.train, routing.asked, Path(model.path), model.cache / "taught")
    return routing


class AskedModel(NamedTuple):
    path: str
    ids: "Ids"
    cache: Path
    facts: dict[str, Any]
    failures: Mapping[str, str | None]
    gguf: Path | None = None

    def given_to(self, program: "PeerProgram") -> "PeerProgram":
        """A peer with its cache and files.

        Variants with ``taught`` get the trained network; ``trained`` selects its predictor by
        ``auto``. A peer that reads only GGUF files gets that of the shape, unless it has its own.
        """
        from moe_runtime.benchmarks.suite.peers import GGUF_PEERS, OURS

        words, kind, settings = _words(program), program.file.stem, program.settings
        cache = self.cache / "taught" if "taught" in words else self.cache
        if "trained" in words:
            settings = settings | {"predictor": "auto"}
        if self.gguf and kind in GGUF_PEERS and settings["model"] == self.path:
            settings = settings | {"model": str(self.gguf)}
        own = {"failure": self.failures.get(program.name), "settings": settings}
        return replace(program, cache=cache if kind == OURS else None, **own)


@contextmanager
def asked_model(
    asked: TextOptions,
    peers: "Sequence[PeerProgram]",
    read_ids: "Callable[[str], Ids]",
    *,
    output: Path | None,
) -> Iterator[AskedModel]:
    """MODEL, or the files of ``--shape``, which exist within the block."""
    with tempfile.TemporaryDirectory(prefix="moe-benchmark-") as folder:
        cache = Path(folder)
        if asked.shape is None:
            name, able = asked.model or "", {one.name: None for one in peers}
            path = str(fetch_model(name))
            yield AskedModel(path, read_ids(path), cache, {"model": Path(name).name}, able)
            return
        from moe_runtime.benchmarks.suite.peers import GGUF_PEERS, files_under, require_takes_shapes
        from moe_runtime.benchmarks.synthetic.gguf_files import FILE_NAME, GgufShape
        from moe_runtime.benchmarks.synthetic.shape_checkpoint import (
            shape_checkpoint,
            shapes_folder,
        )

        shape, whole = (_shape_of(asked.shape, layers) for layers in (asked.layers, None))
        require_takes_shapes(peers)
        require_not_read(output, "results", files_under(shapes_folder() / shape.name))
        (cache / "settings").mkdir()
        shape.write_settings(cache / "settings")
        ids = read_ids(str(cache / "settings"))
        failures = {one.name: _why_unable(one) for one in peers}
        is_gguf = isinstance(shape, GgufShape)
        needs_gguf = not is_gguf and any(
            one.file.stem in GGUF_PEERS and "model" not in one.settings and not failures[one.name]
            for one in peers
        )
        facts = {
            "model": shape.name if asked.shape.endswith(".json") else asked.shape,
            "layers": shape.num_layers,
            "layers_of_shape": whole.num_layers,
            "weights": "random",
            **({} if asked.routing else {"caution": _CAUTION}),
        }
        keeping = {"keep": asked.keep_shape, "needs_gguf": needs_gguf, "say": say_line}
        with shape_checkpoint(shape, shapes_folder(), **keeping) as files:
            gguf = files.gguf if needs_gguf else None
            path = files.checkpoint / FILE_NAME if is_gguf else files.checkpoint
            yield AskedModel(str(path), ids, cache, facts, failures, gguf)


def _shape_of(name: str, layers: int | None) -> "Shape":
    from moe_runtime.benchmarks.synthetic.config_shape import read_config_shape
    from moe_runtime.benchmarks.synthetic.gguf_files import GGUF_SHAPES
    from moe_runtime.benchmarks.synthetic.model_shapes import SHAPES, with_layers

    if name.endswith(".json"):
        if layers is not None:
            raise ValueError(f"--layers: how many layers there are, {name} says; change it there")
        return read_config_shape(Path(at_home(name)))
    return with_layers({**SHAPES, **GGUF_SHAPES}, name, layers)


def _why_unable(program: "PeerProgram") -> str | None:
    """Why a peer cannot run here; checked before a model is written."""
    from moe_runtime.benchmarks.suite.peers import why_unable

    say_line(f"{program.name}: is started once, to see that it can run")
    nothing = {"model": "model.gguf", "num_threads": 1, "max_tokens": 1, "cap_bytes": None}
    tried = replace(program, settings=nothing | program.settings)
    if reason := why_unable(tried, _START_S):
        say_line(f"{program.name}: cannot run, and is left out: {reason}")
    return reason


def prompt_ids(
    model: str,
    texts: Sequence[str] | None,
    num_tokens: int,
    num_built_in: int,
    num_new: int,
    *,
    has_after: bool,
) -> "Ids":
    """Token ids of the given texts, or of built-in prompts."""
    from moe_runtime.benchmarks.synthetic.texts import cut_prompts
    from moe_runtime.checkpoints.opening import load_tokenizer, read_config
    from moe_runtime.inference.generation import check_length, encode_prompt

    tokenizer, config = load_tokenizer(Path(model)), read_config(Path(model))
    if texts is None:
        check_length(config, num_tokens, num_new)
        return cut_prompts(tokenizer, num_built_in, num_tokens + num_new * has_after)
    found = [encode_prompt(tokenizer, text)["input_ids"][0].tolist() for text in texts]
    check_length(config, max(map(len, found)), 0 if has_after else num_new)
    if has_after and min(map(len, found)) <= num_new:
        raise ValueError(
            f"--prompts: the last {num_new} tokens of a prompt are the text that follows it, and "
            f"one has {min(map(len, found))}; give longer ones, or a smaller --max-new-tokens"
        )
    return found


def choose_device(
    ctx: typer.Context, device: str, device_memory: str
) -> tuple[str, str, int | float | str]:
    """Resolve ``--device`` and ``--device-memory``; ``auto`` works as for ``run``.

    Returns:
        The device, the GPUs that systems see, and the budget of device memory.
    """
    budget = parse_budget(device_memory, name="--device-memory")
    import torch

    if "," in device:
        raise ValueError(f"--device {device}: systems are compared on one GPU; name one")
    kind, _, number = device.partition(":")
    if kind == "cpu" or not torch.cuda.device_count():  # NVML's, which needs no context on them
        why = f"is about a GPU, and this run is on the CPU (--device {device})"
        refuse_given(ctx, {"device_memory", "misses"}, why)
        return "cpu", "", "auto"
    index = int(number or 0)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = str(index) if seen is None else seen.split(",")[index]
    return f"cuda:{index}", gpus, budget.num_bytes or budget.share or "auto"
