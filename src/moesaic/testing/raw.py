"""HTTP over plain sockets: requests as bytes, and replies read strictly, for clients that misbehave on purpose."""

import json
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RawReply:
    """A whole reply; names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body's value (Any: JSON)."""
        return json.loads(self.body)

    def events(self) -> list[dict[str, Any]]:
        """Return the values of a stream's events, in their order (Any: JSON); comments are left out.

        Raises: ``AssertionError`` for what is no stream of events that ends with ``[DONE]``.
        """
        assert self.headers["content-type"].startswith("text/event-stream"), self.headers
        *blocks, rest = self.body.split(b"\n\n")
        assert rest == b"", rest
        events = [block.removeprefix(b"data: ") for block in blocks if not block.startswith(b":")]
        assert events[-1] == b"[DONE]", events[-1]
        assert events.count(b"[DONE]") == 1
        return [json.loads(event) for event in events[:-1]]


def post(path: str, body: Any, headers: Iterable[str] = ()) -> bytes:
    """Return a request with a JSON body (Any: a JSON value, or bytes as they are) that closes its connection."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: test", "Connection: close", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


def get(path: str) -> bytes:
    """Return a request without a body that closes its connection."""
    return f"GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n".encode()


def parse(data: bytes) -> RawReply:
    """Return the reply that ``data``, all that came on one connection, is.

    Raises: ``AssertionError`` unless it is exactly one whole reply.
    """
    head, separator, rest = data.partition(b"\r\n\r\n")
    assert separator, f"no whole head: {data[:200]!r}"
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(_pieces(rest))
    else:
        body = rest
        assert len(body) == int(headers.get("content-length", len(body))), headers
    return RawReply(int(status.split()[1]), headers, body)


def _pieces(data: bytes) -> Iterator[bytes]:
    while True:
        size, separator, data = data.partition(b"\r\n")
        num_bytes = int(size, 16)
        assert separator, "a chunk is cut off"
        assert data[num_bytes : num_bytes + 2] == b"\r\n", "a chunk is cut off"
        if num_bytes == 0:
            assert data == b"\r\n", data
            return
        yield data[:num_bytes]
        data = data[num_bytes + 2 :]


def texts(events: Iterable[dict[str, Any]]) -> dict[int, str]:
    """Return the text of each choice of a stream, of completions or chat."""
    found: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + piece
    return found


@contextmanager
def connected(url: str, *, receive_buffer_bytes: int | None = None, timeout_s: float = 60.0) -> Iterator[socket.socket]:
    """Connect to the server at ``url``; a small buffer lets the server notice soon that nobody reads."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.socket() as connection:
        if receive_buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        connection.settimeout(timeout_s)
        connection.connect((host, int(port)))
        yield connection


def rest_of(connection: socket.socket) -> bytes:
    """Return everything until the server closes."""
    return b"".join(iter(lambda: connection.recv(2**16), b""))


def ask(url: str, request: bytes) -> RawReply:
    """Send ``request`` on a connection of its own and return the reply."""
    with connected(url) as connection:
        connection.sendall(request)
        return parse(rest_of(connection))


def reset(connection: socket.socket) -> None:
    """Close at once with a reset, as a process that was killed may."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
