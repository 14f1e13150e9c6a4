"""A discrete-event simulator: tasks with durations, resources that do one task at a time."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

FREE = -1
"""The resource of tasks that occupy none: joins, delays."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SimulatedTimeline:
    """When every task ran.

    Attributes:
        start_s: start of each task, by its number.
        finish_s: end of each task.
        resource: resource of each task.
    """

    start_s: np.ndarray
    finish_s: np.ndarray
    resource: np.ndarray

    @property
    def makespan_s(self) -> float:
        """End of the last task."""
        return float(self.finish_s.max(initial=0.0))

    def busy_s(self, resource: int) -> float:
        """Seconds that a resource worked."""
        mine = self.resource == resource
        return float((self.finish_s[mine] - self.start_s[mine]).sum())


@dataclass(slots=True)
class TaskGraph:
    """Tasks, what they wait for, and what they occupy.

    A resource takes tasks in the order in which they become ready (in the order of their numbers
    where they become ready together), as a stream or a network card does, and never two at once.
    """

    _durations: list[float] = field(default_factory=list)
    _resources: list[int] = field(default_factory=list)
    _waiting_for: list[int] = field(default_factory=list)
    _followers: list[list[int]] = field(default_factory=list)

    def add(self, duration_s: float, *, resource: int = FREE, after: Iterable[int] = ()) -> int:
        """Adds a task and returns its number.

        Args:
            duration_s: how long it occupies its resource.
            resource: which one, 0 or more; ``FREE`` for none.
            after: numbers of tasks that must end before it starts.

        Raises:
            ValueError: a negative duration, or a task that does not exist yet.
        """
        number = len(self._durations)
        if not duration_s >= 0:
            raise ValueError(f"a task takes at least 0 seconds, got {duration_s}")
        self._durations.append(duration_s)
        self._resources.append(resource)
        self._followers.append([])
        count = 0
        for earlier in after:
            if not 0 <= earlier < number:
                raise ValueError(f"task {number} would wait for task {earlier}, which is not there")
            self._followers[earlier].append(number)
            count += 1
        self._waiting_for.append(count)
        return number

    def run(self) -> SimulatedTimeline:
        """Runs all tasks as early as order and resources allow."""
        count = len(self._durations)
        start, finish = [0.0] * count, [0.0] * count
        waiting = list(self._waiting_for)
        ready = [0.0] * count
        free_at = [0.0] * (max(self._resources, default=FREE) + 1)
        # Tasks leave the heap in the order in which they become ready. What a resource has taken
        # before is therefore exactly what came to it earlier.
        heap = [(0.0, task) for task in range(count) if waiting[task] == 0]
        while heap:
            time, task = heapq.heappop(heap)
            resource = self._resources[task]
            begin = time if resource == FREE else max(time, free_at[resource])
            end = begin + self._durations[task]
            start[task], finish[task] = begin, end
            if resource != FREE:
                free_at[resource] = end
            for follower in self._followers[task]:
                ready[follower] = max(ready[follower], end)
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    heapq.heappush(heap, (ready[follower], follower))
        return SimulatedTimeline(
            start_s=np.array(start),
            finish_s=np.array(finish),
            resource=np.array(self._resources, dtype=np.int64),
        )
