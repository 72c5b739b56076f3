"""What holds for every test: checks on, no hub, no network but this machine, seeded randomness."""

import os
import sys

# Before anything imports torch or transformers, which read these once.
os.environ["MOESAIC_CHECK"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the processes we start would warn about the fork

import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Shared machines are slow at times; a deadline would measure them and not us.
hypothesis.settings.register_profile("moesaic", deadline=None, print_blob=True)
hypothesis.settings.load_profile("moesaic")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail, not skip, a GPU test without a GPU: who asked for the GPU suite must not see it pass unrun."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.fail(
            'no CUDA device, but a test marked gpu was asked for; leave it out with -m "not gpu"', pytrace=False
        )


@pytest.fixture(autouse=True)
def _seed_torch() -> None:
    """Seed torch as pytest-randomly seeds the rest, without importing torch for tests that do not."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _loopback_only() -> Iterator[None]:
    """Refuse connections and look-ups that would leave this machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, _guarded_connect(getattr(socket.socket, name)))
        patch.setattr(socket, "getaddrinfo", _guarded_lookup(socket.getaddrinfo))
        yield


def _guarded_connect(connect: Any) -> Any:  # Any: methods of a C class, wrapped as they are
    def guarded(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            _refuse_unless_local(address[0])
        return connect(self, address)

    return guarded


def _guarded_lookup(getaddrinfo: Any) -> Any:
    def guarded(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host is not None:
            _refuse_unless_local(host.decode() if isinstance(host, bytes) else host)
        return getaddrinfo(host, *args, **kwargs)

    return guarded


def _refuse_unless_local(host: str) -> None:
    try:
        is_local = host == "localhost" or (ip := ipaddress.ip_address(host)).is_loopback or ip.is_unspecified
    except ValueError:
        is_local = False
    if not is_local:
        raise RuntimeError(f"a test wants to reach {host}; tests may reach this machine only")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the built-in model ``tiny``, built once per session outside the user's cache."""
    from moesaic.builtin import materialize

    return materialize("tiny", cache_dir=tmp_path_factory.mktemp("cache"))
