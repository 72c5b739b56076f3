"""A real server on a real port, and the same model offline as its oracle."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moesaic import LLM, EngineConfig
from moesaic.server.main import load_app
from moesaic.server.settings import ServerConfig
from moesaic.testing.http import running

SETTINGS = {"device": "cpu", "num_kv_blocks": 2048, "enable_chunked_prefill": True, "prefill_chunk_size": 256}


@pytest.fixture(scope="session")
def oracle(tiny_dir: Path) -> LLM:
    """The served model without a server."""
    return LLM(tiny_dir, **SETTINGS)


@pytest.fixture(scope="session")
def server_url(tiny_dir: Path) -> Iterator[str]:
    """The address of a server of ``tiny``, chunked prefill on."""
    names = ("tiny", "moesaic/tiny")
    app, _ = load_app(str(tiny_dir), EngineConfig(**SETTINGS), ServerConfig(served_model_name=names))
    with running(app) as url:
        yield url
