"""A small builder for mixed 0/1 programmes on SciPy's HiGHS."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
Term = tuple[float, int]
"""A coefficient and the index of its variable."""

_FAILED = 4
"""SciPy's status of a solver that ended without saying whether there is a solution."""


@dataclass(slots=True)
class Programme:
    """Minimises a linear objective under linear constraints; variables are 0/1 or real."""

    _costs: list[float] = field(default_factory=list)
    _uppers: list[float] = field(default_factory=list)
    _is_binary: list[bool] = field(default_factory=list)
    _rows: list[int] = field(default_factory=list)
    _columns: list[int] = field(default_factory=list)
    _coefficients: list[float] = field(default_factory=list)
    _bounds: list[tuple[float, float]] = field(default_factory=list)

    def binaries(self, *shape: int) -> np.ndarray:
        """Adds an array of 0/1 variables and returns their indices in this shape."""
        return self._add(shape, upper=1.0, is_binary=True)

    def reals(self, *shape: int) -> np.ndarray:
        """Adds an array of variables that are at least 0 and returns their indices."""
        return self._add(shape, upper=np.inf, is_binary=False)

    def cost(self, variable: int, value: float) -> None:
        self._costs[variable] += value

    def between(self, low: float, terms: Iterable[Term], high: float) -> None:
        """Requires that a linear expression lies in an interval."""
        for coefficient, variable in terms:
            self._rows.append(len(self._bounds))
            self._columns.append(int(variable))
            self._coefficients.append(float(coefficient))
        self._bounds.append((low, high))

    def equal(self, terms: Iterable[Term], value: float) -> None:
        """Requires that a linear expression has a value."""
        self.between(value, terms, value)

    def at_most(self, terms: Iterable[Term], value: float) -> None:
        """Requires that a linear expression does not exceed a value."""
        self.between(-np.inf, terms, value)

    def solve(self, *, time_limit_s: float, gap: float = 1e-6) -> np.ndarray | None:
        """The values of all variables; None where no solution was found in time."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        num_variables = len(self._costs)
        matrix = csr_array(
            (self._coefficients, (self._rows, self._columns)),
            shape=(len(self._bounds), num_variables),
        )
        lows, highs = np.array(self._bounds).T
        costs, is_binary = np.array(self._costs), np.array(self._is_binary, dtype=np.int64)
        # SciPy takes arrays here; its annotations know scalars only.
        bounds = Bounds(0.0, np.array(self._uppers))  # pyright: ignore[reportArgumentType]
        constraint = LinearConstraint(matrix, lows, highs)  # pyright: ignore[reportArgumentType]
        options = {"time_limit": time_limit_s, "mip_rel_gap": gap}

        def run(presolve: bool) -> Any:
            return milp(
                costs,
                integrality=is_binary,
                bounds=bounds,
                constraints=constraint,
                options=options | {"presolve": presolve},
            )

        result = _in_background(lambda: run(True))
        if result.status == _FAILED:  # some small programmes only where they were presolved
            result = _in_background(lambda: run(False))
        return result.x

    def _add(self, shape: tuple[int, ...], *, upper: float, is_binary: bool) -> np.ndarray:
        count = int(np.prod(shape, dtype=np.int64))
        first = len(self._costs)
        self._costs += [0.0] * count
        self._uppers += [upper] * count
        self._is_binary += [is_binary] * count
        return np.arange(first, first + count).reshape(shape)


def _in_background(work: Callable[[], T]) -> T:
    """Runs work in a thread and waits, so that signals come through while a library computes."""
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(work())
        except (ValueError, RuntimeError, MemoryError) as error:
            outcome.set_exception(error)

    # A daemon: the process may end while it still computes.
    threading.Thread(target=call, name="solver", daemon=True).start()
    return outcome.result()
