"""The last steps of one engine, for whoever watches: counts and times, nothing of what was asked or answered."""

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from moesaic.sched.scheduler import Scheduler
from moesaic.sched.transaction import StepTransaction
from moesaic.sequence import SeqId

CAPACITY_STEPS = 2048
"""Steps that are kept for a watcher who comes late; at 4 ms a step about 8 s."""

WATCH_S = 10.0
"""How long steps are recorded after somebody last asked for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One committed step; seconds are of the engine's clock."""

    number: int
    """Its place among the committed steps, from 1."""
    start_s: float
    plan_s: float
    """Planning and leases."""
    launch_s: float
    """Forward and sampling, the wait for the device included."""
    commit_s: float
    decode_rows: int
    chunks: tuple[tuple[int, int], ...]
    """Which request, by its number in the order of arrival, and how many of its prompt tokens."""
    largest_itl_s: float | None
    """The largest gap between tokens that the step ended; None if it gave no request a second token."""
    kv_blocks_used: int
    """After the step."""
    num_running: int
    num_waiting: int


class StepLog:
    """Records steps while somebody asks for them; otherwise a step costs a few comparisons."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._records: deque[StepRecord] = deque(maxlen=CAPACITY_STEPS)
        self._watched_until_s: float | None = None
        self._token_s: dict[SeqId, float] = {}
        """When each unfinished request got its last token."""

    def begin(self) -> list[float]:
        """A step begins; return where its laps go, empty if nobody watches. All steps are forgotten after a while."""
        if self._watched_until_s is None:
            return []
        now_s = self._clock()
        if now_s > self._watched_until_s:
            self._watched_until_s = None
            self._records.clear()
            self._token_s.clear()
        return [now_s]

    def lap(self, laps_s: list[float]) -> None:
        """A phase of the step with these laps is over: its planning, its forward."""
        if laps_s:
            laps_s.append(self._clock())

    def commit(self, laps_s: list[float], tx: StepTransaction, scheduler: Scheduler) -> None:
        """Keep a step that was committed."""
        if self._watched_until_s is None or not laps_s:
            return
        start_s, planned_s, launched_s = laps_s
        end_s = self._clock()
        pool = scheduler.kv.pool
        self._records.append(
            StepRecord(
                number=scheduler.counts.num_steps,
                start_s=start_s,
                plan_s=planned_s - start_s,
                launch_s=launched_s - planned_s,
                commit_s=end_s - launched_s,
                decode_rows=len(tx.plan.decode_rows),
                chunks=tuple((c.seq_id, c.num_tokens) for c in tx.plan.chunks),
                largest_itl_s=self._largest_itl_s(tx, scheduler, end_s),
                kv_blocks_used=pool.num_blocks - pool.num_free,
                num_running=len(scheduler.running),
                num_waiting=scheduler.num_waiting,
            )
        )

    def _largest_itl_s(self, tx: StepTransaction, scheduler: Scheduler, end_s: float) -> float | None:
        last_s = self._token_s
        gaps = [end_s - last_s[i] for i in tx.plan.sampling_row_ids if i in last_s]
        last_s |= dict.fromkeys(tx.plan.sampling_row_ids, end_s)
        self._token_s = {s.seq_id: last_s[s.seq_id] for s in scheduler.sequences if s.seq_id in last_s}
        return max(gaps, default=None)

    def after(self, number: int | None, scheduler: Scheduler) -> dict[str, Any]:
        """Return the steps behind ``number`` that are kept, and the state now (Any: JSON values); begins to record.

        None asks for no step, only that those to come are kept. What is missing up to ``latest`` was not recorded, or
        fell out of the buffer.
        """
        self._watched_until_s = self._clock() + WATCH_S
        pool = scheduler.kv.pool
        return {
            "latest": scheduler.counts.num_steps,
            "num_running": len(scheduler.running),
            "num_waiting": scheduler.num_waiting,
            "kv_blocks_total": pool.num_blocks,
            "kv_blocks_used": pool.num_blocks - pool.num_free,
            "steps": [asdict(record) for record in self._records if number is not None and record.number > number],
        }
