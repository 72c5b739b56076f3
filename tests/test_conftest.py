import socket

import pytest


def test_a_socket_cannot_leave_this_machine() -> None:
    with socket.socket() as s, pytest.raises(RuntimeError, match=r"reach 192\.0\.2\.1"):
        s.connect(("192.0.2.1", 80))


def test_a_name_is_not_looked_up() -> None:
    with pytest.raises(RuntimeError, match=r"reach example\.org"):
        socket.getaddrinfo("example.org", 80)


def test_a_socket_reaches_this_machine() -> None:
    with socket.socket() as listener, socket.socket() as client:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        client.connect(listener.getsockname())


@pytest.mark.gpu
def test_the_gpu_suite_runs_on_a_gpu() -> None:
    """Not reached without a device: the suite fails before, so that it never passes unrun."""
    import torch

    assert torch.ones(2, device="cuda").sum().item() == 2
