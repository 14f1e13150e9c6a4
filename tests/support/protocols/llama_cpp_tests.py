"""A plugin of pytest: llama.cpp's tests of its server run against this one, as they are."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
from http_server import TEMPLATE
from protocol_server import answer_to_any_name, serving, skip_foreign

from moe_runtime.serving.http.server import Access, Server

_REASONS = {
    "an endpoint, a field or an option of llama.cpp's own": """
        test_ctx_shift.py test_ignore_eos.py test_infill.py test_kv_keep_only_active.py test_lora.py
        test_mcp_servers.py test_metrics.py test_proxy.py test_sleep.py test_slot_save.py
        test_speculative.py test_stream.py test_template.py test_tokenize.py test_tools_builtin.py
        test_compat_gcp.py test_chat_template test_chat_template_assistant_prefill
        test_chat_template_continue_final_message_vllm_compat test_apply_chat_template
        test_completion_with_json_schema test_completion_with_grammar test_logit_bias
        test_chat_completion_with_timings_per_token test_return_progress test_verbose_debug
        test_chat_completions_multiple_choices test_chat_completions_token_count
        test_anthropic_thinking_history_in_template test_responses_stream_with_llama_telemetry
        test_correct_api_key test_correct_api_key_anthropic_header
        test_cors_proxy_only_forwards_explicit_proxy_headers test_server_multiple_addresses
        test_server_props test_server_slots test_load_split_model test_no_ui
        test_server_model_aliases_and_tags test_models_supports_multimodal_capability
        test_v1_models_supports_multimodal_capability test_vision_completion
        test_vision_chat_completion_token_count test_completion test_completion_stream
        test_completion_stream_vs_non_stream test_consistent_result_same_seed
        test_different_result_different_seed test_consistent_result_different_batch_size
        test_nocache_long_input_prompt test_json_prompt_no_mtmd test_completion_with_tokens_input
        test_json_prompt_mtm_error_when_not_supported test_completion_parallel_slots
        test_completion_unified test_completion_response_fields test_n_probs test_n_probs_stream
        test_n_probs_post_sampling test_n_probs_post_backend_sampling test_cancel_request
        test_completion_prompt_cache
        test_completion_with_response_format[response_format0-6-"42"]
        test_completion_with_response_format[response_format1-10-[
        test_router_props test_router_models_max_evicts_lru test_router_no_models_autoload
        test_router_queue_does_not_evict_busy_model test_router_queue_is_fifo
        test_router_queue_coalesces_requests_for_same_model
        test_router_queue_client_disconnect_keeps_model
        test_router_queue_two_waiters_share_one_eviction test_router_reload_models
        test_router_dedup_cache_models test_router_remote_preset test_router_download_model
        test_router_delete_model""",
    "the build, tokens or texts of llama.cpp and its model": """
        test_chat_completion test_chat_completion_stream test_chat_completion_cached_tokens
        test_chat_completion_with_openai_library test_completion_with_openai_library
        test_weather test_calc_result test_thoughts test_hello_world
        test_anthropic_thinking_with_reasoning_model
        test_completion_stream_with_openai_library_stops""",
    "calls in functionary's form, which is not known here": """
        test_completion_with_required_tool_real_model[template_override24]
        test_completion_with_required_tool_real_model[template_override25]
        test_completion_without_tool_call_slow[meetkai-functionary-medium-v3.2-256-tools1-None-CompletionMode.NORMAL]""",
    "embeddings and ranking are refused": """
        test_embedding.py test_rerank.py test_vision_embeddings
        test_vision_embeddings_oai_content""",
    "fetches a file from the network": """
        test_anthropic_vision_base64_with_multimodal_model test_vision_chat_completion""",
    "pages of other origins need --cors; files of the server are not read": """
        test_access_static_assets_without_api_key test_cors_options
        test_cors_origins_localhost_reflects test_cors_origins_localhost_rejects
        test_cors_origins_defaults_to_localhost_with_tools_enabled
        test_local_media_file[../../../tools-file://mtmd/test-1.jpeg-True]
        test_local_media_file[../../../tools-file:////mtmd//test-1.jpeg-True]""",
    "asks for another form than OpenAI's or Anthropic's": """
        test_invalid_chat_completion_req[messages7] test_logprobs_stream
        test_completion_without_tool_call_fast
        test_completion_with_required_tool_real_model[CompletionMode.STREAMED]
        test_completion_without_tool_call_slow[CompletionMode.STREAMED]
        test_context_size_exceeded test_context_size_exceeded_stream
        test_anthropic_tool_result_with_image test_anthropic_vision_format_accepted
        test_anthropic_empty_messages""",
}
"""Why tests do not apply."""


def pytest_sessionstart() -> None:
    import utils  # pyright: ignore[reportMissingImports]

    utils.ServerProcess.start = _start
    utils.ServerProcess.stop = _stop
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.match_regex = lambda *_: True  # of texts that their model writes


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_foreign(items, _REASONS)


def _start(process: Any, timeout_seconds: float = 0) -> None:
    """In the place of llama.cpp's program, with the options of it that mean something here."""
    sys.modules["utils"].server_instances.add(process)
    stack = process.running = contextlib.ExitStack()
    name = process.model_alias
    names = [name] if name else ROUTED
    template = TEMPLATE
    if process.chat_template_file:
        template = Path(process.chat_template_file).read_text()
    access = Access(keys=(process.api_key,) if process.api_key else ())
    if name:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(Server, "name_of", answer_to_any_name)
    context = (process.n_ctx or 512) // (process.n_slots or 1)
    stack.enter_context(
        serving(
            names,
            template,
            max_tokens=context if name else 1024,
            port=process.server_port,
            access=access,
            on_demand=not name,
        )
    )


ROUTED = [
    "ggml-org/tinygemma3-GGUF:Q8_0",
    "ggml-org/test-model-stories260K:F32",
    "ggml-org/test-model-stories260K-infill:F32",
]


def _stop(process: Any) -> None:
    sys.modules["utils"].server_instances.discard(process)
    running = getattr(process, "running", None)
    if running is not None:
        running.close()
