"""The context of prompt chunks in one piece, for kernels that read it faster than page by page.

FlashInfer's fa3 loads paged keys row by row and contiguous ones by bulk copies (TMA). One chunk of 2,016 tokens on
14,336, 32 query and 4 KV heads of 128: 0.935 ms paged, 0.775 contiguous (0.6.12, H200, 2026-12-01).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic.batch import packed_copy

if TYPE_CHECKING:
    from moesaic.attention.base import AttentionLimits

_MOST_TOKENS = 1 << 16
_LEAST_TOKENS = 4096
_LEAST_QUERIES_PER_KV_HEAD = 2048
"""Queries times heads of a group for which a token of context is worth copying: our measurements on an H200 give 1,500
(the copy moves 4 bytes for each of K and V at 4 TB/s; the kernel saves a sixth of its 4 operations at 520 TFLOP/s)."""


class GatheredKV:
    """Scratch memory for the context of one step's chunks; each layer overwrites what the one before it had."""

    def __init__(self, limits: AttentionLimits, device: torch.device) -> None:
        """Allocate ``capacity`` tokens of the widest layer."""
        geometry = limits.geometry
        self.capacity = min(_MOST_TOKENS, limits.max_pages * geometry.block_size)
        most = max(shape.num_kv_heads * shape.key_dim for shape in geometry.layers)
        self._keys = torch.empty(self.capacity * most, dtype=limits.dtype, device=device)
        self._values = torch.empty_like(self._keys)

    @property
    def num_bytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def is_worth_it(self, query_lengths: Sequence[int], kv_lengths: Sequence[int], group: int) -> bool:
        """Return whether rows of these lengths, ``group`` query heads to a KV head, are faster copied first."""
        num_tokens = sum(kv_lengths)
        if not _LEAST_TOKENS <= num_tokens <= self.capacity:
            return False
        work = sum(q * kv for q, kv in zip(query_lengths, kv_lengths, strict=True))
        return work * group >= _LEAST_QUERIES_PER_KV_HEAD * num_tokens

    def gather(
        self, layout: GatheredLayout, key_pages: torch.Tensor, value_pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows' keys and values [N, K, D]; they hold until the next call."""
        from moesaic.kernels.gather import gather_pages

        shape = (layout.num_tokens, *key_pages.shape[2:])
        num_elements = layout.num_tokens * key_pages.shape[2] * key_pages.shape[3]
        keys, values = self._keys[:num_elements].view(shape), self._values[:num_elements].view(shape)
        gather_pages(key_pages, value_pages, layout.page_indices, layout.page_starts, keys, values)
        return keys, values


@dataclass(frozen=True, slots=True)
class GatheredLayout:
    """Where the pages of some rows go, on the device."""

    page_indices: torch.Tensor
    """int32 [M]."""
    page_starts: torch.Tensor
    """int32 [M + 1]: the first token of each page in the output, and the end of the last."""
    num_tokens: int

    @classmethod
    def of(cls, kv_lengths: NDArray[np.int64], page_indices: torch.Tensor, block_size: int) -> GatheredLayout:
        """Return the layout of rows of these lengths in tokens, which own ``page_indices`` one after the other."""
        num_pages = -(-kv_lengths // block_size)
        counts = np.full(int(num_pages.sum()), block_size, dtype=np.int32)
        counts[np.cumsum(num_pages) - 1] = (kv_lengths - 1) % block_size + 1
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
        on_device = packed_copy({"starts": starts}, page_indices.device)["starts"]
        return cls(page_indices, on_device, int(starts[-1]))
