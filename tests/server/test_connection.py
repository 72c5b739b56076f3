"""Bytes at the wrong time and bytes that are no HTTP."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from moesaic import EngineConfig
from moesaic.server.connection import MOST_AHEAD_BYTES
from moesaic.server.main import load_app
from moesaic.server.settings import ServerConfig
from moesaic.testing import raw
from moesaic.testing.http import running

KEPT = b"Connection: close\r\n"
SHORT = {"model": "tiny", "prompt": "x", "max_tokens": 3, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def url(tiny_dir: Path) -> Iterator[str]:
    config = EngineConfig(device="cpu", num_kv_blocks=256)
    app, _ = load_app(str(tiny_dir), config, ServerConfig(served_model_name=("tiny",)))
    with running(app) as address:
        yield address


@pytest.fixture(autouse=True)
def _no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What strangers send is never an error of ours."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("num_more_bytes", [0, 3 * MOST_AHEAD_BYTES])
def test_requests_that_were_sent_ahead_are_answered_in_their_order(url: str, num_more_bytes: int) -> None:
    first = raw.post("/v1/completions", SHORT).replace(KEPT, b"")
    second = raw.post("/tokenize", {"model": "tiny", "prompt": "y" * num_more_bytes}).replace(KEPT, b"")
    with raw.connected(url) as connection:
        connection.sendall(first + second + raw.get("/version"))
        replies = raw.rest_of(connection)
    places = [replies.find(word) for word in (b'"text_completion"', b'"max_model_len"', b'"version"')]
    assert -1 not in places
    assert places == sorted(places)
    assert replies.count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02garbage\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        "GET /é HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5, 6\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n{}\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\r\n folded\x00\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_in_the_shape_of_all_errors(url: str, data: bytes) -> None:
    reply = raw.ask(url, data)
    error = reply.json()["error"]
    assert (reply.status, error["type"], error["code"]) == (400, "BadRequestError", 400)
    assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize(("num_bytes", "status"), [(2**15, 200), (2**17, 400)])
def test_a_head_over_the_limit_is_refused_with_the_limit(url: str, num_bytes: int, status: int) -> None:
    with raw.connected(url) as connection:
        head = raw.get("/health").replace(b"Host:", b"X: " + b"a" * num_bytes + b"\r\nHost:")
        # No more than what is read before the refusal: a reset, for what is not read, could overtake the reply.
        connection.sendall(head[: ServerConfig().max_header_bytes + 1])
        reply = raw.parse(raw.rest_of(connection))
    assert reply.status == status
    assert (b"(max_header_bytes)" in reply.body) == (status == 400)


@pytest.mark.parametrize("stream", [False, True])
def test_no_http_behind_a_last_request_ends_the_connection_and_nothing_else(url: str, stream: bool) -> None:
    """The client has said that it sends nothing more; uvicorn alone would raise if the reply has begun."""
    request = raw.post("/v1/completions", {**SHORT, "max_tokens": 4000, "stream": stream})
    with raw.connected(url) as connection:
        connection.sendall(request)
        got = connection.recv(2**16) if stream else b""
        raw.ask(url, raw.get("/health"))  # now the request has been read, and alone
        connection.sendall(b"\x00\r\n\r\n")
        got += raw.rest_of(connection)
    assert got.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 400")
    assert b"[DONE]" not in got
    assert raw.ask(url, raw.post("/v1/completions", SHORT)).status == 200


@pytest.mark.parametrize("num_bytes", [1, 30, 150, -1])
def test_a_request_that_breaks_off_is_no_error(url: str, num_bytes: int) -> None:
    with raw.connected(url) as connection:
        connection.sendall(raw.post("/v1/completions", SHORT)[:num_bytes])
    assert raw.ask(url, raw.get("/health")).status == 200
