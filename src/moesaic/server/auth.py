"""Who may use the server: keys, compared in constant time."""

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from moesaic.server import page
from moesaic.server.errors import error_response
from moesaic.server.replies import ErrorDetail, ErrorReply

OPEN_PATHS = frozenset({"/health", page.PATH})
"""Paths that need no key: what asks whether a process lives has none to send, and neither has a browser that opens the
page, which is the same for all and asks for a key itself."""

_SCHEME = "bearer "


class KeyGate:
    """ASGI middleware that lets only requests with one of ``keys`` through; a refused body is never read."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or self._admits(Headers(scope=scope)):
            await self._app(scope, receive, send)
        else:
            response = error_response(_REFUSAL, {"WWW-Authenticate": "Bearer"}, status=401)
            await response(scope, receive, send)

    def _admits(self, headers: Headers) -> bool:
        value = headers.get("authorization", "")
        if value[: len(_SCHEME)].lower() != _SCHEME:
            return False
        given = value[len(_SCHEME) :].strip().encode()
        # Every key is compared, so that the time tells neither the key nor which of them it was.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return any(matches)


_REFUSAL = ErrorReply(
    error=ErrorDetail(
        message="no valid API key; send one that this server was started with, as Authorization: Bearer KEY",
        type="invalid_request_error",
        param=None,
        code="invalid_api_key",
    )
)
