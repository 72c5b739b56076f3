"""One record for each request that is over: its label and its numbers, nothing of what was asked or answered."""

import logging
from dataclasses import dataclass
from typing import Any, Literal

from moesaic.engine.client import Submission
from moesaic.engine.outputs import TextDelta
from moesaic.errors import EngineDeadError, EngineDrainingError, RequestError
from moesaic.log import FIELDS
from moesaic.request import RequestMetrics
from moesaic.server.labels import current_label

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    """A request that is not over."""

    label: str | None
    num_prompt_tokens: int
    num_output_tokens: int = 0


class RequestLog:
    """A ``RequestObserver`` that logs at level info; without that level it keeps nothing."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def admit(self, request_id: str, submission: Submission) -> None:
        """Begin a request under the label of the HTTP request that brought it."""
        if logger.isEnabledFor(logging.INFO):
            self._open[request_id] = _Open(current_label.get(), len(submission.prompt_token_ids))

    def refuse(self, error: RequestError | EngineDeadError | EngineDrainingError) -> None:
        """Log a refusal by its kind; its message may quote what was sent."""
        self._log("request refused", {"request": current_label.get(), "error": type(error).__name__})

    def observe(self, delta: TextDelta) -> None:
        """Count a delta, and log the request with its last."""
        entry = self._open.get(delta.request_id)
        if entry is None:
            return
        entry.num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            metrics = None if delta.output is None else delta.output.metrics
            self._end(delta.request_id, delta.finish_reason, metrics)

    def lose(self, request_ids: tuple[str, ...], reason: Literal["abort", "error"]) -> None:
        """Log requests that get no last delta: of these no times are known."""
        for request_id in request_ids:
            if request_id in self._open:
                self._end(request_id, reason, None)

    def _end(self, request_id: str, reason: str, metrics: RequestMetrics | None) -> None:
        entry = self._open.pop(request_id)
        fields: dict[str, Any] = {
            "request": entry.label,
            "finish_reason": reason,
            "prompt_tokens": entry.num_prompt_tokens,
            "output_tokens": entry.num_output_tokens,
        }
        if metrics is not None:
            fields["total_s"] = round(metrics.finished_s - metrics.arrival_s, 4)
            if metrics.ttft_s is not None:
                fields["ttft_s"] = round(metrics.ttft_s, 4)
        self._log("request over", fields)

    @staticmethod
    def _log(what: str, fields: dict[str, Any]) -> None:
        shown = " ".join(f"{name}={value}" for name, value in fields.items())
        logger.info("%s: %s", what, shown, extra={FIELDS: fields})
