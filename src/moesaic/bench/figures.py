"""Figures of recorded requests: running decoders and long prompts apart, pair by pair."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from moesaic.bench.events import ArmRun, Recording, RequestEvents, percentile
from moesaic.bench.paired import Spread

ROLES = {"decoder": "running decoders", "long": "long prompts"}
METRICS = {"ttft_s": "TTFT", "itl_s": "ITL", "tpot_s": "TPOT", "stall_s": "stall"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Percentiles by nearest rank, and of how many values."""

    p50: float
    p90: float
    p99: float
    max: float
    n: int

    @classmethod
    def of(cls, values: SequenceOf[float]) -> "Distribution | None":
        """Return None without values."""
        if not values:
            return None
        p50, p90, p99 = (percentile(values, share) for share in (0.5, 0.9, 0.99))
        return cls(p50=p50, p90=p90, p99=p99, max=max(values), n=len(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """A request is good if it ended without an error, its first token came in time and no gap was longer."""

    ttft_s: float
    stall_s: float

    def is_met(self, request: RequestEvents) -> bool:
        if request.error or request.is_cancelled or request.ttft_s is None:
            return False
        return request.ttft_s <= self.ttft_s and (request.stall_s or 0.0) <= self.stall_s


def values(runs: Iterable[ArmRun], role: str, metric: str) -> list[float]:
    """Return one value per request (``itl_s``: per gap) of ``role``; failed requests have their own count."""
    found: list[float] = []
    for run in runs:
        for request in run.requests:
            if request.role == role and request.error is None:
                value = getattr(request, metric)
                found += value if isinstance(value, tuple) else [] if value is None else [value]
    return found


def goodput(run: ArmRun, bounds: Bounds) -> float:
    """Return good requests per second."""
    return sum(map(bounds.is_met, run.requests)) / run.duration_s


def tokens_per_s(run: ArmRun) -> float:
    """Return output tokens per second of the whole run."""
    return run.num_tokens / run.duration_s


def difference(recording: Recording, role: str, metric: str, name: str) -> Spread | None:
    """Return candidate - baseline of one percentile, pair by pair; None where an arm has no value."""
    baseline, candidate = recording.arms
    gaps = []
    for a, b in zip(recording.of(baseline), recording.of(candidate), strict=True):
        left, right = (Distribution.of(values([run], role, metric)) for run in (a, b))
        if left and right:
            gaps.append(getattr(right, name) - getattr(left, name))
    return Spread.of(gaps) if gaps else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """How many outputs of a pair are equal, of those that both arms gave."""

    num_equal: int
    num_compared: int
    num_failed: int = 0
    """Requests that failed in either arm; there is nothing to compare."""

    @property
    def is_equal(self) -> bool:
        return self.num_failed == 0 and 0 < self.num_compared == self.num_equal


def parity(recording: Recording) -> Parity:
    """Compare token ids where both servers tell them, else texts; of a cancelled request what both had."""
    baseline, candidate = recording.arms
    num_equal = num_compared = num_failed = 0
    for a, b in zip(recording.of(baseline), recording.of(candidate), strict=True):
        for left, right in zip(a.requests, b.requests, strict=True):
            if left.error is None and right.error is None:
                num_compared += 1
                num_equal += _is_equal(left, right)
            else:
                num_failed += 1
    return Parity(num_equal=num_equal, num_compared=num_compared, num_failed=num_failed)


def _is_equal(a: RequestEvents, b: RequestEvents) -> bool:
    has_ids = a.token_ids is not None and b.token_ids is not None
    left, right = (a.token_ids or (), b.token_ids or ()) if has_ids else (a.text, b.text)
    if a.is_cancelled or b.is_cancelled:
        size = min(len(left), len(right))
        return left[:size] == right[:size]
    return left == right
