"""Peers that compute the same layer of experts, each in a process of its own, for ``experts``.

The layer goes there in files: bf16, or codes and scales, as they lie, in numpy's format. A peer
computes forward passes alone. Its results are held to what those of the others are held to. Between
its turns its threads stand still: some would go on spinning, and take a core from the others.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_runtime.benchmarks.experts.results import (
    ROUTINGS,
    ExpertsPlan,
    num_equal,
    require_all_equal,
)
from moe_runtime.benchmarks.suite.peer_process import PeerProcess, PeerProgram, started
from moe_runtime.benchmarks.suite.runner import Number

_TIMEOUT_S = 900.0


class ExpertsPeer:
    """A peer.

    Attributes:
        name: the peer's.
        versions: of its packages, once it ran.
        compared, equal: tokens whose outputs were compared, and how many agreed.
    """

    def __init__(
        self,
        program: PeerProgram,
        plan: ExpertsPlan,
        expected: Mapping[str, Tensor],
        folder: Path,
        running: ExitStack,
    ) -> None:
        """What it is held to.

        Args:
            program: the peer.
            plan: see there.
            expected: this project's result by metric, of the first routing.
            folder: where all peers find the layer; written by the first one that needs it.
            running: ends its process.
        """
        self.name = program.name
        self.versions: dict[str, str] = {}
        self.compared = self.equal = 0
        self._program, self._plan, self._expected = program, plan, expected
        self._folder, self._running = folder, running
        self._process: PeerProcess | None = None

    def repeat(self) -> Mapping[str, Number]:
        """Measures every kind of forward pass; before the first time, compares results.

        Raises:
            PeerFailedError: it ended, cannot compute this layer, or its results differ.
        """
        process = self._process or self._start()
        calls = [(name, tokens) for name, tokens, trains in self._plan.calls() if not trains]
        if not self.compared:
            for name, tokens in calls:
                self._ask(process, tokens, None)
                found = _tensor(np.load(self._folder / f"{tokens}.npy"))
                self.compared += tokens
                expected = self._expected[name]
                self.equal += num_equal(self._plan, found, expected, trains=False)
            require_all_equal(self)
        return {
            name: self._ask(process, tokens, self._plan.block_s)["seconds"]
            for name, tokens in calls
        }

    def _start(self) -> PeerProcess:
        write_layer(self._plan, self._folder)
        process = self._running.enter_context(started(self._program, _TIMEOUT_S, stands_still=True))
        self.versions = process.ask("start", settings=self._program.settings)["versions"]
        process.ask("load_experts", folder=str(self._folder))
        self._process = process
        return process

    def _ask(self, process: PeerProcess, tokens: int, block_s: float | None) -> dict[str, Any]:
        return process.ask("experts", folder=str(self._folder), tokens=tokens, block_s=block_s)


def write_layer(plan: ExpertsPlan, folder: Path) -> None:
    """Writes the weights of a layer, and tokens and routings of every call, unless they are there.

    Raises:
        PeerFailedError: see ``ExpertLayer.handed_parts``.
    """
    layer = plan.layer
    if (folder / f"{plan.tokens[-1]}.npz").exists():  # the last file
        return
    for name, part in layer.handed_parts():
        np.save(folder / f"{name}.npy", _bits(part))
    for tokens in plan.tokens:
        routes = [layer.routing(tokens, seed) for seed in range(ROUTINGS)]
        ids = np.stack([ids.cpu().numpy() for ids, _ in routes])
        weights = np.stack([weights.float().cpu().numpy() for _, weights in routes])
        np.savez(folder / f"{tokens}.npz", x=_bits(layer.tokens(tokens)), ids=ids, weights=weights)


def _bits(values: Tensor) -> np.ndarray[Any, Any]:
    array = values.cpu().contiguous()
    is_bf16 = array.dtype == torch.bfloat16
    return array.view(torch.int16).numpy().view(np.uint16) if is_bf16 else array.numpy()


def _tensor(bits: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
