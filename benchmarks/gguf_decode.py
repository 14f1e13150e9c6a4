"""A GGUF file as of Qwen3.6-35B-A3B beside llama.cpp: `python benchmarks/gguf_decode.py`.

Some layers with that model's sizes (three of four of linear attention), random blocks as in
Q4_K_M: experts in Q4_K and Q6_K, other matrices in Q8_0. Everything is in memory. llama.cpp's
`llama-bench` (`--llama-bench PATH`) and ours take turns; each round times a prompt and a decode.
Needs the `gguf` package. `--save` writes this machine's results file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from harness.machine import machine_name, run_facts

import moe_runtime
from moe_runtime.checkpoints.transformers_private import cache_name, cache_of
from moe_runtime.files import write_text

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURE = "qwen35moe"
HIDDEN, EXPERTS, CHOSEN, WIDTH = 2048, 256, 8, 512
HEADS, KEY_VALUE_HEADS, HEAD_DIM, ROTATED = 16, 2, 256, 64
KEYS, VALUES, LINEAR_DIM, TAPS = 16, 32, 128, 4
VOCABULARY, CONTEXT = 4096, 4096
PROMPT, STEPS = 512, 32
HALVES = {Kind.Q4_K: (0, 2), Kind.Q6_K: (208,), Kind.Q8_0: (0,)}
"""Where the fp16 numbers of a block lie, in bytes."""


def main() -> None:
    """Measures in turn, and prints the medians."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    facts = run_facts(ROOT)
    rates: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="moe-benchmark-") as temporary:
        file = (arguments.data or Path(temporary)) / "model.gguf"
        if not file.is_file():
            write_model(file, arguments.layers)
        model: Any = moe_runtime.load(
            file, device="cpu", max_tokens=CONTEXT, activations=arguments.activations
        )
        with model.moe, torch.inference_mode():
            ours(model)  # experts are read
            for number in range(arguments.rounds):
                systems = {"ours": lambda: ours(model)}
                if arguments.llama_bench is not None:
                    systems["llama.cpp"] = lambda: llama_bench(file, arguments)
                for name in sorted(systems, reverse=number % 2 == 1):
                    for what, rate in systems[name]().items():
                        rates.setdefault(name, {}).setdefault(what, []).append(rate)
                        print(f"{name}: {what} {rate:.2f} tokens/s", flush=True)
    medians = {
        name: {what: round(statistics.median(found), 2) for what, found in own.items()}
        for name, own in rates.items()
    }
    result = {**facts, "settings": settings(arguments), "rates": rates, "tokens_per_s": medians}
    if "llama.cpp" in medians:
        result["ours_over_llama_cpp"] = {
            what: round(rate / medians["llama.cpp"][what], 2)
            for what, rate in medians["ours"].items()
        }
    print(json.dumps({key: result[key] for key in result if key not in facts}, indent=1))
    if arguments.save:
        rounded = "int8-" if arguments.activations == "int8" else ""
        name = f"gguf-decode-{rounded}{machine_name(facts['machine'])}.json"
        write_text(ROOT / "benchmarks" / "results" / name, json.dumps(result, indent=1) + "\n")
        print(f"written to {name}")


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was measured."""
    return {
        **{"layers": arguments.layers, "hidden_size": HIDDEN, "num_experts": EXPERTS},
        **{"num_experts_per_tok": CHOSEN, "moe_intermediate_size": WIDTH},
        **{"prompt_tokens": PROMPT, "decoded_tokens": STEPS, "threads": arguments.threads},
        "activations": arguments.activations,
    }


def ours(model: Any) -> dict[str, float]:
    """Tokens a second of a prompt, and of a decode behind one token."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (1, PROMPT + STEPS), generator=generator)
    begin_s = time.perf_counter()
    model(tokens[:, :PROMPT], use_cache=True, logits_to_keep=1)
    prompt_s = time.perf_counter() - begin_s
    cache = cache_of(model(tokens[:, :1], use_cache=True))
    begin_s = time.perf_counter()
    for step in range(STEPS):
        token = tokens[:, PROMPT + step, None]
        model(token, use_cache=True, **{cache_name(model.forward): cache})
    return {"prompt": PROMPT / prompt_s, "decode": STEPS / (time.perf_counter() - begin_s)}


def llama_bench(file: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """The same in llama.cpp, which draws tokens of its own."""
    words = [
        arguments.llama_bench.absolute(),
        "-m",
        file,
        "-p",
        PROMPT,
        "-n",
        STEPS,
        "-r",
        1,
        "-o",
        "json",
    ]
    found = subprocess.run(
        [*map(str, words), "-t", str(arguments.threads)], check=True, capture_output=True
    )
    rows = json.loads(found.stdout)
    return {"prompt" if row["n_prompt"] else "decode": row["avg_ts"] for row in rows}


def write_model(file: Path, num_layers: int) -> None:
    """A file of random blocks whose numbers are about as large as a trained model's."""
    writer = gguf.GGUFWriter(file, ARCHITECTURE)
    add_metadata(writer, num_layers)
    generator = np.random.default_rng(0)

    def matrix(name: str, *sizes: int, kind: Kind = Kind.Q8_0) -> None:
        writer.add_tensor(f"{name}.weight", blocks(sizes, kind, generator), raw_dtype=kind)

    def plain(name: str, *sizes: int, scale: float = 1.0, shift: float = 0.0) -> None:
        numbers = generator.standard_normal(sizes, dtype=np.float32)
        writer.add_tensor(name, scale * numbers + np.float32(shift))

    matrix("token_embd", VOCABULARY, HIDDEN)
    matrix("output", VOCABULARY, HIDDEN)
    plain("output_norm.weight", HIDDEN, scale=0.1, shift=1)
    linear = 2 * KEYS * LINEAR_DIM + VALUES * LINEAR_DIM
    for layer in range(num_layers):
        block = f"blk.{layer}."
        for name in ("attn_norm", "post_attention_norm"):
            plain(f"{block}{name}.weight", HIDDEN, scale=0.1, shift=1)
        if layer % 4 == 3:
            matrix(f"{block}attn_q", 2 * HEADS * HEAD_DIM, HIDDEN)
            matrix(f"{block}attn_k", KEY_VALUE_HEADS * HEAD_DIM, HIDDEN)
            matrix(f"{block}attn_v", KEY_VALUE_HEADS * HEAD_DIM, HIDDEN)
            matrix(f"{block}attn_output", HIDDEN, HEADS * HEAD_DIM)
            for name in ("attn_q_norm", "attn_k_norm"):
                plain(f"{block}{name}.weight", HEAD_DIM, scale=0.1, shift=1)
        else:
            matrix(f"{block}attn_qkv", linear, HIDDEN)
            matrix(f"{block}attn_gate", VALUES * LINEAR_DIM, HIDDEN)
            matrix(f"{block}ssm_alpha", VALUES, HIDDEN)
            matrix(f"{block}ssm_beta", VALUES, HIDDEN)
            matrix(f"{block}ssm_out", HIDDEN, VALUES * LINEAR_DIM)
            plain(f"{block}ssm_conv1d.weight", linear, TAPS, scale=0.3)
            plain(f"{block}ssm_dt.bias", VALUES)
            decay = -np.exp(generator.standard_normal(VALUES, dtype=np.float32))
            writer.add_tensor(f"{block}ssm_a", decay)
            plain(f"{block}ssm_norm.weight", LINEAR_DIM, scale=0.1, shift=1)
        plain(f"{block}ffn_gate_inp.weight", EXPERTS, HIDDEN, scale=HIDDEN**-0.5)
        plain(f"{block}ffn_gate_inp_shexp.weight", HIDDEN, scale=HIDDEN**-0.5)
        for name in ("gate", "up"):
            matrix(f"{block}ffn_{name}_exps", EXPERTS, WIDTH, HIDDEN, kind=Kind.Q4_K)
            matrix(f"{block}ffn_{name}_shexp", WIDTH, HIDDEN)
        matrix(f"{block}ffn_down_exps", EXPERTS, HIDDEN, WIDTH, kind=Kind.Q6_K)
        matrix(f"{block}ffn_down_shexp", HIDDEN, WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blocks(sizes: tuple[int, ...], kind: Kind, generator: np.random.Generator) -> np.ndarray:
    """Random blocks, with scales for numbers of a standard deviation of one over the root of K."""
    values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    *lead, num_cols = sizes
    shape = (*lead, num_cols // values, num_bytes)
    found = np.frombuffer(generator.bytes(int(np.prod(shape))), np.uint8).reshape(shape).copy()
    spread = {Kind.Q4_K: 350.0, Kind.Q6_K: 1400.0, Kind.Q8_0: 74.0}[kind]
    scale = np.frombuffer(np.float16(num_cols**-0.5 / spread).tobytes(), np.uint8)
    for place in HALVES[kind]:
        found[..., place : place + 2] = scale
    return found.reshape(*lead, -1)


def add_metadata(writer: Any, num_layers: int) -> None:
    """As llama.cpp's converter writes it."""
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(num_layers)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(ROTATED)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(TAPS)
    writer.add_ssm_state_size(LINEAR_DIM)
    writer.add_ssm_group_count(KEYS)
    writer.add_ssm_time_step_rank(VALUES)
    writer.add_ssm_inner_size(VALUES * LINEAR_DIM)
    writer.add_uint32(f"{ARCHITECTURE}.full_attention_interval", 4)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(CHOSEN)
    writer.add_expert_feed_forward_length(WIDTH)
    writer.add_expert_shared_feed_forward_length(WIDTH)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"<{number}>" for number in range(VOCABULARY)])
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * VOCABULARY)
    writer.add_token_merges(["< 1"])
    writer.add_eos_token_id(0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's program; else ours alone")
    parser.add_argument("--data", type=Path, help="folder that keeps the file; else temporary")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--activations", choices=("exact", "int8"), default="exact")
    parser.add_argument("--save", action="store_true", help="write this machine's results file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
