"""Generation, caches, attention and batching: rows of the table of features."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from feature_rows import Feature, outcome
from tiny_checkpoints import PROMPT
from torch import Tensor
from transformers import (
    CompileConfig,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteriaList,
)

from moe_runtime.checkpoints.transformers_private import page_size_name

SHORT = PROMPT[:, :4]
GENERATION, OUTPUTS = "Generation", "Outputs"
FEW_BLOCKS = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32)
setattr(FEW_BLOCKS, page_size_name(FEW_BLOCKS), 16)
CACHES, ATTENTION, BATCHES = "Caches", "Attention", "Batches"


def generate(model: Any, ids: Tensor = PROMPT, **options: Any) -> Any:
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 95}
    return model.generate(ids, **{**given, **options})


def generating(name: str, methods: tuple[str, ...] = (), **options: Any) -> Feature:
    return Feature(
        GENERATION, name, lambda m, _: generate(m, **options), methods=methods, leaves_model=True
    )


def sampled(model: Any, _: Path) -> Tensor:
    torch.manual_seed(3)
    return generate(model, do_sample=True, temperature=0.8, top_k=20, top_p=0.9)


def streamed(model: Any, _: Path) -> list[list[int]]:
    class Collecting:
        def __init__(self) -> None:
            self.pieces: list[list[int]] = []

        def put(self, value: Tensor) -> None:
            self.pieces.append(value.flatten().tolist())

        def end(self) -> None:
            self.pieces.append([])

    streamer = Collecting()
    generate(model, streamer=streamer)
    return streamer.pieces


def processed(model: Any, _: Path) -> Tensor:
    def even(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.arange(1, scores.shape[1], 2), -torch.inf)

    return generate(model, logits_processor=LogitsProcessorList([even]))


def stopped(model: Any, _: Path) -> Tensor:
    def enough(ids: Tensor, scores: Any, **__: Any) -> Tensor:
        return torch.full((len(ids),), ids.shape[1] >= 14)

    return generate(model, stopping_criteria=StoppingCriteriaList([enough]))


def assisted(model: Any, _: Path) -> Tensor:
    """Greedy decoding with itself as assistant: every guess is right."""
    return generate(model, assistant_model=model)


@torch.no_grad()
def compiled_call(model: Any, _: Path) -> Any:
    """The call that generation with a static cache has compiled, and keeps."""
    made = []

    def compiled(call: Any, **options: Any) -> Any:
        made.append(options["backend"])
        return call

    with mock.patch("torch.compile", compiled):
        calls = [model.get_compiled_call(CompileConfig(backend="eager")) for _ in range(2)]
    return [call(input_ids=PROMPT).logits for call in calls], made


@torch.no_grad()
def call_of_graphs(model: Any, _: Path) -> Any:
    # a graph of the model of transformers takes long, and would compute what the model does
    call = model.get_compiled_call(CompileConfig(backend="eager", fullgraph=False))
    return (call if hasattr(model, "moe") else model)(input_ids=PROMPT).logits


def recorded(model: Any, _: Path) -> Any:
    model.set_attn_implementation("eager")
    names = ("scores", "logits", "hidden_states", "attentions")
    wanted = {f"output_{name}": True for name in names}
    out = generate(model, return_dict_in_generate=True, **wanted)
    return [out.sequences, *(getattr(out, name) for name in names)]


def transitions(model: Any, _: Path) -> Tensor:
    out = generate(model, num_beams=2, return_dict_in_generate=True, output_scores=True)
    return model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)


@torch.no_grad()
def forward_outputs(model: Any, _: Path) -> Any:
    model.set_attn_implementation("eager")
    names = ("hidden_states", "attentions", "router_logits")
    out = model(PROMPT, labels=PROMPT, **{f"output_{name}": True for name in names})
    return [out.loss, out.logits, *(getattr(out, name) for name in names)]


@torch.no_grad()
def padded(model: Any, _: Path) -> Any:
    ids = torch.cat((torch.nn.functional.pad(SHORT, (PROMPT.shape[1] - SHORT.shape[1], 0)), PROMPT))
    mask = torch.ones_like(ids)
    mask[0, : -SHORT.shape[1]] = 0
    inside = model(ids, attention_mask=mask).logits[mask.bool()]
    return inside, generate(model, ids, attention_mask=mask)


def with_cache(kind: str) -> Any:
    return lambda model, _: outcome(lambda: generate(model, cache_implementation=kind))


def own_cache(make: Any) -> Any:
    def trial(model: Any, _: Path) -> list[Tensor]:
        cache = make(model)
        first = generate(model, past_key_values=cache)
        return [first, generate(model, first, past_key_values=cache)]

    return trial


def attention(name: str) -> Any:
    @torch.no_grad()
    def trial(model: Any, _: Path) -> Any:
        model.set_attn_implementation(name)
        return model.config._attn_implementation, model(PROMPT).logits, generate(model)

    return trial


def batch(model: Any, _: Path, **options: Any) -> list[list[int]]:
    settings = GenerationConfig(
        max_new_tokens=4, do_sample=False, eos_token_id=95, pad_token_id=0, **options
    )
    found = model.generate_batch(
        [PROMPT[0].tolist(), SHORT[0].tolist()],
        generation_config=settings,
        continuous_batching_config=FEW_BLOCKS,
        progress_bar=False,
    )
    return [found[request].generated_tokens for request in sorted(found)]


def batch_manager(model: Any, _: Path) -> Any:
    settings = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=95, pad_token_id=0)
    batching = model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=FEW_BLOCKS
    )
    with batching as manager:
        request = manager.add_request(PROMPT[0].tolist())
        tokens = manager.get_result(request_id=request, timeout=600).generated_tokens
    return tokens, model.generate(PROMPT, generation_config=settings)


FEATURES = [
    generating("greedy", ("generate",)),
    Feature(GENERATION, "sampling, with its seed", sampled, leaves_model=True),
    generating("beam search", num_beams=3),
    generating("beam search, several sequences", num_beams=3, num_return_sequences=2),
    generating("prompt lookup", prompt_lookup_num_tokens=2),
    Feature(GENERATION, "assistant model", assisted),
    generating("allowed tokens", prefix_allowed_tokens_fn=lambda _, __: list(range(40, 60))),
    generating("banned words, biases and repetition penalty", bad_words_ids=[[27]],
               sequence_bias={(13,): 5.0}, repetition_penalty=1.3, no_repeat_ngram_size=2),
    generating("guidance without a classifier", guidance_scale=1.5),
    generating("chunks of a prompt", prefill_chunk_size=4),
    generating("without a cache", use_cache=False),
    Feature(GENERATION, "contrastive, constrained and other searches from the hub",
            lambda m, _: outcome(lambda: generate(m, penalty_alpha=0.6, top_k=4)),
            methods=("load_custom_generate",)),
    Feature(GENERATION, "streamer", streamed, leaves_model=True),
    Feature(GENERATION, "logits processors", processed, leaves_model=True),
    Feature(GENERATION, "stopping criteria", stopped, leaves_model=True),
    Feature(GENERATION, "compiled call", compiled_call, methods=("get_compiled_call",)),
    Feature(GENERATION, "compiled call: experts between graphs", call_of_graphs, is_long=True),
    Feature(OUTPUTS, "scores, logits, hidden states and attentions of generation", recorded),
    Feature(OUTPUTS, "transition scores", transitions, methods=("compute_transition_scores",),
            leaves_model=True),
    Feature(OUTPUTS, "loss, hidden states, attentions and router logits", forward_outputs,
            methods=("loss_function", "can_record_outputs")),
    Feature(CACHES, "dynamic", own_cache(lambda model: DynamicCache(config=model.config)),
            leaves_model=True),
    Feature(CACHES, "static",
            own_cache(lambda model: StaticCache(config=model.config, max_cache_len=64))),
    Feature(CACHES, "`cache_implementation=\"static\"`", with_cache("static")),
    Feature(CACHES, "offloaded (on a CPU, transformers refuses it)", with_cache("offloaded")),
    Feature(CACHES, "offloaded static", with_cache("offloaded_static")),
    Feature(CACHES, "quantised (with its package)", with_cache("quantized")),
    Feature(CACHES, "sliding window", own_cache(lambda model: DynamicCache(config=model.config)),
            family="gpt_oss"),
    *(Feature(ATTENTION, f"`{name}`", attention(name), methods=("set_attn_implementation",))
      for name in ("eager", "sdpa")),
    Feature(ATTENTION, "`flex_attention`",
            lambda m, _: outcome(lambda: attention("flex_attention")(m, _)), is_long=True),
    Feature(BATCHES, "left padding", padded, leaves_model=True,
            methods=("warn_if_padding_and_no_attention_mask",)),
    Feature(BATCHES, "continuous batching", batch,
            methods=("generate_batch", "init_continuous_batching",
                     "destroy_cached_continuous_batching_manager")),
    Feature(BATCHES, "continuous batching, its manager", batch_manager, is_long=True,
            methods=("continuous_batching_context_manager",)),
]  # fmt: skip
