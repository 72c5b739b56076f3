"""What the steps of one engine did: sizes, waits and gaps, as histograms for ``stats()``."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from moesaic.histogram import SECONDS, STEPS, TOKENS, Histogram
from moesaic.sched.blocked import BLOCKED_BY
from moesaic.sched.plan import PrefillChunk
from moesaic.sched.scheduler import Scheduler
from moesaic.sched.transaction import StepTransaction
from moesaic.sequence import SeqId

_BOUNDS = {
    "request_queue_time_seconds": SECONDS,
    "request_prefill_time_seconds": SECONDS,
    "prefill_wait_seconds": SECONDS,
    "prefill_wait_steps": STEPS,
    "decode_gap_steps": STEPS,
    "step_seconds": SECONDS,
    "iteration_tokens": TOKENS,
    "prefill_chunk_tokens": TOKENS,
}
"""Histograms by their key in ``stats()["histograms"]``; docs/metrics.md says what each means."""


_RECENT_STEPS = 1024
"""Steps with decode rows that the reported percentile is of: some 20 s at 20 ms each."""


class StepStart(NamedTuple):
    """What the commit of a step will change and its meters must know."""

    now_s: float
    wait_steps: dict[SeqId, int]
    num_decode_gap_steps: int


@dataclass(slots=True)
class _Prefill:
    """A request whose first prefill is not over, in seconds of the engine's clock."""

    arrival_s: float
    started_s: float | None = None
    served_s: float | None = None
    """The end of the last step that had a chunk of it."""


class StepMeters:
    """Counts what committed steps did; costs O(chunks) a step and nothing per decode row."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._prefills: dict[str, _Prefill] = {}
        self._histograms = {name: Histogram(bounds) for name, bounds in _BOUNDS.items()}
        self._num_blocked_steps: dict[str, int] = dict.fromkeys(BLOCKED_BY, 0)
        self._stalls_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._last_end_s: float | None = None

    def begin(self, request_id: str) -> None:
        """Count the wait of a request from now on."""
        self._prefills[request_id] = _Prefill(self._clock())

    def forget(self, request_id: str) -> None:
        """A request ended; one that is unknown changes nothing."""
        self._prefills.pop(request_id, None)

    def start(self, scheduler: Scheduler) -> StepStart:
        """Return what ``commit`` needs to know of the time before the step."""
        running = scheduler.running
        return StepStart(self._clock(), running.rotation.wait_steps, running.num_decode_gap_steps)

    def commit(self, start: StepStart, tx: StepTransaction) -> float | None:
        """Count a committed step; one without rows is none.

        Returns the seconds since the end of the last one: how long the streams in it waited for their tokens, what
        came between the steps included. None for a step without rows.
        """
        plan = tx.plan
        if not plan.num_rows:
            return None
        end_s = self._clock()
        stall_s = end_s - (start.now_s if self._last_end_s is None else self._last_end_s)
        self._last_end_s = end_s
        if plan.decode_rows:
            self._stalls_s.append(stall_s)
        # A step launched behind another begins when that one ends.
        self._observe("step_seconds", min(stall_s, end_s - start.now_s))
        self._observe("iteration_tokens", plan.num_tokens)
        if start.num_decode_gap_steps and plan.decode_rows:
            self._observe("decode_gap_steps", start.num_decode_gap_steps)
        for service in tx.proposal.services:
            if service.num_tokens:
                self._observe("prefill_wait_steps", start.wait_steps.get(service.member, 0))
        for chunk in plan.chunks:
            self._count_chunk(tx.sequences[chunk.seq_id].request.request_id, chunk, start.now_s, end_s)
        if tx.blocked_by is not None:
            self._num_blocked_steps[tx.blocked_by] += 1
        return stall_s

    def _count_chunk(self, request_id: str, chunk: PrefillChunk, start_s: float, end_s: float) -> None:
        self._observe("prefill_chunk_tokens", chunk.num_tokens)
        prefill = self._prefills.get(request_id)
        if prefill is None:
            return  # a prompt that is computed again after preemption: its waits are counted already
        if prefill.started_s is None:
            prefill.started_s = start_s
            self._observe("request_queue_time_seconds", start_s - prefill.arrival_s)
        ready_s = prefill.arrival_s if prefill.served_s is None else prefill.served_s
        self._observe("prefill_wait_seconds", start_s - ready_s)
        prefill.served_s = end_s
        if chunk.is_terminal:
            self._observe("request_prefill_time_seconds", end_s - prefill.started_s)
            del self._prefills[request_id]

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def stats(self) -> dict[str, Any]:
        """Return the histograms, the blocked steps by reason, and the recent stalls' p99 (Any: JSON values)."""
        histograms = {name: histogram.as_json() for name, histogram in self._histograms.items()}
        return {
            "histograms": histograms,
            "num_blocked_steps": dict(self._num_blocked_steps),
            "decode_stall_p99_seconds": self._stall_p99_s(),
        }

    def _stall_p99_s(self) -> float:
        """Return the 99th percentile by nearest rank; 0 without any."""
        ordered = sorted(self._stalls_s)
        return ordered[-1 - len(ordered) // 100] if ordered else 0.0
