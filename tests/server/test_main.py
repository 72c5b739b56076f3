import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from moesaic import EngineConfig
from moesaic.errors import ConfigError
from moesaic.server.main import serve, startup_block
from moesaic.server.settings import ServerConfig

STATS = {
    "kv_blocks_total": 100,
    "kv_block_size_tokens": 16,
    "kv_bytes": 3 * 2**20,
    "max_model_len": 4096,
    "features": {
        "chunked_prefill": {"requested": True, "active": True, "reason": "as requested"},
        "attention_backend": {"requested": "auto", "active": "torch", "reason": "the fastest backend here"},
    },
}


def test_the_startup_block_says_what_was_asked_for_and_what_is_active() -> None:
    text = startup_block("smol", STATS, "http://127.0.0.1:8000")
    assert "smol, context 4096 tokens" in text
    assert "100 blocks of 16 tokens = 1600 tokens, 3 MiB" in text
    assert re.search(r"chunked prefill +on: as requested", text)
    assert re.search(r"attention backend +torch \(requested: auto\): the fastest backend here", text)
    assert "http://127.0.0.1:8000/v1" in text


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*--port"):
            serve("no such model", EngineConfig(), ServerConfig(port=port))


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_stop(tiny_dir: Path) -> None:
    command = [sys.executable, "-m", "moesaic.cli", "serve", str(tiny_dir), "--port", "0", "--served-model-name", "t"]
    command += ["--device", "cpu", "--num-kv-blocks", "64"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}) as process:
        assert process.stderr is not None
        try:
            url = next(match[1] for line in process.stderr if (match := re.search(r"URL +(http://\S+)", line)))
            with urllib.request.urlopen(f"{url}/models", timeout=60) as reply:
                assert b'"id":"t"' in reply.read()
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    assert process.returncode == 0
