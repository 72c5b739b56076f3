"""Servers of ``tiny`` for other people's clients, chunked prefill off and on."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", params=[False, True], ids=["whole", "chunked"])
def url(request: pytest.FixtureRequest, tiny_dir: Path) -> Iterator[str]:
    """The base URL of a server that runs as users run it."""
    command = [sys.executable, "-m", "moesaic.cli", "serve", str(tiny_dir), "--served-model-name", "tiny"]
    command += ["--port", "0", "--device", "cpu", "--num-kv-blocks", "1024"]
    if request.param:
        command += ["--enable-chunked-prefill", "--prefill-chunk-size", "16"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}) as process:
        assert process.stderr is not None
        try:
            yield next(match[1] for line in process.stderr if (match := re.search(r"URL +(http://\S+)", line)))
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
