"""An arm of a comparison: a server that is started here and ended again, or one that runs somewhere."""

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from pathlib import Path

from moesaic.bench.client import Target
from moesaic.errors import MoesaicError

START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 15.0


@contextmanager
def own_server(model: str, flags: SequenceOf[str]) -> Iterator[Target]:
    """Start ``moesaic serve`` on a free port of this machine; it has ended when the block is left.

    Raises: ``MoesaicError`` with the end of its output if it does not come up.
    """
    with started_server(("moesaic.cli", "serve", model, "--port", "0", *flags), model) as target:
        yield target


@contextmanager
def started_server(module: SequenceOf[str], model: str) -> Iterator[Target]:
    """Run a module with its arguments that serves as ``moesaic serve`` does, and tells its address as that does.

    Raises: ``MoesaicError`` with the end of its output if it does not come up.
    """
    command = [sys.executable, "-m", *module]
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "stderr"
        with said.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
            try:
                yield Target(url=_wait_for_url(process, said), model=model, pid=process.pid)
            finally:
                _stop(process)


def _wait_for_url(process: "subprocess.Popen[bytes]", said: Path) -> str:
    end_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end_s:
        text = said.read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"URL\s+(http://\S+)/v1", text):
            return found[1]
        if process.poll() is not None:
            raise MoesaicError(f"the server ended with {process.returncode} before it was ready: {text.strip()[-600:]}")
        time.sleep(0.1)
    raise MoesaicError(f"the server was not ready after {START_TIMEOUT_S:.0f} s; run {process.args!r} to see why")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
