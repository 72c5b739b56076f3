"""Server-sent events, and work that ends when its client has left.

Why not ``fastapi.sse``: it is for routes that always stream, and ours choose by the body. Why not starlette's
``StreamingResponse``: it leaves its source suspended when the client leaves, and the source holds KV blocks.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moesaic.errors import MoesaicError
from moesaic.server.errors import error_reply
from moesaic.server.replies import Reply

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
"""A comment, which clients skip: proxies close connections on which nothing comes."""


def event(reply: Reply) -> bytes:
    """Return one event; JSON has no line breaks, so one ``data`` line holds it."""
    return b"data: " + reply.json_bytes() + b"\n\n"


class EventStream(Response):
    """A response of one event per reply, then ``[DONE]``; an error after the headers is one event too.

    ``source``, which the replies are made from, is left in any case: at the end, at an error, when the client leaves
    and when it has left before the first event (a generator that was never begun cannot clean up).
    """

    media_type = "text/event-stream"

    def __init__(
        self, replies: AsyncGenerator[Reply, None], source: AbstractAsyncContextManager[object], ping_interval_s: float
    ) -> None:
        """``ping_interval_s``: seconds of silence after which a comment is sent."""
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # Without a length the server sends the body in pieces.
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._replies = replies
        self._source = source
        self._ping_interval_s = ping_interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Nobody is left to be told; uvicorn has logged the request already.
        with contextlib.suppress(ClientDisconnect):
            async with self._source:
                await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events()) as events, Pinged(send, self._ping_interval_s) as body:
            async for data in events:
                await body.send(data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._replies) as replies:
            try:
                async for reply in replies:
                    yield event(reply)
            except MoesaicError as error:
                yield event(error_reply(error))
            except Exception as error:
                logger.exception("stream failed")
                yield event(error_reply(error))
        yield DONE


class Pinged:
    """The body of a stream, with a comment whenever none of it has been sent for ``interval_s`` seconds.

    A task that looks once an interval: a timer for every event would cost more than the event.
    """

    def __init__(self, send: Send, interval_s: float) -> None:
        self._send = send
        self._interval_s = interval_s
        self._is_sending = False
        self._task: asyncio.Task[None] | None = None
        self._sent_s = 0.0

    async def __aenter__(self) -> "Pinged":
        self._sent_s = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._fill())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None  # __aenter__ sets it
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def send(self, data: bytes) -> None:
        """Send ``data``; waits while the client reads too slowly."""
        self._is_sending = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_sending = False
        self._sent_s = asyncio.get_running_loop().time()

    async def _fill(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, self._sent_s + self._interval_s - loop.time()))
            if loop.time() - self._sent_s < self._interval_s:
                continue
            if not self._is_sending:  # else the connection is not silent but full
                await self._send({"type": "http.response.body", "body": PING, "more_body": True})
            self._sent_s = loop.time()


async def while_connected(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """Return what ``work`` returns; cancel it, and wait for its cleaning up, if the client leaves before.

    ``receive`` is that of a request whose body has been read: all that can come is the disconnect.
    Raises: ``ClientDisconnect``, or what ``work`` raises.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
