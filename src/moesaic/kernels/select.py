"""The fused operations for a device: Triton's on a GPU, torch's elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moesaic.errors import Refused
from moesaic.kernels import reference

_OLDEST_CAPABILITY = (8, 0)  # bfloat16 tensor cores and asynchronous copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The operations around attention and experts; ``kernels/reference.py`` says what each does."""

    name: str
    reason: str
    rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    norm_rope_write: Callable[..., torch.Tensor]
    route: Callable[..., tuple[torch.Tensor, torch.Tensor]]


def kernels_for(device: torch.device | str) -> Kernels:
    """Return the fastest operations that run on ``device``, with the reason."""
    refusal = triton_refusal(torch.device(device))
    if refusal is not None:
        return Kernels(
            name="torch", reason=f"triton refused: {refusal}", rms_norm=reference.rms_norm,
            norm_rope_write=reference.norm_rope_write, route=reference.route,
        )  # fmt: skip
    from moesaic.kernels.norm import rms_norm
    from moesaic.kernels.rope import norm_rope_write
    from moesaic.kernels.routing import route

    return Kernels(
        name="triton", reason="the fastest here", rms_norm=rms_norm, norm_rope_write=norm_rope_write, route=route
    )


def triton_refusal(device: torch.device) -> Refused | None:
    """Return why Triton kernels cannot run on ``device``, or None if they can."""
    if device.type != "cuda":
        return Refused(f"Triton kernels need a CUDA device, this is {device.type}")
    if importlib.util.find_spec("triton") is None:
        return Refused("triton is not installed; it comes with PyTorch's CUDA builds")
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_CAPABILITY:
        return Refused(f"compute capability is {capability}, Triton kernels here need {_OLDEST_CAPABILITY} or newer")
    return None
