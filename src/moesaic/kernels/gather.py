"""The KV of some rows, from their pages into one piece (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moesaic.kernels.launch import launch

_PART_ELEMENTS = 4096


def gather_pages(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_indices: torch.Tensor,
    page_starts: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Do what ``reference.gather_pages`` does; pages must be contiguous. One program per page and part of it."""
    _, block_size, num_heads, dim = key_pages.shape
    token_elements = num_heads * dim
    page_elements = block_size * token_elements
    launch(
        _gather_kernel, (len(page_indices), triton.cdiv(page_elements, _PART_ELEMENTS)),
        key_pages, value_pages, page_indices, page_starts, keys, values,
        key_pages.stride(0), value_pages.stride(0), token_elements=token_elements, part=_PART_ELEMENTS, num_warps=8,
    )  # fmt: skip


@triton.jit
def _gather_kernel(
    key_pages, value_pages, page_indices, page_starts, keys, values, key_page, value_page,
    token_elements: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    page = tl.load(page_indices + index).to(tl.int64)
    start = tl.load(page_starts + index).to(tl.int64)
    num_elements = (tl.load(page_starts + index + 1) - start) * token_elements
    element = tl.program_id(1) * part + tl.arange(0, part)
    is_inside = element < num_elements
    target = start * token_elements + element
    key = tl.load(key_pages + page * key_page + element, mask=is_inside)
    value = tl.load(value_pages + page * value_page + element, mask=is_inside)
    tl.store(keys + target, key, mask=is_inside)
    tl.store(values + target, value, mask=is_inside)
