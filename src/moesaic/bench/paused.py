"""Servers of this machine held still while another one is measured: one that waits for work may take time too."""

import ipaddress
import signal
import socket
from collections.abc import Iterable
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from moesaic.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psutil

    from moesaic.bench.client import Target


def processes_of(target: "Target") -> "tuple[psutil.Process, ...]":
    """Return the process that listens at the address of ``target``, and all its children.

    Raises: ``ConfigError`` if the address is of another machine, or nothing can be seen to listen there.
    """
    import psutil

    split = urlsplit(target.url)
    port = split.port or 80
    _check_is_here(split.hostname or "", target.url)
    for found in psutil.net_connections("tcp"):
        if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid is not None:
            parent = psutil.Process(found.pid)
            return (parent, *parent.children(recursive=True))
    raise ConfigError(f"no process of this machine can be seen to listen at {target.url}; measure without --pause-idle")


def _check_is_here(host: str, url: str) -> None:
    if not ipaddress.ip_address(socket.gethostbyname(host)).is_loopback:
        raise ConfigError(f"--pause-idle stops servers of this machine, but {url} is another's; measure without it")


@contextmanager
def paused(targets: "Iterable[Target]") -> "Iterator[None]":
    """Stop the processes of ``targets`` (SIGSTOP) for the time of the block."""
    with ExitStack() as stack:
        for target in targets:
            for process in processes_of(target):
                process.send_signal(signal.SIGSTOP)
                stack.callback(_resume, process)
        yield


def _resume(process: "psutil.Process") -> None:
    if process.is_running():
        process.send_signal(signal.SIGCONT)
