"""What the server measures, for Prometheus: vLLM's names where they mean the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from moe_runtime.serving.engine import Engine

_LABELS = ["model_name", "engine"]
_TO_MINUTES = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TO_128K = [2**power for power in range(18)]
_SECONDS = {
    "time_to_first_token_seconds": "Seconds from a request's arrival to its first token.",
    "inter_token_latency_seconds": "Seconds from one token of an answer to the next.",
    "request_time_per_output_token_seconds": "Mean seconds a token after the first, by request.",
    "e2e_request_latency_seconds": "Seconds from a request's arrival to its end.",
    "request_queue_time_seconds": "Seconds from a request's arrival to its start.",
    "request_prefill_time_seconds": "Seconds from a request's start to its first token.",
    "request_decode_time_seconds": "Seconds from a request's first token to its last.",
    "request_inference_time_seconds": "Seconds from a request's start to its last token.",
}
_TOKENS = {
    "request_prompt_tokens": "Tokens of a prompt.",
    "request_generation_tokens": "Tokens of an answer.",
}
_GAUGES = {
    "vllm:num_requests_running": ("running", "Requests that are being answered."),
    "vllm:num_requests_waiting": ("waiting", "Requests that wait for their turn."),
    "vllm:kv_cache_usage_perc": ("kv_usage", "Share of the KV cache in use, from 0 to 1."),
    "moe:kv_cache_tokens": ("kv_tokens", "Tokens in KV caches, the prefix cache included."),
    "moe:kv_cache_capacity_tokens": ("kv_capacity", "Tokens that memory was set aside for."),
}
_COUNTERS = {
    "vllm:num_preemptions": ("preemptions", "Times a request lost its KV cache to another."),
    "vllm:prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "vllm:generation_tokens": ("generated_tokens", "Tokens generated."),
    "vllm:prefix_cache_queries": ("prompt_tokens", "Prompt tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": ("prefix_hit_tokens", "Prompt tokens found there."),
    "moe:prefix_disk_hits": ("prefix_disk_hit_tokens", "Prompt tokens read from the disk."),
    "moe:prefix_disk_failures": ("prefix_disk_failures", "Times that prefixes were not written."),
    "moe:adapter_reads": ("adapter_reads", "Times that an adapter was read from its files."),
    "moe:steps": ("steps", "Forward passes."),
    "moe:draft_steps": ("draft_steps", "Steps of an answer that drafts may go with."),
    "vllm:spec_decode_num_draft_tokens": ("drafted_tokens", "Drafted tokens that were verified."),
    "vllm:spec_decode_num_accepted_tokens": ("accepted_drafts", "Drafted tokens that were right."),
    "moe:draft_failures": ("draft_failures", "Errors after which nothing more is drafted."),
}
_EXPERT_COUNTERS = {
    "moe:expert_hits": ("hits", "Experts that were in memory when they were asked for."),
    "moe:expert_late_hits": ("late_hits", "Experts that were on their way when asked for."),
    "moe:expert_misses": ("misses", "Experts that had to be fetched when they were asked for."),
    "moe:replaced_choices": (
        "replaced_choices",
        "Choices that went to an expert in memory instead (--routing cache-aware).",
    ),
    "moe:skipped_choices": ("skipped_choices", "Choices that were left out (--skip-below)."),
    "moe:stand_in_choices": ("stand_in_choices", "Choices that int4 copies answered."),
    "moe:expert_stall_seconds": ("stall_s", "Seconds that computation waited for experts."),
    "moe:prefetch_useful": ("useful_guesses", "Prefetched experts that were ready when needed."),
    "moe:prefetch_late": ("late_guesses", "Prefetched experts that were on their way."),
    "moe:prefetch_wasted": ("wasted_guesses", "Prefetched experts that were never needed."),
}
_EXPERT_GAUGES = {
    "moe:expert_slots": ("expert_slots", "Experts that fit into the fastest tier."),
    "moe:expert_slot_bytes": ("slot_bytes", "Bytes of each of these."),
    "moe:expert_bytes": ("expert_bytes", "Bytes of all experts of the model."),
    "moe:memory_budget_bytes": ("budget_bytes", "Bytes that the model may take on the host."),
}
_INFOS = (
    ("moe:expert_cache_info", "policy", "policy", "How experts are kept; always 1."),
    ("moe:kv_cache_info", "kv_cache", "form", "How keys and values are kept; always 1."),
)


class Metrics:
    """The metrics of one server; ``engines`` returns those of loaded models, by name."""

    def __init__(self, engines: Callable[[], Mapping[str, Engine]]) -> None:
        self._engines = engines
        self._registry = CollectorRegistry()
        self._registry.register(self)  # pyright: ignore[reportArgumentType]
        self.seconds, self.tokens = (
            {
                name: Histogram(
                    f"vllm:{name}", text, _LABELS, buckets=buckets, registry=self._registry
                )
                for name, text in texts.items()
            }
            for texts, buckets in ((_SECONDS, _TO_MINUTES), (_TOKENS, _TO_128K))
        )
        self.success = Counter(
            "vllm:request_success",
            "Answers that were finished, by reason.",
            [*_LABELS, "finished_reason"],
            registry=self._registry,
        )
        self.responses = Counter(
            "moe:http_responses",
            "Responses by path and status.",
            ["path", "status"],
            registry=self._registry,
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Statistics of the engines; the registry calls it."""
        found = {name: engine.statistics() for name, engine in self._engines().items()}
        experts = {name: one.experts for name, one in found.items()}
        for kind, table, counted in (
            (GaugeMetricFamily, _GAUGES, found),
            (CounterMetricFamily, _COUNTERS, found),
            (CounterMetricFamily, _EXPERT_COUNTERS, experts),
            (GaugeMetricFamily, _EXPERT_GAUGES, experts),
        ):
            for metric, (field, text) in table.items():
                values = {(name,): getattr(one, field) for name, one in counted.items()}
                yield _family(kind, metric, text, values)
        read = {(name, "disk"): one.bytes_read for name, one in experts.items()}
        copied = ((name, one.copied_bytes) for name, one in experts.items())
        read |= {(name, "host"): num_bytes for name, num_bytes in copied if num_bytes}
        text = "Bytes of experts read, by tier."
        yield _family(CounterMetricFamily, "moe:expert_bytes_read", text, read, "tier")
        for metric, field, label, text in _INFOS:
            values = {(name, getattr(one, field)): 1.0 for name, one in experts.items()}
            yield _family(GaugeMetricFamily, metric, text, values, label)


def _family(
    kind: Callable[..., Any],
    metric: str,
    text: str,
    values: Mapping[tuple[str, ...], float],
    *labels: str,
) -> Metric:
    family = kind(metric, text, labels=[*_LABELS, *labels])
    for (name, *others), value in values.items():
        family.add_metric([name, "0", *others], value)
    return family


class RequestTimes:
    """When the tokens of one request came."""

    def __init__(self, metrics: Metrics, model_name: str, clock=time.perf_counter) -> None:
        self._metrics = metrics
        self._labels = (model_name, "0")
        self.clock = clock
        self._arrived_s = clock()
        self._started_s: dict[int, float] = {}
        self._first_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}

    def started(self, index: int, now_s: float) -> None:
        self._started_s[index] = now_s

    def token(self, index: int, now_s: float) -> None:
        if index in self._last_s:
            self._observe("inter_token_latency_seconds", now_s - self._last_s[index])
        else:
            self._first_s[index] = now_s
            self._observe("time_to_first_token_seconds", now_s - self._arrived_s)
        self._last_s[index] = now_s

    def ended(
        self, index: int, now_s: float, prompt_tokens: int, new_tokens: int, reason: str
    ) -> None:
        """An answer has ended. Queue, prefill and decode time add up to its last token.

        Without a token there is no prefill and no decode time.
        """
        metrics, labels = self._metrics, self._labels
        self._observe("e2e_request_latency_seconds", now_s - self._arrived_s)
        started_s = self._started_s.get(index, now_s)
        last_s = self._last_s.get(index, now_s)
        self._observe("request_queue_time_seconds", started_s - self._arrived_s)
        self._observe("request_inference_time_seconds", last_s - started_s)
        if index in self._first_s:
            first_s = self._first_s[index]
            self._observe("request_prefill_time_seconds", first_s - started_s)
            self._observe("request_decode_time_seconds", last_s - first_s)
            if new_tokens > 1:
                a_token_s = (last_s - first_s) / (new_tokens - 1)
                self._observe("request_time_per_output_token_seconds", a_token_s)
        metrics.tokens["request_prompt_tokens"].labels(*labels).observe(prompt_tokens)
        metrics.tokens["request_generation_tokens"].labels(*labels).observe(new_tokens)
        metrics.success.labels(*labels, reason).inc()

    def _observe(self, name: str, seconds: float) -> None:
        self._metrics.seconds[name].labels(*self._labels).observe(seconds)
