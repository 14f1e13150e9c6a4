"""The case ``kernels``: products of layers of experts on a GPU, in turn, in the tiles they have."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from moe_runtime.benchmarks.suite.results import Metric, describe_system, make_results, versions
from moe_runtime.benchmarks.suite.runner import Number, Rules, peer_failures, run_in_turn
from moe_runtime.kernels.grouped_gemm.tuner import LayerBatch, Measured

METRICS = {"product_s": Metric("s")}


class TimedProduct:
    """A product as a system under test.

    Attributes:
        name: what it computes, of which layer.
        tile: in which it is computed.
    """

    def __init__(
        self,
        layer: LayerBatch,
        measured: Measured,
        seconds_of: Callable[[Callable[[], Any]], float],
    ) -> None:
        """What it computes.

        Args:
            layer: T, D, F, E and K.
            measured: the product, and the tile that it has.
            seconds_of: runs a call often enough and says what it takes.
        """
        sizes = " ".join(f"{name}={size}" for name, size in zip("TDFEK", layer, strict=True))
        self.name = f"{measured.problem.name}, {sizes}"
        self.tile = measured.tile
        self._call = partial(measured.problem.run, measured.tile)
        self._seconds_of = seconds_of

    def repeat(self) -> Mapping[str, Number]:
        """Times it once.

        Raises:
            PeerFailedError: it cannot be computed here.
        """
        with peer_failures():
            return {"product_s": self._seconds_of(self._call)}


def measure_products(
    products: Sequence[TimedProduct],
    rules: Rules,
    clock: Callable[[], float],
    *,
    settings: Mapping[str, Any],
    is_stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Measures products in turn; the content of a results file."""
    found, ended = run_in_turn(products, rules, clock, is_stopping=is_stopping)
    return make_results(
        "kernels",
        settings,
        ended,
        [
            describe_system(
                one.name, found[one.name], METRICS, system_versions=versions(), quality=None
            )
            for one in products
        ],
    )
