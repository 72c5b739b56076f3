"""Servers of ``tiny`` for other people's clients, chunked prefill off and on."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def serving(tiny_dir: Path, *flags: str) -> Iterator[str]:
    """Start a server as users start it; gives its base URL."""
    command = [sys.executable, "-m", "moesaic.cli", "serve", str(tiny_dir), "--served-model-name", "tiny"]
    command += ["--port", "0", "--device", "cpu", "--num-kv-blocks", "1024", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}) as process:
        assert process.stderr is not None
        try:
            yield next(match[1] for line in process.stderr if (match := re.search(r"URL +(http://\S+)", line)))
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


@pytest.fixture(scope="session", params=[False, True], ids=["whole", "chunked"])
def url(request: pytest.FixtureRequest, tiny_dir: Path) -> Iterator[str]:
    """The base URL of a server that runs as users run it."""
    chunked = ("--enable-chunked-prefill", "--prefill-chunk-size", "16")
    with serving(tiny_dir, *(chunked if request.param else ())) as address:
        yield address


@pytest.fixture
def url_of_short_answers(tiny_dir: Path) -> Iterator[str]:
    """The base URL of a server with a small context: answers without a limit end there."""
    with serving(tiny_dir, "--max-model-len", "256") as address:
        yield address
