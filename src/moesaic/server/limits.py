"""What one request may ask of the server, judged before any work is done for it."""

from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moesaic.errors import RequestError
from moesaic.server.connection import Connection
from moesaic.server.errors import BodyTooLargeError, error_reply, error_response
from moesaic.server.protocol import CompletionRequest
from moesaic.server.settings import ServerConfig


class BodyLimit:
    """ASGI middleware that refuses bodies over ``max_bytes``: by their announced length, else when they pass it.

    Why not ``FastAPI(max_body_size=...)``: its refusal is plain text, and clients read errors as JSON.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._max_bytes):  # int() refuses the longest
            await error_response(error_reply(BodyTooLargeError(self._max_bytes)))(scope, receive, send)
            return
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise BodyTooLargeError(self._max_bytes)
            return message

        await self._app(scope, receive_limited, send)


def check_num_prompts(body: CompletionRequest, most: int) -> None:
    """Return if the prompts, each counted ``n`` times, are at most ``most``; nothing is tokenised for it.

    Raises: ``RequestError``.
    """
    num_prompts = len(body.prompts)
    if num_prompts * body.num_choices > most:
        times = f" with n={body.num_choices}" if body.num_choices > 1 else ""
        raise RequestError(
            f"prompt has {num_prompts} prompts{times}; one request may ask for {most} answers "
            "(max_prompts_per_request); send several requests",
            param="prompt",
        )


def http_limits(settings: ServerConfig) -> dict[str, Any]:
    """Return the limits that a connection enforces, as options of uvicorn (Any: of several types).

    The class is named because uvicorn's other parser, which it would choose if it were installed, bounds no headers.
    """
    return {"http": Connection, "h11_max_incomplete_event_size": settings.max_header_bytes}
