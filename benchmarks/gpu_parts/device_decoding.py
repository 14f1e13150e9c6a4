"""Greedy decoding of one sequence on a device: its speed, its misses, and whose logits it has."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from moe_runtime.benchmarks.gpu_parts.device_rates import median_s, wait_for
from moe_runtime.benchmarks.gpu_parts.gpu_results import Repetitions

MEMORY = ("budget_bytes", "peak_bytes", "peak_reserved_bytes")


class Prompts(NamedTuple):
    """What is asked: several short prompts `[N, T]`, and a long one `[1, T]`."""

    short_NT: Tensor
    long_1T: Tensor


class Answer(NamedTuple):
    """Greedy tokens `[N]` and the logits `[N, V]` that they were taken from."""

    tokens_N: Tensor
    logits_NV: Tensor


class TokenClock(BaseStreamer):
    """Knows when `generate` had its first and its last new token, on the host.

    Args:
        on_first: called before the clock starts with the first token.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._is_prompt = True
        self.num_tokens = 0
        self.first_s = self.last_s = 0.0

    def put(self, value: Tensor) -> None:
        """Called with the prompt, and then with every token."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self.num_tokens += 1
        if self.num_tokens == 1:
            self._on_first()
            self.first_s = time.perf_counter()
        self.last_s = time.perf_counter()

    def end(self) -> None:
        """Nothing is held back."""

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens after the first."""
        return (self.num_tokens - 1) / (self.last_s - self.first_s)


def prepare_generation(model: Any) -> None:
    """Texts have no end."""
    model.generation_config.eos_token_id = None


def answer_of(model: Any, prompt_T: Tensor, num_tokens: int, **options: Any) -> Answer:
    """What a model says, and why; also a warm-up."""
    found = model.generate(
        prompt_T[None], max_new_tokens=num_tokens, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return Answer(found.sequences[0, len(prompt_T) :], torch.cat(found.logits))


def decode(model: Any, prompts: Prompts, num_tokens: int, **options: Any) -> Repetitions:
    """Tokens a second after the first token, for each prompt but the first.

    Of a model with a runtime also what its experts did for these tokens.
    """
    runtime, found = getattr(model, "moe", None), Repetitions()
    for prompt_T in prompts.short_NT[1:]:
        clock = TokenClock(runtime.reset_stats if runtime else lambda: None)
        model.generate(
            prompt_T[None], max_new_tokens=num_tokens, do_sample=False, streamer=clock, **options
        )
        assert clock.num_tokens == num_tokens, "an end was asked for"
        experts = _experts(runtime.stats(), num_tokens - 1) if runtime else {}
        found.append({"tokens_per_s": clock.tokens_per_s, **experts})
    return found


def _experts(stats: Any, tokens: int) -> dict[str, float]:
    """What became of the experts that layers asked for, in the mean of a token."""
    return {
        "hit_rate": stats.hits / (stats.hits + stats.late_hits + stats.misses),
        "missed_a_token": stats.misses / tokens,
        "computed_by_cpu_a_token": stats.computed_misses / tokens,
        "copied_bytes_a_token": stats.copied_bytes / tokens,
        "read_bytes_a_token": stats.bytes_read / tokens,
        "stall_s_a_token": stats.stall_s / tokens,
    }


def device_memory(plan: Any) -> dict[str, int]:
    """The budget of a GPU, and the most that tensors and torch have held there beside it."""
    if plan is None:
        return {}
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return dict(zip(MEMORY, (plan.budget_bytes, *peaks), strict=True))


def prefill_tokens_per_s(model: Any, prompts: Prompts, device: str, repeats: int) -> float:
    """Of the long prompt, by the median pass after one that is not counted."""

    @torch.inference_mode()
    def read() -> None:
        model(prompts.long_1T, use_cache=True, logits_to_keep=1)

    return prompts.long_1T.shape[1] / median_s(read, device, repeats)


def compare(answer: Answer, wanted: Answer) -> dict[str, Any]:
    """How far two systems say the same, and how much their logits differ until they do not."""
    num_equal, difference_NV = _differences(answer, wanted)
    largest = float(difference_NV.abs().max() / wanted.logits_NV.std())
    return {
        "equal_tokens": num_equal,
        "of_tokens": len(wanted.tokens_N),
        "is_bit_equal": torch.equal(answer.logits_NV, wanted.logits_NV),
        "largest_difference_in_deviations": largest,
    }


def error_of(answer: Answer, exact: Answer) -> float:
    """Root of the mean square of the logits' errors, in standard deviations of the logits."""
    _, difference_NV = _differences(answer, exact)
    return float(difference_NV.square().mean().sqrt() / exact.logits_NV.std())


def _differences(answer: Answer, wanted: Answer) -> tuple[int, Tensor]:
    """Tokens until the first other one, and logits where both had the same tokens before.

    Those of the first other token are among them.
    """
    is_other_N = (answer.tokens_N != wanted.tokens_N).cpu()
    num_equal = int(is_other_N.int().argmax()) if is_other_N.any() else len(is_other_N)
    both = answer.logits_NV[: num_equal + 1], wanted.logits_NV[: num_equal + 1]
    return num_equal, both[0] - both[1]


@torch.inference_mode()
def exact_answer(model: Any, prompt_T: Tensor, answer: Answer) -> Answer:
    """The tokens of an answer with the logits of a model, all at once."""
    ids_T = torch.cat((prompt_T, answer.tokens_N[:-1]))
    found = model(ids_T[None], logits_to_keep=len(answer.tokens_N))
    return Answer(answer.tokens_N, found.logits[0].float())


def new_prompts(
    vocab_size: int, counts: tuple[int, int, int], device: str, seed: int = 1
) -> Prompts:
    """Random tokens, without those that models have for other purposes.

    Args:
        vocab_size: of the model.
        counts: of short prompts, of tokens of each, and of the long one's tokens.
        device: where they are wanted.
        seed: of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    number, short, long = counts
    short_NT = torch.randint(2, vocab_size, (number, short), generator=generator)
    long_1T = torch.randint(2, vocab_size, (1, long), generator=generator)
    found = Prompts(short_NT.to(device), long_1T.to(device))
    wait_for(device)
    return found
