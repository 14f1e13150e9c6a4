"""The case ``kernels``: matrix products of expert layers on a GPU, with their chosen tiles."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from moe_runtime.benchmarks.suite import BenchSystem, Metric, Number, facts, peer_failures
from moe_runtime.kernels.grouped_gemm.tuner import LayerBatch, Measured

METRICS = {"product_s": Metric("s"), **facts("TFLOP/s", "tflops", better="more")}


def median_seconds(call: Callable[[], Any]) -> float:
    """Median time of a call by the GPU's clock, with a cold L2 cache."""
    from triton.testing import do_bench

    return cast(float, do_bench(call, warmup=10, rep=40, return_mode="median")) / 1e3


class TimedProduct(BenchSystem):
    """A product as a system under test, named by its layer. Results are not compared."""

    def __init__(self, layer: LayerBatch, measured: Measured) -> None:
        sizes = " ".join(f"{name}={size}" for name, size in zip("TDFEK", layer, strict=True))
        super().__init__(f"{measured.problem.name}, {sizes}")
        self.tile = measured.tile
        self._flops = measured.problem.flops
        self._call = partial(measured.problem.run, measured.tile)

    def repeat(self) -> Mapping[str, Number]:
        with peer_failures():
            seconds = median_seconds(self._call)
        return {"product_s": seconds, "tflops": self._flops / seconds / 1e12}
