"""From exceptions to error replies: one shape for every status."""

import http
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from moesaic.errors import EngineDeadError, EngineDrainingError, MoesaicError, QueueFullError, RequestError
from moesaic.server.replies import ErrorDetail, ErrorReply

CLIENT_LEFT = 499
"""Status of a reply that nobody reads, as nginx logs it."""

RETRY_LATER = {"Retry-After": "1"}
"""Seconds; a full queue moves with every step, and clients back off by themselves."""


class UnknownModelError(RequestError):
    """A model name that this server does not serve."""


class BodyTooLargeError(HTTPException):
    """A body over the limit: an ``HTTPException`` because FastAPI takes any other error in a body for broken JSON."""

    def __init__(self, max_body_bytes: int) -> None:
        message = f"the body is larger than {max_body_bytes} bytes (max_body_bytes); send less at once"
        super().__init__(http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)


class UnfinishedRequestError(MoesaicError):
    """A request that the engine ended without an answer: at shutdown, or because a step of it failed."""


def error_reply(error: Exception) -> ErrorReply:
    """Return the body for any exception; what is not ours says nothing of its inside to the client."""
    match error:
        case UnknownModelError():
            status, kind = 404, "NotFoundError"
        case QueueFullError():
            status, kind = 429, "RateLimitError"
        case BodyTooLargeError():
            return _reply(error.status_code, "ContentTooLargeError", error.detail, None)
        case RequestError():
            status, kind = 400, "BadRequestError"
        case EngineDeadError() | EngineDrainingError():
            status, kind = 503, "ServiceUnavailableError"
        case _:
            status, kind = 500, "InternalServerError"
    message = str(error) if isinstance(error, MoesaicError) else "internal error; the server's log has the cause"
    return _reply(status, kind, message, getattr(error, "param", None))


def not_http(max_header_bytes: int | None) -> ErrorReply:
    """Return the body for bytes that cannot be read as a request."""
    message = f"this is no HTTP/1.1 request, or its head is larger than {max_header_bytes} bytes (max_header_bytes)"
    return _reply(400, "BadRequestError", message, None)


def error_response(body: ErrorReply, headers: dict[str, str] | None = None, status: int | None = None) -> Response:
    """Return the HTTP response of an error body; its code is the status unless one is given."""
    status = int(body.error.code) if status is None else status
    return Response(body.json_bytes(), status, headers=headers, media_type="application/json")


def install(app: FastAPI) -> None:
    """Make ``app`` answer every error in the one shape."""

    async def ours(request: Request, error: Exception) -> Response:
        return error_response(
            error_reply(error), RETRY_LATER if isinstance(error, QueueFullError | EngineDrainingError) else None
        )

    app.add_exception_handler(MoesaicError, ours)
    app.add_exception_handler(Exception, ours)  # starlette raises it again, for the server to log
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(BodyTooLargeError, ours)
    app.add_exception_handler(ClientDisconnect, _left)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = [str(part) for part in first["loc"][1:]]  # loc[0] is "body"
    if first["type"] == "json_invalid":
        return error_response(_reply(400, "BadRequestError", f"the body is no JSON: {_reason(first)}", None))
    if not place:
        return error_response(_reply(400, "BadRequestError", _no_object(request), None))
    message = f"{'.'.join(place)}: {_reason(first)}"
    return error_response(_reply(400, "BadRequestError", message, place[0]))


def _reason(error: Any) -> str:  # Any: pydantic's error entries are untyped
    if error["type"] == "missing":
        return "is missing"
    return str(error.get("ctx", {}).get("error", error["msg"]))


def _no_object(request: Request) -> str:
    content_type = request.headers.get("content-type", "")
    if "json" in content_type:
        return "the body is no JSON object"
    return f"the body has the content type {content_type!r}; send a JSON object as application/json"


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"there is no {request.url.path} here; /openapi.json lists what there is"
    else:
        message = f"{request.method} {request.url.path}: {error.detail}"
    kind = http.HTTPStatus(error.status_code).phrase.title().replace(" ", "") + "Error"
    return error_response(_reply(error.status_code, kind, message, None), dict(error.headers or {}))


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


def _reply(status: int, kind: str, message: str, param: str | None) -> ErrorReply:
    return ErrorReply(error=ErrorDetail(message=message, type=kind, param=param, code=status))
