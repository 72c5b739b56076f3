"""One client's connection, as uvicorn keeps it but for what clients may send at the wrong time.

Why not uvicorn's own: it stops reading when a client sends more while its request runs, and then does not see that
the client leaves; it answers bytes that are no HTTP in plain text; and if a reply has begun by then, it raises.
"""

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from moesaic.server.errors import not_http

MOST_AHEAD_BYTES = 2**16
"""Bytes that a client may send ahead of its next request; with more than these unread it is not read any further."""


class Connection(H11Protocol):
    """A connection that is read while its request runs: the only way to learn that a client has left."""

    def handle_events(self) -> None:
        """Take what has come, and go on reading if all that waits is for after the reply."""
        super().handle_events()
        is_running = self.conn.their_state is h11.DONE and self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY)
        if is_running and self.flow.read_paused and len(self.conn.trailing_data[0]) <= MOST_AHEAD_BYTES:
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in the shape of every error, and close; a reply that has begun is only cut off."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = not_http(self.config.h11_max_incomplete_event_size).json_bytes()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            reply = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (reply, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
