"""Talking to an engine from an event loop: the seam between the server and whatever runs the core."""

import asyncio
import itertools
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from moesaic.engine.core import EngineCore
from moesaic.engine.detokenizer import Tokenizer
from moesaic.engine.loop import (
    AbortRequests,
    AddRequests,
    Answer,
    Command,
    EngineDied,
    EngineLoop,
    Event,
    NewRequest,
    QueryStats,
    Refusal,
    Stop,
)
from moesaic.engine.outputs import OutputProcessor, TextDelta
from moesaic.errors import EngineDeadError
from moesaic.request import SamplingParams

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 30.0
"""How long ``close`` waits for the step in flight; no step of a sound engine takes that long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One request as the server hands it over; ``prompt`` is its text, where it had one."""

    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    prompt: str | None = None
    priority: int = 0
    timeout_s: float | None = None


class EngineClient(Protocol):
    """An engine as the event loop sees it. Every method is called from the loop that ``start`` ran on."""

    @property
    def is_healthy(self) -> bool:
        """True from ``start`` until the engine fails or is closed."""

    @property
    def error(self) -> EngineDeadError | None:
        """Why the engine serves nothing any more; None while it does."""

    async def start(self) -> None:
        """Begin to serve."""

    async def close(self) -> None:
        """Stop serving: unfinished requests end with ``abort``. Safe to call twice."""

    async def submit(self, *submissions: Submission) -> "DeltaStream":
        """Return the stream of these requests once all of them are admitted; if one is refused, none is.

        Raises: ``RequestError`` as the engine gave it, ``EngineDeadError``.
        """

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests soon; their streams get a last delta. Unknown and finished ids change nothing."""

    async def stats(self) -> dict[str, Any]:
        """Return the engine's counts and gauges (Any: JSON values). Raises: ``EngineDeadError``."""


class DeltaObserver(Protocol):
    """Told what the reader of a stream gets; for statistics."""

    def observe(self, delta: TextDelta) -> None:
        """Take one delta."""

    def lose(self, request_ids: tuple[str, ...], reason: Literal["abort", "error"]) -> None:
        """Take requests that get no last delta: their reader has left, or the engine is dead."""


class DeltaStream:
    """What the requests of one submission get, as it comes; ends after the last delta of each.

    For one reader, inside ``async with``: leaving the block aborts what is unfinished.
    Raises while iterated: ``EngineDeadError``, after the deltas that came before.
    """

    def __init__(self, request_ids: tuple[str, ...], on_close: Callable[["DeltaStream"], None]) -> None:
        self.request_ids = request_ids
        self.observer: DeltaObserver | None = None
        self._unfinished = set(request_ids)
        self._on_close = on_close
        # Unbounded: max_tokens bounds what a request can put here.
        self._items: asyncio.Queue[TextDelta | EngineDied | None] = asyncio.Queue()

    @property
    def unfinished_ids(self) -> tuple[str, ...]:
        """Requests whose last delta has not been read."""
        return tuple(i for i in self.request_ids if i in self._unfinished)

    def put(self, item: TextDelta | EngineDied) -> None:
        """Add what came from the engine; for clients of engines only."""
        self._items.put_nowait(item)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        if not self._unfinished:
            raise StopAsyncIteration
        item = await self._items.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, EngineDied):
            self._lose("error")
            raise item.error()
        if item.finish_reason is not None:
            self._unfinished.discard(item.request_id)
        if self.observer is not None:
            self.observer.observe(item)
        return item

    def _lose(self, reason: Literal["abort", "error"]) -> None:
        if self.observer is not None and self._unfinished:
            self.observer.lose(self.unfinished_ids, reason)
        self._unfinished.clear()

    async def aclose(self) -> None:
        """Abort what is unfinished and end the iteration. Does not wait for the engine; safe to call twice."""
        self._on_close(self)
        self._lose("abort")
        self._items.put_nowait(None)  # a reader in another task must not wait for what will never come

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class ThreadEngineClient:
    """An ``EngineClient`` whose engine is one thread of this process; from ``start`` on the core is that thread's."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer | None) -> None:
        """``tokenizer`` is the thread's own too: tokenizers are not safe to share where one thread changes them."""
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._engine = EngineLoop(core, OutputProcessor(tokenizer), self._commands, self._emit)
        # Daemon: a step that never ends must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="moesaic-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, DeltaStream] = {}
        self._waiters: dict[int, asyncio.Future[Answer | Refusal | EngineDied]] = {}
        self._tickets = itertools.count()
        self._end: EngineDied | None = None

    @property
    def is_healthy(self) -> bool:
        return self._loop is not None and self._end is None

    @property
    def error(self) -> EngineDeadError | None:
        return None if self._end is None else self._end.error()

    async def start(self) -> None:
        if self._loop is not None:
            raise RuntimeError("this engine client has been started before; make a new one")
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        if self._end is None:
            self._end = EngineDied(EngineDeadError("it was closed"))
            self._commands.put(Stop())
        if self._loop is None or not self._thread.is_alive():
            return
        await asyncio.to_thread(self._thread.join, JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("engine thread did not end within %.0f s; its requests are given up", JOIN_TIMEOUT_S)
            self._die(self._end)

    async def submit(self, *submissions: Submission) -> DeltaStream:
        new = tuple(_with_id(s, time.monotonic()) for s in submissions)
        stream = DeltaStream(tuple(n.request_id for n in new), self._forget)
        self._check_alive()
        self._streams |= dict.fromkeys(stream.request_ids, stream)
        try:
            await self._ask(lambda ticket: AddRequests(ticket, new))
        except BaseException:  # also a cancelled submitter: its requests may be running by now
            await stream.aclose()
            raise
        return stream

    def abort(self, request_ids: Iterable[str]) -> None:
        self._commands.put(AbortRequests(tuple(request_ids)))

    async def stats(self) -> dict[str, Any]:
        answer = await self._ask(QueryStats)
        stats: dict[str, Any] = answer.value
        return stats

    # On the event loop

    async def _ask(self, command: Callable[[int], Command]) -> Answer:
        self._check_alive()
        ticket = next(self._tickets)
        # Errors are results here: an exception set on a future that nobody reads any more would be reported as lost.
        waiter: asyncio.Future[Answer | Refusal | EngineDied] = asyncio.get_running_loop().create_future()
        self._waiters[ticket] = waiter
        self._commands.put(command(ticket))
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

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case TextDelta():
                    self._deliver_delta(event)
                case Answer() | Refusal():
                    self._resolve(event.ticket, event)
                case EngineDied():
                    self._die(event)

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

    # On the engine's thread

    def _run(self) -> None:
        try:
            self._engine.run()
        except BaseException as cause:
            logger.exception("engine failed; every request of it is given up")
            self._emit([EngineDied(cause)])

    def _emit(self, events: list[Event]) -> None:
        assert self._loop is not None  # start() sets it before the thread runs
        try:
            self._loop.call_soon_threadsafe(self._deliver, events)
        except RuntimeError:
            # The event loop was closed without close(): there is nobody left to tell.
            self._commands.put(Stop())


def _with_id(submission: Submission, arrival_s: float) -> NewRequest:
    return NewRequest(
        request_id=uuid.uuid4().hex,
        prompt=submission.prompt,
        prompt_token_ids=submission.prompt_token_ids,
        sampling_params=submission.sampling_params,
        priority=submission.priority,
        timeout_s=submission.timeout_s,
        arrival_s=arrival_s,
    )
