"""A kernel is launched, or within a block only compiled, with the same arguments."""

from typing import Any

from moesaic.kernels import launch as launch_module
from moesaic.kernels.launch import launch


class Kernel:
    """Remembers how it was called, as a Triton function is."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **constants: self.calls.append(("launched", grid, arguments, constants))

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **constants: Any) -> None:
        self.calls.append(("compiled", grid, arguments, constants))


def test_the_same_call_launches_or_compiles() -> None:
    kernel = Kernel()
    launch(kernel, (3, 1), "x", 7, block=16)
    token = launch_module._is_compiling.set(True)  # what compiled_only does, without Triton
    launch(kernel, (3, 1), "x", 7, block=16)
    launch_module._is_compiling.reset(token)
    launch(kernel, (3, 1), "x", 7, block=16)
    assert [call[0] for call in kernel.calls] == ["launched", "compiled", "launched"]
    assert {call[1:3] for call in kernel.calls} == {((3, 1), ("x", 7))}
    assert all(call[3] == {"block": 16} for call in kernel.calls)
