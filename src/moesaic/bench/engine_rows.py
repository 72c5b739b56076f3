"""Figures of a load on one engine, as lines of a table."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from moesaic.bench.engine_load import EngineLoad
from moesaic.bench.events import ArmRun, RequestEvents
from moesaic.bench.figures import Distribution

SETTLING_GAPS = 10
"""First gaps of a stream that are not counted as quiet: others of its company still start."""
COLUMNS = ("load", "gap p50", "p99", "max", "TTFT p50", "max", "out/s", "all/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Gaps between tokens and TTFT in milliseconds, tokens per second; None where they say nothing of this load."""

    load: str
    gap_ms: Distribution | None = None
    ttft_ms: Distribution | None = None
    output_tokens_per_s: float | None = None
    tokens_per_s: float | None = None
    """Of prompts and outputs together."""

    def cells(self) -> tuple[str, ...]:
        """Return what the table shows, one per column."""
        gap, ttft = self.gap_ms, self.ttft_ms
        gaps = (None, None, None) if gap is None else (gap.p50, gap.p99, gap.max)
        numbers = (*gaps, *((None, None) if ttft is None else (ttft.p50, ttft.max)))
        rates = (self.output_tokens_per_s, self.tokens_per_s)
        return (self.load, *(_shown(n, 1) for n in numbers), *(_shown(n, 0) for n in rates))


def rows_of(kind: EngineLoad, name: str, run: ArmRun) -> tuple[Row, ...]:
    """Return the lines of one load.

    decode: gaps that end once every row has a token. stall: the streams' gaps before the first long prompt arrives, and
    those until the last long prompt has its first token. offline: everything.
    """
    if kind == "stall":
        return _stall_rows(name, run)
    since_s = max(r.token_s[0] for r in run.requests) if kind == "decode" else 0.0
    num_tokens = run.num_tokens + sum(r.num_prompt_tokens for r in run.requests)
    return (
        Row(
            load=name,
            gap_ms=_gaps(run.requests, lambda start, end: end > since_s),
            ttft_ms=_ttft(run.requests),
            output_tokens_per_s=run.num_tokens / run.duration_s,
            tokens_per_s=num_tokens / run.duration_s,
        ),
    )


def _stall_rows(name: str, run: ArmRun) -> tuple[Row, ...]:
    streams = [r for r in run.requests if r.role == "decoder"]
    long = [r for r in run.requests if r.role == "long"]
    start_s, end_s = min(r.arrival_s for r in long), max(r.token_s[0] for r in long)
    settled_s = max(r.token_s[min(SETTLING_GAPS, len(r.token_s) - 1)] for r in streams)
    return (
        Row(load=f"{name}: before", gap_ms=_gaps(streams, lambda _, end: settled_s < end <= start_s)),
        Row(load=f"{name}: streams", gap_ms=_gaps(streams, lambda _, end: start_s < end <= end_s)),
        Row(load=f"{name}: long", ttft_ms=_ttft(long)),
    )


def num_ended_early(run: ArmRun) -> int:
    """Return how many streams ended before the last long prompt had its first token: there is less to stall then."""
    end_s = max((r.token_s[0] for r in run.requests if r.role == "long"), default=0.0)
    return sum(r.token_s[-1] < end_s for r in run.requests if r.role == "decoder")


def _gaps(requests: Iterable[RequestEvents], is_counted: Callable[[float, float], bool]) -> Distribution | None:
    pairs = (pair for r in requests for pair in pairwise(r.token_s))
    return Distribution.of([1e3 * (end - start) for start, end in pairs if is_counted(start, end)])


def _ttft(requests: Iterable[RequestEvents]) -> Distribution | None:
    return Distribution.of([1e3 * r.ttft_s for r in requests if r.ttft_s is not None])


def _shown(number: float | None, digits: int) -> str:
    return "" if number is None else f"{number:.{digits}f}"
