"""A load on an engine in this process: one thread that adds what has arrived, steps, and notes when tokens came."""

import os
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from moesaic.bench.events import ArmRun, RequestEvents
from moesaic.bench.load import Call
from moesaic.engine.core import EngineCore
from moesaic.errors import MoesaicError
from moesaic.request import SamplingParams, StepOutput

Clock = Callable[[], float]


def drive(
    engine: EngineCore,
    calls: SequenceOf[Call],
    prompts: SequenceOf[tuple[int, ...]],
    *,
    arm: str,
    share: Callable[[float], None] = lambda done: None,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> ArmRun:
    """Return what the clients of ``calls`` saw of an idle ``engine``; blocks until all have ended.

    A call with ``lead_in_tokens`` arrives ``arrival_s`` after each decoder has so many tokens (or has ended), the
    others ``arrival_s`` after the start. A request counts from its arrival, also if a step was under way then. Times
    are those at which ``engine.step`` returned: no client, tokeniser or socket is in them. ``share`` is told what is
    done, 0 to 1.
    Raises: ``MoesaicError`` if a request fails.
    """
    load_average = os.getloadavg()
    run = _Run(engine, calls, prompts, clock)
    while run.has_work:
        run.add_arrivals()
        if engine.has_pending_requests():
            run.note(engine.step())
            share(run.share)
        else:
            sleep(run.seconds_to_next())
    return ArmRun(pair=0, arm=arm, requests=run.events(), duration_s=run.elapsed_s, load_average=load_average)


@dataclass(slots=True)
class _Track:
    """A request from its arrival on; seconds are from the start of the run."""

    arrival_s: float
    chunks: list[tuple[float, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    is_over: bool = False


class _Run:
    """A load on its way through the engine."""

    def __init__(
        self, engine: EngineCore, calls: SequenceOf[Call], prompts: SequenceOf[tuple[int, ...]], clock: Clock
    ) -> None:
        self._engine, self._clock, self._calls = engine, clock, calls
        self._to_come = list(zip(calls, prompts, strict=True))
        self._tracks: dict[str, _Track] = {}
        self._num_tokens, self._num_wanted = 0, sum(c.max_tokens for c in calls)
        self._lead_in_s: float | None = None
        self._start_s = clock()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._start_s

    @property
    def has_work(self) -> bool:
        return bool(self._to_come) or self._engine.has_pending_requests()

    @property
    def share(self) -> float:
        """The output tokens that came, as a share of those asked for."""
        return self._num_tokens / self._num_wanted

    def seconds_to_next(self) -> float:
        """Return how long nothing arrives; the engine is idle, so every decoder that came has ended."""
        return max(0.0, min(self._due_s(call) for call, _ in self._to_come) - self.elapsed_s)

    def add_arrivals(self) -> None:
        """Give the engine what has arrived by now."""
        self._note_lead_in()
        now_s = self.elapsed_s
        due = [(call, prompt) for call, prompt in self._to_come if self._due_s(call) <= now_s]
        for call, prompt in due:
            params = SamplingParams(max_tokens=call.max_tokens, temperature=0.0, ignore_eos=True)
            self._tracks[call.request_id] = _Track(self._due_s(call))
            self._engine.add_request(call.request_id, prompt, params)
        if due:
            self._to_come = [(call, prompt) for call, prompt in self._to_come if call.request_id not in self._tracks]

    def _due_s(self, call: Call) -> float:
        if not call.lead_in_tokens:
            return call.arrival_s
        return float("inf") if self._lead_in_s is None else self._lead_in_s + call.arrival_s

    def _note_lead_in(self) -> None:
        needed = max((call.lead_in_tokens for call, _ in self._to_come), default=0)
        if self._lead_in_s is not None or not needed or any(not call.lead_in_tokens for call, _ in self._to_come):
            return
        if all(t.is_over or len(t.token_ids) >= needed for t in self._tracks.values()):
            self._lead_in_s = self.elapsed_s

    def note(self, outputs: SequenceOf[StepOutput]) -> None:
        """Write down what a step gave, at the time it is now."""
        now_s = self.elapsed_s
        for output in outputs:
            if output.error is not None:
                raise MoesaicError(f"request {output.request_id!r} of the load failed: {output.error}")
            track = self._tracks[output.request_id]
            track.is_over = output.finish_reason is not None
            if output.new_token_ids:
                track.chunks.append((now_s, len(output.new_token_ids)))
                track.token_ids += output.new_token_ids
                self._num_tokens += len(output.new_token_ids)

    def events(self) -> tuple[RequestEvents, ...]:
        """Return the requests in the order of the load."""
        return tuple(
            RequestEvents(
                request_id=call.request_id,
                role=call.role,
                arrival_s=(track := self._tracks[call.request_id]).arrival_s,
                chunks=tuple(track.chunks),
                token_ids=tuple(track.token_ids),
                num_prompt_tokens=call.num_prompt_tokens,
            )
            for call in self._calls
        )
