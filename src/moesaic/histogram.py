"""Counts of values by size: what is observed often and asked for rarely."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Bounds for times, in seconds."""
TOKENS = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Bounds for numbers of tokens."""
STEPS = (0, 1, 2, 4, 8, 16, 32, 64)
"""Bounds for numbers of steps."""


class Histogram:
    """How many observed values fell at or below each of the ascending ``bounds``, and their sum."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)  # the last: above every bound
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def num_values(self) -> int:
        return sum(self._counts)

    def as_json(self) -> dict[str, Any]:
        """Return ``bounds``, ``counts`` of the buckets between them (one more, not cumulative) and ``sum``."""
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}
