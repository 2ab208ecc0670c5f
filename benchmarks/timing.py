"""The clock of the benchmarks."""

import time
from collections.abc import Callable

REPETITIONS = 7


def best_seconds(action: Callable[[], object]) -> float:
    """The shortest of some repetitions, after one that is not counted."""
    action()
    seconds = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
