"""RMS norm with the residual added first, in one pass (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moesaic.kernels.launch import launch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``reference.rms_norm`` does; one program per token."""
    num_tokens, width = x.shape
    normed = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normed)
    if num_tokens:
        launch(
            _rms_norm_kernel, (num_tokens,),
            x, residual, weight, normed, total, x.stride(0), 0 if residual is None else residual.stride(0), eps,
            width=width, block=triton.next_power_of_2(width), has_residual=residual is not None,
            num_warps=8 if width > 1024 else 4,
        )  # fmt: skip
    return normed, total


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, normed, total, x_stride, residual_stride, eps,
    width: tl.constexpr, block: tl.constexpr, has_residual: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    is_inside = columns < width
    values = tl.load(x + token * x_stride + columns, mask=is_inside, other=0.0)
    if has_residual:
        added = tl.load(residual + token * residual_stride + columns, mask=is_inside, other=0.0)
        # Rounded before the norm, as the sum that later layers see.
        values = (values.to(tl.float32) + added.to(tl.float32)).to(values.dtype)
        tl.store(total + token * width + columns, values, mask=is_inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    scaled = (wide * scale).to(values.dtype).to(tl.float32)
    out = scaled * tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(normed + token * width + columns, out.to(values.dtype), mask=is_inside)
