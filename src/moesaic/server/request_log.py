"""One record for each request that is over: its label and its numbers, nothing of what was asked or answered."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from moesaic.engine.client import Submission
from moesaic.engine.outputs import TextDelta
from moesaic.errors import EngineDeadError, EngineDrainingError, RequestError
from moesaic.log import FIELDS
from moesaic.server.labels import current_label

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    """A request that is not over."""

    label: str | None
    num_prompt_tokens: int
    arrival_s: float
    first_token_s: float | None = None
    num_output_tokens: int = 0


class RequestLog:
    """A ``RequestObserver`` that logs at level info; without that level it keeps nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, _Open] = {}

    def admit(self, request_id: str, submission: Submission) -> None:
        """Begin a request under the label of the HTTP request that brought it."""
        if logger.isEnabledFor(logging.INFO):
            label, num_tokens = current_label.get(), len(submission.prompt_token_ids)
            self._open[request_id] = _Open(label, num_tokens, self._clock())

    def refuse(self, error: RequestError | EngineDeadError | EngineDrainingError) -> None:
        """Log a refusal by its kind; its message may quote what was sent."""
        self._log("request refused", {"request": current_label.get(), "error": type(error).__name__})

    def observe(self, delta: TextDelta) -> None:
        """Count a delta, and log the request with its last."""
        entry = self._open.get(delta.request_id)
        if entry is None:
            return
        entry.num_output_tokens += len(delta.token_ids)
        if delta.token_ids and entry.first_token_s is None:
            entry.first_token_s = self._clock()
        if delta.finish_reason is not None:
            self._end(delta.request_id, delta.finish_reason)

    def lose(self, request_ids: tuple[str, ...], reason: Literal["abort", "error"]) -> None:
        """Log requests that get no last delta."""
        for request_id in request_ids:
            if request_id in self._open:
                self._end(request_id, reason)

    def _end(self, request_id: str, reason: str) -> None:
        entry, now_s = self._open.pop(request_id), self._clock()
        first_s = None if entry.first_token_s is None else round(entry.first_token_s - entry.arrival_s, 4)
        fields = {
            "request": entry.label,
            "finish_reason": reason,
            "prompt_tokens": entry.num_prompt_tokens,
            "output_tokens": entry.num_output_tokens,
            "ttft_s": first_s,
            "total_s": round(now_s - entry.arrival_s, 4),
        }
        self._log("request over", fields)

    @staticmethod
    def _log(what: str, fields: dict[str, Any]) -> None:
        shown = " ".join(f"{name}={value}" for name, value in fields.items())
        logger.info("%s: %s", what, shown, extra={FIELDS: fields})
