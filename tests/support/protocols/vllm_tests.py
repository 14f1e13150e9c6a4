"""A plugin of pytest: vLLM's tests of its server run against this one, as they are."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import itertools
import sys
import types
from collections.abc import Sequence
from typing import Any

import anthropic
import openai
import pytest
from http_server import TEMPLATE
from protocol_server import serving, skip_foreign

from moe_runtime.checkpoints.opening import load_tokenizer
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.http.server import Access

_REASONS = {
    "a field, an endpoint or an option of vLLM's own, refused by name": """
        test_kv_transfer_prompt_token_ids_round_trip test_kv_transfer_prompt_token_ids_streaming
        test_per_request_metrics_non_streaming test_per_request_metrics_on_final_usage_chunk
        test_chat_session_with_echo_and_continue_final_message test_prompt_logprobs
        test_top_logprobs test_chat_with_enable_force_include_usage test_include_reasoning.py
        test_logprob_token_ids.py test_logprob_token_ids test_logprob_token_ids_stream
        test_prompt_logprobs_completion test_prompt_logprobs_chat test_root_path.py
        test_batch_completions test_completion_truncation_side_controls_prompt_truncation
        test_structured_outputs_choice_chat
        test_structured_outputs_json_chat test_structured_outputs_regex_chat
        test_structured_outputs_choice_chat_logprobs test_invocations
        test_enable_response_messages test_extra_sampling_params test_extra_fields_allowed
        test_custom_role test_background test_background_error test_background_cancel
        test_comparison_with_prompt_logprobs_and_logprobs test_server_load test_show_version
        test_v2_endpoint_accepts_valid_api_token test_no_request_id_header
        test_enable_request_id_header test_more_than_one_prompt_logprobs_chat
        test_completion_return_tokens_as_token_ids_completion
        test_chat_return_tokens_as_token_ids_completion""",
    "the words, tokens or thoughts of a model that knows answers": """
        test_function_tool_use test_simple_input test_instructions
        test_chat test_previous_response_id test_two_responses_with_same_prev_id
        test_max_tokens_with_tool_choice_required test_namespace_tool_separator
        test_namespace_tool_separator_streaming test_reasoning_item
        test_streaming_reasoning_tokens_e2e test_non_streaming_reasoning_tokens_e2e
        test_structured_output test_structured_output_with_parse test_single_completion
        test_single_chat_session test_chat_completion_with_tool_use
        test_chat_completion_with_emoji_and_token_ids test_simple_messages
        test_anthropic_tool_call test_hermes_tool_parser.py
        test_system_message test_response_format_json_object test_response_format_json_schema
        test_complex_message_content test_no_args_tool_call
        test_completion_with_function_calling.py::test_named_tool_use
        test_function_calling_with_streaming_expected_arguments
        test_function_calling_with_streaming_types[True-auto-Qwen/Qwen3-1.7B]
        test_function_calling_with_streaming_types[True-required-Qwen/Qwen3-1.7B]
        test_function_calling_with_streaming_types[False-required-Qwen/Qwen3-1.7B]
        test_function_calling_with_streaming_types[False-auto-Qwen/Qwen3-1.7B]
        test_function_calling_with_streaming_forced_tool_choice[auto-Qwen/Qwen3-1.7B]""",
    "the wording of errors, or chunks that OpenAI and Anthropic cut in another way": """
        test_chat_logit_bias_multiple_non_integer_keys test_empty_prompt
        test_out_of_vocab_token_ids test_long_seed
        test_parallel_streaming test_chat_streaming test_chat_completion_stream_options
        test_basic_completion_with_emoji test_anthropic_streaming
        test_anthropic_streaming_cache_usage
        test_chat_completion_stream_options_and_logprobs_with_long_prompts""",
    "functions of vLLM's own": """
        test_load_prompt_embeds test_disable_prompt_embeds
        test_chat_completion_request_n_parameter_exceeds_default_limit""",
    "adapters and pictures from the network": """
        test_check_models test_no_logprobs_chat[zephyr-lora] test_zero_logprobs_chat[zephyr-lora]
        test_some_logprobs_chat[zephyr-lora] test_too_many_chat_logprobs[zephyr-lora]
        test_lora_adapters.py test_tokenization_vlm.py test_tokenize_then_chat_vlm.py""",
}
"""Why tests do not apply."""
_TEMPLATE = TEMPLATE.partition("assistant:{%")[0] + "assistant:{% endif %}"
"""Of a model that does not think."""


class RemoteOpenAIServer:
    """Takes the place of the program that vLLM's tests start."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, words: Sequence[str] = (), **_: Any) -> None:
        given = dict(itertools.pairwise(words))
        self._name = given.get("--served-model-name", model)
        key = given.get("--api-key")
        self._max_tokens = int(given.get("--max-model-len", 8192))
        self._access = Access(keys=(key,) if key else ())
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> RemoteOpenAIServer:
        made = serving([self._name], _TEMPLATE, self._max_tokens, access=self._access)
        self._address = self._stack.enter_context(made)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def url_for(self, *parts: str) -> str:
        return "/".join([self._address, *parts])

    def get_client(self, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(**{**self._common("v1"), **more})

    def get_async_client(self, **more: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**{**self._common("v1"), **more})

    def get_async_client_anthropic(self, **more: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**{**self._common(), **more})

    def _common(self, *parts: str) -> dict[str, Any]:
        address = self.url_for(*parts)
        return {"base_url": address, "api_key": self.DUMMY_API_KEY, "max_retries": 0}


class _Absent:
    """A function or class of vLLM: a test that uses one is about it, and not about the server."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        pytest.skip("tests functions of vLLM's own")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (object,)

    def __or__(self, _: Any) -> _Absent:
        return self

    __ror__ = __or__


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of vLLM, with nothing in it but what tests of the server read."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        found = types.ModuleType(spec.name)
        found.__getattr__ = lambda name: _of_vllm(name)  # type: ignore[attr-defined]
        return found

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _of_vllm(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "get_tokenizer":
        return lambda *_, **__: _tokenizer()
    if name == "hf_api":  # adapters are not downloaded, and not used
        return lambda: types.SimpleNamespace(snapshot_download=lambda **_: "")
    return _Absent()


def _tokenizer() -> Any:
    found = load_tokenizer(pocket_path())
    found.chat_template = _TEMPLATE
    return found


def pytest_load_initial_conftests() -> None:
    sys.meta_path.insert(0, _Stubs())
    utils = types.ModuleType("tests.utils")
    utils.RemoteOpenAIServer = RemoteOpenAIServer  # type: ignore[attr-defined]
    utils.ROCM_EXTRA_ARGS = []  # type: ignore[attr-defined]
    utils.__getattr__ = lambda name: _of_vllm(name)  # type: ignore[attr-defined]
    sys.modules["tests.utils"] = utils


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_foreign(items, _REASONS)
