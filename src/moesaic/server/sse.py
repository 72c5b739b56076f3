"""Server-sent events, and work that ends when its client has left.

Why not ``fastapi.sse``: it is for routes that always stream, and ours choose by the body. Why not starlette's
``StreamingResponse``: it leaves its source suspended when the client leaves, and the source holds KV blocks.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AbstractAsyncContextManager
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
        async with contextlib.aclosing(with_pings(self._events(), self._ping_interval_s)) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
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


async def with_pings(events: AsyncGenerator[bytes, None], interval_s: float) -> AsyncGenerator[bytes, None]:
    """Yield ``events``, and a comment whenever none has come for ``interval_s`` seconds."""
    async with contextlib.aclosing(events):
        while True:
            # One task for one event: a timeout must not cancel the generator, which would end it.
            following = asyncio.ensure_future(anext(events, None))
            try:
                while not (await asyncio.wait((following,), timeout=interval_s))[0]:
                    yield PING
                data = following.result()
            finally:
                if not following.done():
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
            if data is None:
                return
            yield data


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
