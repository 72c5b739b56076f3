"""Talking to an engine from an event loop: the seam between the server and whatever runs the core."""

import asyncio
import itertools
import logging
import queue
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from moesaic.engine.detokenizer import Tokenizer
from moesaic.engine.messages import (
    AbortRequests,
    AddRequests,
    Answer,
    Command,
    EngineDied,
    Event,
    NewRequest,
    PauseRequests,
    QueryStats,
    QuerySteps,
    Refusal,
    ResumeRequests,
    StepDone,
)
from moesaic.engine.outputs import OutputProcessor, TextDelta
from moesaic.errors import EngineDeadError, EngineDrainingError
from moesaic.request import SamplingParams, check_int64

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 30.0
"""How long ``close`` waits for the step in flight; no step of a sound engine takes that long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One request as the server hands it over; ``prompt`` is its text, where it had one.

    Raises: ``RequestError`` for numbers that no message to an engine can carry; the engine judges the rest.
    """

    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    prompt: str | None = None
    priority: int = 0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        check_int64("priority", self.priority)
        for edge in (min, max):
            check_int64("prompt", edge(self.prompt_token_ids, default=0))


class EngineClient(Protocol):
    """An engine as the event loop sees it. Every method is called from the loop that ``start`` ran on."""

    @property
    def is_healthy(self) -> bool:
        """True from ``start`` until the engine fails, is drained or is closed."""

    @property
    def error(self) -> EngineDeadError | EngineDrainingError | None:
        """Why the engine takes no more requests; None while it does."""

    @property
    def num_open_streams(self) -> int:
        """Requests whose last delta has not come."""

    async def start(self) -> None:
        """Begin to serve."""

    def drain(self) -> None:
        """Take no more requests; those that run go on."""

    async def close(self) -> None:
        """Stop serving: unfinished requests end with ``abort``. Safe to call twice."""

    async def submit(self, *submissions: Submission) -> "DeltaStream":
        """Return the stream of these requests once all of them are admitted; if one is refused, none is.

        Raises: ``RequestError`` as the engine gave it, ``EngineDeadError``, ``EngineDrainingError``.
        """

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests soon; their streams get a last delta. Unknown and finished ids change nothing."""

    def pause(self, request_ids: Iterable[str]) -> None:
        """Set these requests aside, without KV, until ``resume``; ids that are unknown or over change nothing."""

    def resume(self, request_ids: Iterable[str]) -> None:
        """Let paused requests go on; other ids change nothing."""

    async def stats(self) -> dict[str, Any]:
        """Return the engine's counts and gauges (Any: JSON values). Raises: ``EngineDeadError``."""

    async def steps(self, after: int | None) -> dict[str, Any]:
        """Return the steps behind number ``after``, and gauges (Any: JSON values). Raises: ``EngineDeadError``.

        Steps are recorded for some seconds after each call and not otherwise; None asks for none yet.
        """


class DeltaObserver(Protocol):
    """Told what the reader of a stream gets; for statistics."""

    def observe(self, delta: TextDelta) -> None:
        """Take one delta as it came, whether or not its reader gets it together with others."""

    def lose(self, request_ids: tuple[str, ...], reason: Literal["abort", "error"]) -> None:
        """Take requests that get no last delta: their reader has left, or the engine is dead."""


class DeltaStream:
    """What the requests of one submission get, as it comes; ends after the last delta of each.

    What came for a request since the reader last looked is one delta: a reader that falls behind, because it is slow
    or the event loop is, has less to do for each token and catches up.
    For one reader, inside ``async with``: leaving the block aborts what is unfinished.
    Raises while iterated: ``EngineDeadError``, after the deltas that came before.
    """

    def __init__(self, request_ids: tuple[str, ...], on_close: Callable[["DeltaStream"], None]) -> None:
        self.request_ids = request_ids
        self.observer: DeltaObserver | None = None
        self._unfinished = set(request_ids)
        self._on_close = on_close
        # By request, in the order in which each first had something unread. max_tokens bounds what comes here.
        self._unread: dict[str, list[TextDelta]] = {}
        self._death: EngineDied | None = None
        self._has_news = asyncio.Event()

    @property
    def unfinished_ids(self) -> tuple[str, ...]:
        """Requests whose last delta has not been read."""
        return tuple(i for i in self.request_ids if i in self._unfinished)

    def put(self, item: TextDelta | EngineDied) -> None:
        """Add what came from the engine; for clients of engines only."""
        if isinstance(item, EngineDied):
            self._death = item
        else:
            self._unread.setdefault(item.request_id, []).append(item)
        self._has_news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        while self._unfinished and not self._unread:
            if self._death is not None:
                self._lose("error")
                raise self._death.error()
            self._has_news.clear()
            await self._has_news.wait()
        if not self._unfinished:
            raise StopAsyncIteration
        request_id = next(iter(self._unread))
        deltas = self._unread.pop(request_id)
        if deltas[-1].finish_reason is not None:
            self._unfinished.discard(request_id)
        if self.observer is not None:
            for delta in deltas:
                self.observer.observe(delta)
        return TextDelta.joined(deltas)

    def _lose(self, reason: Literal["abort", "error"]) -> None:
        if self.observer is not None and self._unfinished:
            self.observer.lose(self.unfinished_ids, reason)
        self._unfinished.clear()

    async def aclose(self) -> None:
        """Abort what is unfinished and end the iteration. Does not wait for the engine; safe to call twice."""
        self._on_close(self)
        self._lose("abort")
        self._has_news.set()  # a reader in another task must not wait for what will never come

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


@dataclass(frozen=True, slots=True)
class _Begin:
    """A request whose text begins once it is admitted."""

    request_id: str
    submission: Submission
    arrival_s: float


@dataclass(frozen=True, slots=True)
class _Asked:
    """Requests that wait for their admission; told to the receiver before the engine hears of them."""

    ticket: int
    requests: tuple[_Begin, ...]


class TextEngineClient:
    """What clients of engines share: tickets and streams on the event loop, text on a thread that receives events.

    The receiver owns the ``OutputProcessor``: texts are made off the event loop and off the engine. Whoever runs the
    engine gives ``_send`` (called on the event loop only) and calls ``_receive`` (on the receiver only).
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """``tokenizer`` is the receiver's own: tokenizers are not safe to share where one thread changes them."""
        self._outputs = OutputProcessor(tokenizer)
        self._asked: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._waiting: dict[int, tuple[_Begin, ...]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, DeltaStream] = {}
        self._waiters: dict[int, asyncio.Future[Answer | Refusal | EngineDied]] = {}
        self._tickets = itertools.count()
        self._end: EngineDied | None = None
        self._is_draining = False

    def _send(self, command: Command) -> None:
        raise NotImplementedError

    @property
    def is_healthy(self) -> bool:
        return self._loop is not None and self.error is None

    @property
    def error(self) -> EngineDeadError | EngineDrainingError | None:
        if self._end is not None:
            return self._end.error()
        return EngineDrainingError("the server is stopping and takes no more requests") if self._is_draining else None

    @property
    def num_open_streams(self) -> int:
        return len(self._streams)

    def drain(self) -> None:
        self._is_draining = True

    async def submit(self, *submissions: Submission) -> DeltaStream:
        self._check_alive()
        if self._is_draining and (error := self.error) is not None:
            raise error
        begun = tuple(_Begin(uuid.uuid4().hex, s, time.monotonic()) for s in submissions)
        stream = DeltaStream(tuple(one.request_id for one in begun), self._forget)
        self._check_stops(submissions)
        self._streams |= dict.fromkeys(stream.request_ids, stream)
        try:
            await self._ask(lambda ticket: self._asking(ticket, begun))
        except BaseException:  # also a cancelled submitter: its requests may be running by now
            await stream.aclose()
            raise
        return stream

    def _asking(self, ticket: int, begun: tuple[_Begin, ...]) -> AddRequests:
        self._asked.put(_Asked(ticket, begun))
        return AddRequests(ticket, tuple(_new_requests(begun)))

    def _check_stops(self, submissions: Iterable[Submission]) -> None:
        for submission in submissions:
            self._outputs.check_params(submission.sampling_params)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._send(AbortRequests(tuple(request_ids)))

    def pause(self, request_ids: Iterable[str]) -> None:
        self._send(PauseRequests(tuple(request_ids)))

    def resume(self, request_ids: Iterable[str]) -> None:
        self._send(ResumeRequests(tuple(request_ids)))

    async def stats(self) -> dict[str, Any]:
        answer = await self._ask(QueryStats)
        stats: dict[str, Any] = answer.value
        return stats

    async def steps(self, after: int | None) -> dict[str, Any]:
        answer = await self._ask(lambda ticket: QuerySteps(ticket, after))
        steps: dict[str, Any] = answer.value
        return steps

    # On the event loop

    async def _ask(self, command: Callable[[int], Command]) -> Answer:
        self._check_alive()
        ticket = next(self._tickets)
        # Errors are results here: an exception set on a future that nobody reads any more would be reported as lost.
        waiter: asyncio.Future[Answer | Refusal | EngineDied] = asyncio.get_running_loop().create_future()
        self._waiters[ticket] = waiter
        self._send(command(ticket))
        try:
            reply = await waiter
        finally:
            self._waiters.pop(ticket, None)
        if isinstance(reply, Refusal):
            raise reply.error
        if isinstance(reply, EngineDied):
            raise reply.error()
        return reply

    def _check_alive(self) -> None:
        if self._loop is None:
            raise EngineDeadError("the engine client has not been started; await start() first")
        if self._end is not None:
            raise self._end.error()

    def _forget(self, stream: DeltaStream) -> None:
        """Stop listening for a stream and abort what it leaves unfinished."""
        unfinished = stream.unfinished_ids
        for request_id in unfinished:
            self._streams.pop(request_id, None)
        if unfinished and self._end is None:
            self.abort(unfinished)

    def _deliver(self, items: list[TextDelta | Answer | Refusal | EngineDied], stopped_ids: list[str]) -> None:
        if stopped_ids and self._end is None:
            self.abort(stopped_ids)
        for item in items:
            match item:
                case TextDelta():
                    self._deliver_delta(item)
                case Answer() | Refusal():
                    self._resolve(item.ticket, item)
                case EngineDied():
                    self._die(item)

    def _deliver_delta(self, delta: TextDelta) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is None:
            return  # its reader has left
        if delta.finish_reason is not None:
            del self._streams[delta.request_id]
        stream.put(delta)

    def _resolve(self, ticket: int, reply: Answer | Refusal | EngineDied) -> None:
        waiter = self._waiters.get(ticket)
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)

    def _die(self, death: EngineDied) -> None:
        """Tell everyone who waits; those who come later are told at the door."""
        self._end = death
        for stream in set(self._streams.values()):
            stream.put(death)
        self._streams.clear()
        for ticket in list(self._waiters):
            self._resolve(ticket, death)

    # On the receiver

    def _receive(self, events: list[Event]) -> bool:
        """Make the texts of ``events`` and hand all to the event loop; False if that has gone."""
        items: list[TextDelta | Answer | Refusal | EngineDied] = []
        stopped_ids: list[str] = []
        for event in events:
            if isinstance(event, StepDone):
                step = self._outputs.process(event.outputs, time.monotonic())
                items += step.deltas
                stopped_ids += step.aborts
            else:
                self._begin_texts(event)
                items.append(event)
        assert self._loop is not None  # start() sets it before anything is received
        try:
            self._loop.call_soon_threadsafe(self._deliver, items, stopped_ids)
        except RuntimeError:
            return False  # the event loop was closed without close(): there is nobody left to tell
        return True

    def _begin_texts(self, event: Answer | Refusal | EngineDied) -> None:
        """Begin the texts of requests that are admitted; nothing is made of those that are refused."""
        while not self._asked.empty():
            asked = self._asked.get()
            self._waiting[asked.ticket] = asked.requests
        requests = () if isinstance(event, EngineDied) else self._waiting.pop(event.ticket, ())
        if isinstance(event, Answer):
            for one in requests:
                asked_for = one.submission
                params, prompt_ids = asked_for.sampling_params, asked_for.prompt_token_ids
                self._outputs.add(one.request_id, asked_for.prompt, prompt_ids, params, one.arrival_s)


def _new_requests(begun: Iterable[_Begin]) -> Iterator[NewRequest]:
    """Yield what the engine is told; of equal prompts, as the choices of one are, only the first is sent."""
    leaders: dict[tuple[int, ...], str] = {}
    for one in begun:
        submission = one.submission
        leader = leaders.setdefault(submission.prompt_token_ids, one.request_id)
        yield NewRequest(
            request_id=one.request_id,
            prompt_token_ids=submission.prompt_token_ids if leader == one.request_id else (),
            sampling_params=submission.sampling_params,
            priority=submission.priority,
            timeout_s=submission.timeout_s,
            sibling_of=None if leader == one.request_id else leader,
        )
