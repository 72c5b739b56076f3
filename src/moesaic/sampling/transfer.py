"""Small arrays to the device and back, without waiting for it."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:  # Any: int64 or float64 alike
    """Return ``array`` as a tensor on ``device``; does not synchronise it (the copy comes from pinned memory)."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Begin the copy, into pinned memory; on a CPU there is nothing to copy."""
        self._tensor = tensor
        self._is_made: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._is_made = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._is_made.record()

    def wait(self) -> torch.Tensor:
        """Return the tensor on the host; waits until it is there."""
        if self._is_made is not None:
            self._is_made.synchronize()
        return self._tensor
