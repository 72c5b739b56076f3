"""Small arrays to the device, without waiting for it."""

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
