"""What commands of ``bench`` refuse: one line that says what to change, and exit code 2."""

import shlex
from pathlib import Path

import pytest
import torch
from synthetic_routes import make_routes
from traces import trace_of

from moe_runtime.cli.main import main
from moe_runtime.lab.traces import write_trace
from moe_runtime.policies.prediction import Shape

POCKET = str(Path(__file__).resolve().parents[2] / "models" / "pocket")
REFUSED = {
    "latency MODEL --peer llamacp": "did you mean 'llama_cpp'? known: accelerate, ftllm, llama_cpp",
    "latency MODEL --peer transformers:eagre": "eager",
    "latency MODEL --peer none.py": "--peer none.py: no such file",
    "latency MODEL --peer vllm@t.npz": "--peer vllm@t.npz: t.npz is not an interpreter",
    "latency MODEL --peer vllm@no/python": "--peer vllm@no/python: no interpreter no/python",
    "latency MODEL --peer openvino=no/folder": "--peer openvino=no/folder: no/folder is not there",
    "latency MODEL --prompts p.txt --prompt-tokens 3": "has no effect",
    "latency MODEL -n 1": "max-new-tokens",
    "latency MODEL -n 100000000 --host-memory 1GiB": "but the model knows 512 positions",
    "latency MODEL --routing t.npz": "t.npz: is a trace of synthetic with 3 layers of",
    "latency MODEL --routing t.npz --peer transformers": "follows its own gates; leave out --peer",
    "latency MODEL --routing t.npz --prompts p.txt": "--prompts has no effect: --routing says what",
    "latency --shape gpt-oss-tiny --routing t.npz --predictor next-gate": "hidden states",
    "latency --shape gpt-oss-tiny --routing t.npz --peer moe_runtime:next-gate": "hidden states",
    "latency MODEL --routing t.npz --train t.npz": "belong together",
    "latency MODEL --routing t.npz --peer moe_runtime:lru+trained": "`trained` needs `taught`",
    "latency MODEL --train t.npz": "--train belongs to --routing TRACE",
    "throughput MODEL --peer moe_runtime:reuse+taught": "taught belongs to --routing TRACE",
    "latency MODEL --peer moe_runtime:reuse+lfu": "unknown variant of moe_runtime 'lfu'",
    "latency --shape gpt-oss-tiny --routing t.npz": "gpt-oss-tiny is gpt_oss with 4 layers of 16",
    "latency": "expected MODEL or --shape, one of them",
    "throughput MODEL --layers 2": "--layers belongs to --shape",
    "latency MODEL --keep-shape": "--keep-shape belongs to --shape",
    "throughput --shape olmo-1b-7b": "unknown shape 'olmo-1b-7b'",
    "throughput MODEL --prompts p.txt --batches 3": "has no effect",
    "throughput MODEL --batch 0": "--batch",
    "throughput MODEL --peer llama_cpp": "takes part in bench latency, not in bench throughput",
    "latency MODEL --peer kt_kernel": "takes part in bench experts, not",
    "experts --shape olmoe-1b-7b --peer vllm": "not in bench experts",
    "experts --shape olmoe-1b-7b --peer kt_kernel=no": "no is not there",
    "training --shape pocket --peer deepspeed=.": "leave =MODEL out",
    "io MODEL --in-flight 0": "--in-flight",
    "experts": "expected MODEL or --shape",
    "experts --shape olmo": "unknown shape 'olmo'",
    "experts MODEL --tokens ''": "--tokens must be whole numbers",
    "experts MODEL --dtype int8": "int8",
    "experts MODEL --device tpu": "--device must be auto, cpu, cuda or cuda:N, got 'tpu'",
    "experts MODEL --formats int3": "unknown format of --formats 'int3'",
    "experts MODEL --formats int4 --training": "in bfloat16 on a CPU alone, not --training",
    "experts MODEL --formats int4 --dtype float32": "alone, not --dtype float32",
    "experts MODEL --formats q4_k --peer kt_kernel": "has bf16, fp8, mxfp4, int4-int8; none is",
    "training --shape pocket --dtype float64": "--dtype must be float32 or bfloat16",
    "training --shape pocket --isa sse": "unknown --isa 'sse': known: avx2, avx512",
    "training --shape 300m --layers 1000": "fewer --layers",
    "dispatch --load zpif": "unknown load 'zpif'",
    "dispatch --experts 5": "a multiple of the 2 ranks",
    "dispatch --top-k 9 --experts 8": "at most --experts",
    "policies t.npz --policy lruu": "unknown policy 'lruu'",
    "policies t.npz --scope all": "unknown scope 'all'",
    "policies t.npz --capacity 1%": "a token needs",
    "policies t.npz --num-experts 8": "leave out the number of experts, 8",
    "policies t.npz --side-by-side 9": "expected a trace of at least 9 requests",
    "policies t.npz --side-by-side 2 --reset": "requests of this trace run at the same time",
    "policies t.npz --policy lru --train t.npz": "of lru nothing learns",
    "policies t.npz --capacity x": "--capacity must be shares",
    "policies t.npz --policy predicted": "the policy predicted and --predictor",
    "policies t.npz --policy predicted --predictor eam": "--predictor eam needs --train",
    "policies t.npz --policy lru --expert-size 1MiB,2MiB": "--expert-size must be one size, 3 for",
    "predictors t.npz --predictor popularty": "unknown predictor 'popularty'",
    "predictors t.npz --predictor next-gate": "looks at hidden states",
    "predictors t.npz --distances 3": "--distances must be below 3",
    "predictors t.npz --layer-time 1": "give --bandwidth too",
    "predictors t.npz --test-share 0.95": "leaves nothing to train",
    "predictors t.npz --train t.npz --test-share 0.5": "--test-share has no effect",
    "predictors t.npz --train t.npz": "every sequence repeats one of --train",
    "predictors t.npz --train t.npz --seed 1": "--seed has no effect",
    "predictors t.npz --train wide.npz": "wide.npz: is a trace of",
    "predictors t.npz -o t.npz": "t.npz",
    "predictors": "expected at least one TRACE",
    "placements t.npz --gpus 4 --nodes 3": "--gpus 4 is not a multiple of --nodes 3",
    "placements t.npz --gpus 3": "16 experts and 0 replicas do not divide among 3 devices; 2",
    "placements t.npz --gpus 2 --replicas 17": "17 replicas are more than 2 devices have a use for",
    "placements t.npz --gpus 2 --fit 1": "leaves nothing to place by",
    "placements t.npz --gpus 2 --num-experts 4": "leave out the number of experts, 4",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a trace, and one of another model."""
    folder = tmp_path_factory.mktemp("traces")
    for name, num_experts, count in (("t", 16, 8), ("wide", 17, 2)):
        routes = make_routes(
            Shape(num_layers=3, num_experts=num_experts, top_k=2), num_sequences=count
        )
        write_trace(folder / f"{name}.npz", trace_of(routes))
    return folder


@pytest.mark.parametrize("words", REFUSED)
def test_one_line_says_what_to_change(words, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    asked = [POCKET if word == "MODEL" else word for word in shlex.split(words)]
    assert main(["bench", *asked]) == 2
    err = [one for one in capsys.readouterr().err.splitlines() if "fitting it" not in one]
    assert REFUSED[words] in err[0]
    assert len(err) == 1


@pytest.mark.parametrize(
    ("count", "words", "complaint"),
    [
        (2, "--device cuda:2", "--device cuda:2: torch sees GPUs up to cuda:1 here"),
        (0, "--device-memory 3GiB", "--device-memory is about a GPU"),
        (2, "--misses auto --device cpu", "--misses is about a GPU"),
        (2, "--device-memory lots", "--device-memory must be a size"),
        (2, "--peer openvino", "--peer openvino: computes on cpu alone"),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_anything_is_written(
    count, words, complaint, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    output = ["-o", str(tmp_path / "r.json")]
    assert main(["bench", "throughput", "--shape", "olmoe-tiny", *words.split(), *output]) == 2
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1
    assert [*tmp_path.iterdir()] == []
