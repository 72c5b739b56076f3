"""An engine client that tells observers what passes through it; the engine and its callers notice nothing."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

from moesaic.engine.client import DeltaStream, EngineClient, Submission
from moesaic.engine.outputs import TextDelta
from moesaic.errors import EngineDeadError, EngineDrainingError, RequestError


class RequestObserver(Protocol):
    """What statistics and traces learn of requests, all on the event loop."""

    def admit(self, request_id: str, submission: Submission) -> None:
        """Take a request that the engine has taken."""

    def refuse(self, error: RequestError | EngineDeadError | EngineDrainingError) -> None:
        """Take a submission that was refused."""

    def observe(self, delta: TextDelta) -> None:
        """Take a delta; one with a finish reason is the request's last."""

    def lose(self, request_ids: tuple[str, ...], reason: Literal["abort", "error"]) -> None:
        """Take requests that get no last delta: their reader has left, or the engine is dead.

        Ids are empty if it left before the engine had answered: the engine begins such a request and aborts it.
        """


class ObservedClient:
    """An ``EngineClient`` around another one."""

    def __init__(self, client: EngineClient, observers: Sequence[RequestObserver]) -> None:
        self._client = client
        self._observers = tuple(observers)

    @property
    def is_healthy(self) -> bool:
        return self._client.is_healthy

    @property
    def error(self) -> EngineDeadError | EngineDrainingError | None:
        return self._client.error

    @property
    def num_open_streams(self) -> int:
        return self._client.num_open_streams

    def drain(self) -> None:
        self._client.drain()

    async def start(self) -> None:
        await self._client.start()

    async def close(self) -> None:
        await self._client.close()

    async def submit(self, *submissions: Submission) -> DeltaStream:
        try:
            stream = await self._client.submit(*submissions)
        except (RequestError, EngineDeadError, EngineDrainingError) as error:
            for observer in self._observers:
                observer.refuse(error)
            raise
        except asyncio.CancelledError:
            self.lose(("",) * len(submissions), "abort")
            raise
        for observer in self._observers:
            for request_id, submission in zip(stream.request_ids, submissions, strict=True):
                observer.admit(request_id, submission)
        stream.observer = self  # before anyone reads
        return stream

    def observe(self, delta: TextDelta) -> None:
        for observer in self._observers:
            observer.observe(delta)

    def lose(self, request_ids: tuple[str, ...], reason: Literal["abort", "error"]) -> None:
        for observer in self._observers:
            observer.lose(request_ids, reason)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._client.abort(request_ids)

    def pause(self, request_ids: Iterable[str]) -> None:
        self._client.pause(request_ids)

    def resume(self, request_ids: Iterable[str]) -> None:
        self._client.resume(request_ids)

    async def stats(self) -> dict[str, Any]:
        return await self._client.stats()

    async def steps(self, after: int | None) -> dict[str, Any]:
        return await self._client.steps(after)
