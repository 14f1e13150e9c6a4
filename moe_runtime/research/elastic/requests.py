"""One request of a generation service: it advances by a token a step, and can move to another rank.

A request that moves takes its keys and values along where they lie as plain tensors. Other caches
(windows, recurrent states) are built again on the new rank by the very passes that built them: the
prompt, then token by token. Either way the next token has the bits that it would have had.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from moe_runtime.checkpoints.transformers_private import cache_name
from moe_runtime.inference.generation import check_options


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticRequest:
    """What is asked for.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: most tokens to generate.
        temperature: 0 takes the most likely token.
        top_p: samples among the most likely tokens that together have this probability.
        seed: of the sampling; every request has a random state of its own.

    Raises:
        ValueError: an option is out of range, or the prompt is empty.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(self.max_new_tokens, self.temperature, self.top_p, self.seed)
        if not self.prompt:
            raise ValueError("the prompt is empty, expected at least one token")


class RunningRequest:
    """A request on the rank that generates for it.

    Attributes:
        number: the service's name for it.
        request: what is asked for.
        tokens: what was generated so far.
        unreported: how many of them the service has not been told of.
        is_finished: nothing more is to be generated.
    """

    def __init__(self, number: int, request: ElasticRequest, ends: frozenset[int]) -> None:
        """A request that has not begun; ``ends`` are the tokens that end a text."""
        self.number = number
        self.request = request
        self.tokens: list[int] = []
        self.unreported = 0
        self.is_finished = False
        self._ends = ends
        self._random = torch.Generator().manual_seed(request.seed)
        self._cache: Any = None

    @torch.inference_mode()
    def advance(self, model: Any) -> None:
        """One forward pass; generates a token unless the cache is still being built again."""
        from transformers import DynamicCache

        if self._cache is None:
            self._cache = DynamicCache(config=model.config)
        known = [*self.request.prompt, *self.tokens]
        num_cached = self._cache.get_seq_length()
        # A pass is the whole prompt or a single token, also when it is done for the second time.
        new = known[num_cached : max(num_cached + 1, len(self.request.prompt))]
        outputs = model(
            input_ids=torch.tensor([new]),
            use_cache=True,
            logits_to_keep=1,
            **{cache_name(model.forward): self._cache},
        )
        if num_cached + len(new) < len(known):
            return
        token = self._choose(known, outputs.logits[0, -1:])
        self.tokens.append(token)
        self.unreported += 1
        is_full = len(self.tokens) == self.request.max_new_tokens
        self.is_finished = is_full or token in self._ends

    def _choose(self, known: list[int], logits_1V: torch.Tensor) -> int:
        logits_1V = logits_1V.float()
        if self.request.temperature == 0:
            return int(logits_1V.argmax())
        from transformers import TemperatureLogitsWarper, TopPLogitsWarper

        ids: Any = torch.tensor([known])
        scores_1V: Any = TemperatureLogitsWarper(self.request.temperature)(
            ids, cast(Any, logits_1V)
        )
        if self.request.top_p < 1:
            scores_1V = TopPLogitsWarper(self.request.top_p)(ids, scores_1V)
        return int(torch.multinomial(scores_1V.softmax(-1), 1, generator=self._random))

    def take_report(self) -> list[int]:
        """The tokens that the service has not been told of; from now on it has."""
        first = len(self.tokens) - self.unreported
        self.unreported = 0
        return self.tokens[first:]

    def pack(self) -> bytes:
        """Everything that another rank needs to go on."""
        header = {
            "number": self.number,
            "request": asdict(self.request),
            "tokens": self.tokens,
            "unreported": self.unreported,
            "is_finished": self.is_finished,
        }
        tensors = {"random": self._random.get_state()}
        layers = [] if self._cache is None or self.is_finished else self._cache.layers
        if all(_is_plain(layer) for layer in layers):
            for index, layer in enumerate(layers):
                tensors[f"keys.{index}"] = layer.keys.contiguous()
                tensors[f"values.{index}"] = layer.values.contiguous()
        return save_tensors(tensors, metadata={"request": json.dumps(header)})

    @classmethod
    def unpack(cls, data: bytes, ends: frozenset[int], config: Any) -> RunningRequest:
        """The request that ``pack`` wrote, for a model of this configuration."""
        header = json.loads(_metadata(data)["request"])
        asked = header["request"] | {"prompt": tuple(header["request"]["prompt"])}
        found = cls(header["number"], ElasticRequest(**asked), ends)
        found.tokens, found.unreported = header["tokens"], header["unreported"]
        found.is_finished = header["is_finished"]
        tensors = load_tensors(data)
        found._random.set_state(tensors.pop("random"))
        if tensors:
            from transformers import DynamicCache

            found._cache = DynamicCache(config=config)
            for index in range(len(tensors) // 2):
                keys, values = tensors[f"keys.{index}"], tensors[f"values.{index}"]
                found._cache.update(keys, values, index)
        return found


def _is_plain(layer: Any) -> bool:
    """Whether a layer of a cache is its keys and values and nothing else."""
    from transformers.cache_utils import DynamicLayer

    return isinstance(layer, DynamicLayer) and not layer.is_sliding


def _metadata(data: bytes) -> dict[str, str]:
    """The text part of a file in the format of safetensors."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size])["__metadata__"]
