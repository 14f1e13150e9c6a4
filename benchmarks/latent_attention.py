"""Decoding with multi-head latent attention at several contexts, beside transformers.

`python benchmarks/latent_attention.py --save` makes a model in the form of DeepSeek-V3, a few
layers of random weights in bf16, and decodes one token after another behind caches of random
latents: by transformers, which expands all that is cached at every step, by this runtime, which
attends to the latents, and by this runtime made to expand them. All have every expert in memory,
the same threads, and take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from harness.machine import commit, describe_machine, machine_name, versions
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

import moe_runtime
from moe_runtime.files import write_text

ROOT = Path(__file__).resolve().parent.parent
SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "moe_intermediate_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 16384,
}


def main() -> None:
    """Makes the model, times, prints and saves."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    config = DeepseekV3Config(**SIZES, num_hidden_layers=arguments.layers)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        DeepseekV3ForCausalLM(config).save_pretrained(folder)
        torch.set_default_dtype(torch.float32)
        theirs = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        longest = max(arguments.contexts) + 1024
        ours: Any = moe_runtime.load(
            folder, device="cpu", host_memory=arguments.host_memory, max_tokens=longest
        )
    with ours.moe:
        rows = [compare(ours, theirs, context, arguments) for context in arguments.contexts]
    if arguments.save is not None:
        save(arguments, rows)


def compare(ours: Any, theirs: Any, context: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second behind a cache of so many tokens, in turn.

    The caches grow by the tokens that are decoded. Ratios are of ours to another's, medians over
    the turns. `difference` is the largest between the first logits and those of transformers, over
    the largest of these.
    """
    generator = torch.Generator().manual_seed(context)
    latents = [
        [torch.randn(1, 1, context, width, generator=generator).bfloat16() for width in (512, 64)]
        for _ in range(arguments.layers)
    ]
    models = {"ours": ours, "expanding": ours, "transformers": theirs}
    runs: dict[str, list[float]] = {name: [] for name in models}
    caches, logits = {}, {}
    for name, model in models.items():
        caches[name] = cache = DynamicCache(config=model.config)
        for layer, (kv, turned) in enumerate(latents):
            cache.update(kv.clone(), turned.clone(), layer)
        logits[name] = _step(name, model, cache).float()
    for _ in range(arguments.runs):
        for name, model in models.items():
            begin, steps = time.perf_counter(), 0
            while steps < 1 or time.perf_counter() - begin < arguments.seconds:
                _step(name, model, caches[name])
                steps += 1
            runs[name].append(steps / (time.perf_counter() - begin))
    row: dict[str, Any] = {"context": context}
    largest = logits["transformers"].abs().max()
    for name, found in runs.items():
        gap = (logits[name] - logits["transformers"]).abs().max() / largest
        ratio = statistics.median(a / b for a, b in zip(runs["ours"], found, strict=True))
        row[name] = {
            "tokens_per_s": round(statistics.median(found), 2),
            "tokens_per_s_of_runs": [round(rate, 2) for rate in found],
            "ours_over_it": round(ratio, 2),
            "difference": round(float(gap), 5),
        }
        print(f"{context} tokens, {name}: {json.dumps(row[name])}", flush=True)
    return row


def _step(name: str, model: Any, cache: DynamicCache) -> torch.Tensor:
    """Logits of one more token, whatever it is."""
    layers = [block.self_attn for block in model.model.layers] if name == "expanding" else []
    kept = [vars(layer).pop("expand_kv") for layer in layers]
    with torch.inference_mode():
        token = torch.tensor([[17]])
        found = model(input_ids=token, past_key_values=cache, use_cache=True).logits
    for layer, expand in zip(layers, kept, strict=True):
        vars(layer)["expand_kv"] = expand
    return found


def save(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Writes the results file."""
    machine = describe_machine()
    name = f"latent-attention-{machine_name(machine)}.json"
    output = arguments.save if arguments.save.name else ROOT / "benchmarks" / "results" / name
    results = {
        "command": f"python benchmarks/latent_attention.py --threads {arguments.threads} --save",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(ROOT),
        "machine": machine,
        "versions": versions(),
        "settings": {**SIZES, "num_hidden_layers": arguments.layers, "dtype": "bfloat16"}
        | {"threads": arguments.threads, "seconds": arguments.seconds},
        "rows": rows,
    }
    write_text(output, json.dumps(results, indent=1) + "\n")
    print(f"wrote {output}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 2048, 8192])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--host-memory", default="4GiB", help="all experts must fit")
    parser.add_argument("--runs", type=int, default=3, help="of each, in turn")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="of a run, and one step at least"
    )
    parser.add_argument("--save", type=Path, nargs="?", const=Path(), help="write the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
