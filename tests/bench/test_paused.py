"""Servers held still while another is measured: real processes, stopped and running again."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from moesaic.bench.client import Target
from moesaic.bench.paused import paused, processes_of
from moesaic.errors import ConfigError

_SERVER = """
import multiprocessing, socket, sys, time
if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True).start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[Target]:
    """A process with a child, that listens and does nothing."""
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield Target(url=f"http://127.0.0.1:{int(process.stdout.readline())}", model="m")
        process.communicate()


def _come_to_stand(processes: tuple[psutil.Process, ...]) -> bool:
    """A signal takes effect once its process is scheduled again."""
    end_s = time.monotonic() + 10.0
    while any(p.status() != psutil.STATUS_STOPPED for p in processes) and time.monotonic() < end_s:
        time.sleep(0.01)
    return all(p.status() == psutil.STATUS_STOPPED for p in processes)


def test_a_server_and_its_children_stand_still_for_the_time_of_the_block(server: Target) -> None:
    processes = processes_of(server)
    assert len(processes) == 2
    with paused([server]):
        assert _come_to_stand(processes)
    assert psutil.STATUS_STOPPED not in [p.status() for p in processes]


def test_servers_run_again_if_the_measurement_fails(server: Target) -> None:
    with pytest.raises(RuntimeError, match="failed"), paused([server]):
        raise RuntimeError("failed")
    assert psutil.STATUS_STOPPED not in [p.status() for p in processes_of(server)]


def test_servers_run_again_if_another_cannot_be_stopped(server: Target) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    gone = Target(url=f"http://127.0.0.1:{port}", model="m")
    with pytest.raises(ConfigError, match="no process of this machine"), paused([server, gone]):
        raise AssertionError("the block must not be entered")
    assert psutil.STATUS_STOPPED not in [p.status() for p in processes_of(server)]


def test_a_server_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.* is another's"):
        processes_of(Target(url="http://192.0.2.1:8000", model="m"))
