"""Head norms, rotation and the write to KV pages in one pass over the fused projection (Triton)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from moesaic.kernels.launch import launch

_MOST_HEADS = 8  # heads per program: fewer programs for long chunks, enough of them for one row


def norm_rope_write(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Do what ``reference.norm_rope_write`` does; one program per token and up to eight heads."""
    num_tokens, dim = qkv.shape[0], qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    query = torch.empty((num_tokens, num_heads, dim), dtype=qkv.dtype, device=qkv.device)
    heads = math.gcd(num_heads, num_kv_heads, _MOST_HEADS)
    if num_tokens:
        launch(
            _norm_rope_write_kernel, (num_tokens, (num_heads + 2 * num_kv_heads) // heads),
            qkv, q_weight, k_weight, cos_sin, positions, slot_mapping, key_pages, value_pages, query,
            qkv.stride(0), *key_pages.stride()[:3], *value_pages.stride()[:3], eps,
            block_size=key_pages.shape[1], num_heads=num_heads, num_kv_heads=num_kv_heads, dim=dim, heads=heads,
            half=triton.next_power_of_2(dim // 2), has_norm=q_weight is not None, num_warps=4 if heads >= 4 else 1,
        )  # fmt: skip
    return query


@triton.jit
def _norm_rope_write_kernel(
    qkv, q_weight, k_weight, cos_sin, positions, slot_mapping, key_pages, value_pages, query,
    qkv_stride, k_page, k_offset, k_head, v_page, v_offset, v_head, eps,
    block_size: tl.constexpr, num_heads: tl.constexpr, num_kv_heads: tl.constexpr, dim: tl.constexpr,
    heads: tl.constexpr, half: tl.constexpr, has_norm: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * heads
    head = first_head + tl.arange(0, heads)[:, None]
    column = tl.arange(0, half)[None, :]
    is_inside = (column < dim // 2) & (head >= 0)
    source = qkv + token * qkv_stride + head * dim + column
    low = tl.load(source, mask=is_inside, other=0.0)
    high = tl.load(source + dim // 2, mask=is_inside, other=0.0)
    slot = tl.load(slot_mapping + token)
    page, offset = slot // block_size, slot % block_size
    if first_head >= num_heads + num_kv_heads:
        v_head_id = head - num_heads - num_kv_heads
        target = value_pages + page * v_page + offset * v_offset + v_head_id * v_head + column
        tl.store(target, low.to(value_pages.dtype.element_ty), mask=is_inside & (slot >= 0))
        tl.store(target + dim // 2, high.to(value_pages.dtype.element_ty), mask=is_inside & (slot >= 0))
    else:
        if has_norm:
            # A program holds query heads only or key heads only: `heads` divides both counts.
            weight = q_weight if first_head < num_heads else k_weight
            low, high = _head_norm(low, high, weight, column, eps, dim)
        angle = cos_sin + tl.load(positions + token) * dim + column
        cos = tl.load(angle, mask=column < dim // 2, other=0.0)
        sin = tl.load(angle + dim // 2, mask=column < dim // 2, other=0.0)
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        new_low = wide_low * cos - wide_high * sin
        new_high = wide_high * cos + wide_low * sin
        if first_head < num_heads:
            target = query + (token * num_heads + head) * dim + column
            tl.store(target, new_low.to(query.dtype.element_ty), mask=is_inside)
            tl.store(target + dim // 2, new_high.to(query.dtype.element_ty), mask=is_inside)
        else:
            target = key_pages + page * k_page + offset * k_offset + (head - num_heads) * k_head + column
            tl.store(target, new_low.to(key_pages.dtype.element_ty), mask=is_inside & (slot >= 0))
            tl.store(target + dim // 2, new_high.to(key_pages.dtype.element_ty), mask=is_inside & (slot >= 0))


@triton.jit
def _head_norm(low, high, weight, column, eps, dim: tl.constexpr):
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    squares = tl.sum(wide_low * wide_low + wide_high * wide_high, axis=1, keep_dims=True)
    scale = tl.rsqrt(squares / dim + eps)
    weight_low = tl.load(weight + column, mask=column < dim // 2, other=0.0).to(tl.float32)
    weight_high = tl.load(weight + dim // 2 + column, mask=column < dim // 2, other=0.0).to(tl.float32)
    new_low = (wide_low * scale).to(low.dtype).to(tl.float32) * weight_low
    new_high = (wide_high * scale).to(high.dtype).to(tl.float32) * weight_high
    return new_low.to(low.dtype), new_high.to(high.dtype)
