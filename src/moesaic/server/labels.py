"""A label for each HTTP request: the client's own if it is a sane one, in the reply and in the log."""

import contextvars
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"

current_label: contextvars.ContextVar[str | None] = contextvars.ContextVar("moesaic_request_label", default=None)
"""The label of the request that the running task serves."""

_SANE = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestLabels:
    """ASGI middleware that answers every request with its label in ``X-Request-Id``.

    A label names nothing: the engine makes its own ids, so two clients with one label never meet.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        # Others are replaced: what comes from outside must not break a line of the log.
        label = given if _SANE.fullmatch(given) else uuid.uuid4().hex

        async def send_labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = label
            await send(message)

        token = current_label.set(label)
        try:
            await self._app(scope, receive, send_labelled)
        finally:
            current_label.reset(token)
