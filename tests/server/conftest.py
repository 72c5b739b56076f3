"""A real server on a real port, and the same model offline as its oracle."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from moesaic import LLM, EngineConfig
from moesaic.server.main import load_app
from moesaic.server.settings import ServerConfig

SETTINGS = {"device": "cpu", "num_kv_blocks": 2048, "enable_chunked_prefill": True, "prefill_chunk_size": 256}


@pytest.fixture(scope="session")
def oracle(tiny_dir: Path) -> LLM:
    """The served model without a server."""
    return LLM(tiny_dir, **SETTINGS)


@pytest.fixture(scope="session")
def server_url(tiny_dir: Path) -> Iterator[str]:
    """The address of a server of ``tiny``, chunked prefill on."""
    app, _ = load_app(str(tiny_dir), EngineConfig(**SETTINGS), ServerConfig(served_model_name=("tiny", "moesaic/tiny")))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()
