"""When each token came: a late prompt among running streams, through the synchronous engine."""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import pairwise

from moesaic.engine.core import EngineCore
from moesaic.errors import MoesaicError
from moesaic.kv.geometry import blocks_for_tokens
from moesaic.request import SamplingParams

Clock = Callable[[], float]
Share = Callable[[float], None]
"""Called with the share of the work that is done, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One greedy request of a scenario."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = False

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, temperature=0.0, ignore_eos=self.ignore_eos)

    @property
    def num_tokens(self) -> int:
        """Most tokens of prompt and output."""
        return len(self.prompt_token_ids) + self.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Streams that start together, and one request that arrives while they run."""

    streams: tuple[Ask, ...]
    late: Ask
    lead_in_tokens: int
    """Output tokens that each stream has (or it has ended) before the late request arrives."""

    @property
    def asks(self) -> tuple[Ask, ...]:
        return (*self.streams, self.late)

    def num_kv_blocks(self, block_size: int) -> int:
        """Return the KV blocks with which no request ever waits for another.

        One more for each request: a prompt is admitted only if it leaves a block free for every running row.
        """
        return sum(blocks_for_tokens(ask.num_tokens, block_size) + 1 for ask in self.asks)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTimes:
    """When one request arrived and when each output token came, in seconds of one clock."""

    request_id: str
    arrival_s: float
    token_ids: tuple[int, ...]
    token_s: tuple[float, ...]
    """One per token id; tokens of one step came together."""

    @property
    def ttft_s(self) -> float | None:
        """None if no token came."""
        return self.token_s[0] - self.arrival_s if self.token_s else None

    def itl_s(self, since_s: float = float("-inf")) -> tuple[float, ...]:
        """Return the gaps between consecutive tokens that end after ``since_s``."""
        return tuple(after - before for before, after in pairwise(self.token_s) if after > since_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What one run of a scenario gave, and when."""

    streams: tuple[TokenTimes, ...]
    late: TokenTimes
    started_s: float
    ended_s: float
    num_steps: int
    num_late_chunks: int
    """Parts in which the late prompt was computed."""

    @property
    def ttft_s(self) -> float:
        """TTFT of the late prompt.

        Raises: ``MoesaicError`` if it got no token.
        """
        if self.late.ttft_s is None:
            raise MoesaicError(f"request {self.late.request_id!r} got no token; ask for at least 1")
        return self.late.ttft_s

    @property
    def itl_s(self) -> tuple[float, ...]:
        """The gaps of all streams that end after the late prompt arrived."""
        return tuple(gap for stream in self.streams for gap in stream.itl_s(self.late.arrival_s))

    @property
    def stall_s(self) -> float:
        """The largest of ``itl_s``.

        Raises: ``MoesaicError`` if every stream had ended when the late prompt arrived.
        """
        if not self.itl_s:
            raise MoesaicError("no stream was running when the late prompt arrived; raise their max_tokens")
        return max(self.itl_s)

    @property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of the streams, then of the late request."""
        return tuple(times.token_ids for times in (*self.streams, self.late))


def run_scenario(
    engine: EngineCore,
    scenario: Scenario,
    *,
    clock: Clock = time.perf_counter,
    share: Share = lambda done: None,
) -> Timeline:
    """Return the timeline of ``scenario`` on an idle ``engine``; blocks until all requests have ended."""
    return _Run(engine, scenario, clock, share).finish()


@dataclass(slots=True)
class _Track:
    """One request while it runs."""

    arrival_s: float
    token_ids: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    is_over: bool = False

    def frozen(self, request_id: str) -> TokenTimes:
        return TokenTimes(
            request_id=request_id,
            arrival_s=self.arrival_s,
            token_ids=tuple(self.token_ids),
            token_s=tuple(self.token_s),
        )


class _Run:
    """A scenario on its way through the engine."""

    def __init__(self, engine: EngineCore, scenario: Scenario, clock: Clock, share: Share) -> None:
        self._engine, self._scenario, self._clock, self._share = engine, scenario, clock, share
        self._tracks: dict[str, _Track] = {}
        self._before = self._counts()
        self._num_tokens = sum(ask.num_tokens for ask in scenario.asks)

    def finish(self) -> Timeline:
        started_s = self._clock()
        for ask in self._scenario.streams:
            self._add(ask)
        while not self._has_lead_in():
            self._step()
        num_chunks_before = self._counts()["num_prefill_chunks"]
        self._add(self._scenario.late)
        while self._engine.has_pending_requests():
            self._step()
        counts = self._counts()
        return Timeline(
            streams=self._frozen(self._scenario.streams),
            late=self._frozen((self._scenario.late,))[0],
            started_s=started_s,
            ended_s=self._clock(),
            num_steps=counts["num_steps"] - self._before["num_steps"],
            num_late_chunks=counts["num_prefill_chunks"] - num_chunks_before,
        )

    def _counts(self) -> Mapping[str, int]:
        return self._engine.stats()

    def _add(self, ask: Ask) -> None:
        self._tracks[ask.request_id] = _Track(arrival_s=self._clock())
        self._engine.add_request(ask.request_id, ask.prompt_token_ids, ask.params)

    def _has_lead_in(self) -> bool:
        return all(t.is_over or len(t.token_ids) >= self._scenario.lead_in_tokens for t in self._tracks.values())

    def _step(self) -> None:
        outputs = self._engine.step()
        now_s = self._clock()
        for output in outputs:
            track = self._tracks[output.request_id]
            track.token_ids += output.new_token_ids
            track.token_s += [now_s] * len(output.new_token_ids)
            track.is_over = output.finish_reason is not None
        counts = self._counts()
        names = ("num_prompt_tokens", "num_generation_tokens")
        self._share(sum(counts[n] - self._before[n] for n in names) / self._num_tokens)

    def _frozen(self, asks: SequenceOf[Ask]) -> tuple[TokenTimes, ...]:
        return tuple(self._tracks[ask.request_id].frozen(ask.request_id) for ask in asks)


def token_strip(timeline: Timeline, span_s: float, width: int) -> str:
    """Return the streams' tokens over time: one character per ``span_s / width``, ``#`` if a token came in it.

    Time starts with the run; what came after ``span_s`` is left out.
    """
    cells = ["."] * width
    for stream in timeline.streams:
        for at in stream.token_s:
            cell = int((at - timeline.started_s) / span_s * width)
            if cell < width:
                cells[cell] = "#"
    return "".join(cells)
