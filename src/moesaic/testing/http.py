"""A real server on a real port, in a thread of the test's process."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from moesaic.server.limits import http_limits
from moesaic.server.settings import ServerConfig


@contextmanager
def running(app: FastAPI, *, send_buffer_bytes: int | None = None) -> Iterator[str]:
    """Serve ``app`` on a port of its own in a thread; gives its address.

    With small send buffers the server notices soon that a client does not read; the kernel's own grow.
    """
    limits = http_limits(ServerConfig())
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5, **limits)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if send_buffer_bytes is not None:  # connections inherit it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:  # also when a test fails: the thread would keep the process alive
            server.should_exit = True
            thread.join()
