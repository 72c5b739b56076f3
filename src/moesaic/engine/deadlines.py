"""Which requests have run out of time."""

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple

from moesaic.errors import RequestError


class _Deadline(NamedTuple):
    at_s: float
    request_id: str
    timeout_s: float


class Deadlines:
    """Deadlines of unfinished requests by a monotonic ``clock`` in seconds.

    Whoever ends a request must ``forget`` it: its id may come again, and nothing is kept of one that is over.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._order: list[_Deadline] = []
        self._by_request: dict[str, _Deadline] = {}

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

    def add(self, request_id: str, timeout_s: float | None) -> None:
        """Remember a deadline in place of an earlier one; none is none."""
        self.forget(request_id)
        if timeout_s is not None:
            deadline = self._by_request[request_id] = _Deadline(self._clock() + timeout_s, request_id, timeout_s)
            insort(self._order, deadline)

    def forget(self, request_id: str) -> None:
        """The request is over; one without a deadline is a no-op."""
        deadline = self._by_request.pop(request_id, None)
        if deadline is not None:
            del self._order[bisect_left(self._order, deadline)]

    def expired(self) -> list[tuple[str, float]]:
        """Return the requests whose time is over, with their ``timeout_s``."""
        if not self._order:
            return []
        now_s = self._clock()
        return [(d.request_id, d.timeout_s) for d in takewhile(lambda d: d.at_s <= now_s, self._order)]
