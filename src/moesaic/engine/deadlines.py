"""Which requests have run out of time."""

import heapq
import math
from collections.abc import Callable, Iterator
from typing import Any

from moesaic.errors import RequestError
from moesaic.sequence import SeqId, Sequence


class Deadlines:
    """Deadlines of sequences by a monotonic ``clock`` in seconds; whether they are over already is not its business."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, SeqId, Sequence, float]] = []

    @staticmethod
    def check(timeout_s: Any) -> None:  # Any: a client's input
        """Return if ``timeout_s`` is none or a positive number of seconds.

        Raises: ``RequestError``.
        """
        if timeout_s is None:
            return
        is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
        if not is_number or not math.isfinite(timeout_s) or timeout_s <= 0:
            raise RequestError(
                f"timeout_s is {timeout_s!r}; it must be a positive number of seconds", param="timeout_s"
            )

    def add(self, sequence: Sequence, timeout_s: float | None) -> None:
        """Remember a deadline; none is none."""
        if timeout_s is not None:
            heapq.heappush(self._heap, (self._clock() + timeout_s, sequence.seq_id, sequence, timeout_s))

    def expired(self) -> Iterator[tuple[Sequence, float]]:
        """Return the sequences whose time is over, with their ``timeout_s``, each once."""
        if not self._heap:
            return
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            _, _, sequence, timeout_s = heapq.heappop(self._heap)
            yield sequence, timeout_s
