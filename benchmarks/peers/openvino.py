"""OpenVINO's runtime, which OpenVINO GenAI drives, with the model that optimum exports.

MODEL=FOLDER is that of ``optimum-cli export openvino --task text-generation-with-past -m MODEL
--weight-format fp16 FOLDER`` (``pip install optimum-intel[openvino]``); int4 is another model, and
says other tokens. GenAI's pipeline generates by itself; its runtime can be given each token.
"""

from pathlib import Path
from typing import Any

INSTALL = "pip install openvino openvino-genai"
PACKAGES = ("openvino", "openvino-genai")


class Peer:
    """Needs ``model`` and ``num_threads``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import numpy
        import openvino

        self._file = Path(settings["model"]) / "openvino_model.xml"
        if not self._file.is_file():
            raise ValueError(f"no {self._file}: name an exported folder, --peer openvino=FOLDER")
        self._api, self._numpy = openvino, numpy
        self._options = {"INFERENCE_NUM_THREADS": settings["num_threads"]}
        self._options |= {"PERFORMANCE_HINT": "LATENCY"}
        self._request: Any = None
        self._length = 0

    def load(self) -> None:
        """Reads and compiles the model."""
        model = self._api.Core().read_model(self._file)
        self._request = self._api.compile_model(model, "CPU", self._options).create_infer_request()

    def prefill_batch(self, prompts: list[list[int]]) -> list[int]:
        self._request.reset_state()
        self._length = 0
        return self._forward(self._numpy.array(prompts))

    def step_batch(self, tokens: list[int]) -> list[int]:
        return self._forward(self._numpy.array(tokens)[:, None])

    def close(self) -> None:
        self._request = None

    def _forward(self, tokens: Any) -> list[int]:
        numpy, count = self._numpy, len(tokens)
        begin, self._length = self._length, self._length + tokens.shape[1]
        places = numpy.broadcast_to(numpy.arange(begin, self._length), tokens.shape)
        given = {"input_ids": tokens, "attention_mask": numpy.ones((count, self._length), int)}
        given |= {"position_ids": places, "beam_idx": numpy.arange(count, dtype=numpy.int32)}
        return self._request.infer(given)["logits"][:, -1].argmax(-1).tolist()
