"""The case ``kernels``: products of layers of experts on a GPU, in turn, in the tiles they have."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from moe_runtime.benchmarks.suite import BenchSystem, Metric, Number, facts, peer_failures
from moe_runtime.kernels.grouped_gemm.tuner import LayerBatch, Measured

METRICS = {"product_s": Metric("s"), **facts("TFLOP/s", "tflops", better="more")}


class TimedProduct(BenchSystem):
    """A product as a system under test; its name says of which layer. Nothing is compared."""

    def __init__(
        self,
        layer: LayerBatch,
        measured: Measured,
        seconds_of: Callable[[Callable[[], Any]], float],
    ) -> None:
        sizes = " ".join(f"{name}={size}" for name, size in zip("TDFEK", layer, strict=True))
        super().__init__(f"{measured.problem.name}, {sizes}")
        self.tile = measured.tile
        self._flops = measured.problem.flops
        self._call = partial(measured.problem.run, measured.tile)
        self._seconds_of = seconds_of

    def repeat(self) -> Mapping[str, Number]:
        with peer_failures():
            seconds = self._seconds_of(self._call)
        return {"product_s": seconds, "tflops": self._flops / seconds / 1e12}
