"""From router logits to experts, and from experts to the blocks of rows that the expert kernels take (Triton)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moesaic.kernels.launch import launch

_MOST_PAIRS = 4096  # pairs that a program sorts at once


def route(
    logits: torch.Tensor, top_k: int, renormalise: bool, num_valid: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``reference.route`` does; one program per token."""
    num_tokens, num_experts = logits.shape
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    if num_tokens:
        launch(
            _route_kernel, (num_tokens,),
            logits, num_valid, weights, ids, logits.stride(0),
            num_experts=num_experts, block=triton.next_power_of_2(num_experts),
            top_k=top_k, choices=triton.next_power_of_2(top_k),
            renormalise=renormalise, has_padding=num_valid is not None, num_warps=1,
        )  # fmt: skip
    return weights, ids


@triton.jit
def _route_kernel(
    logits, num_valid, weights, ids, logits_stride,
    num_experts: tl.constexpr, block: tl.constexpr, top_k: tl.constexpr, choices: tl.constexpr,
    renormalise: tl.constexpr, has_padding: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    expert = tl.arange(0, block)
    row = tl.load(logits + token.to(tl.int64) * logits_stride + expert, mask=expert < num_experts, other=float("-inf"))
    row = row.to(tl.float32)
    powers = tl.exp(row - tl.max(row, axis=0))
    left = tl.where(expert < num_experts, powers / tl.sum(powers, axis=0), -1.0)
    choice = tl.arange(0, choices)
    chosen_weights = tl.zeros([choices], dtype=tl.float32)
    chosen_ids = tl.zeros([choices], dtype=tl.int32)
    for i in tl.static_range(top_k):
        best = tl.argmax(left, axis=0)
        chosen_weights = tl.where(choice == i, tl.max(left, axis=0), chosen_weights)
        # NaN logits may choose a column beyond the experts; the id must stay one that can be read.
        chosen_ids = tl.where(choice == i, tl.minimum(best, num_experts - 1), chosen_ids)
        left = tl.where(expert == best, -1.0, left)
    if renormalise:
        chosen_weights = chosen_weights / tl.sum(chosen_weights, axis=0)
    if has_padding:
        is_real = token < tl.load(num_valid)
        chosen_weights = tl.where(is_real, chosen_weights, 0.0)
        chosen_ids = tl.where(is_real, chosen_ids, -1)
    tl.store(weights + token * top_k + choice, chosen_weights, mask=choice < top_k)
    tl.store(ids + token * top_k + choice, chosen_ids, mask=choice < top_k)


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Token-expert pairs sorted by expert and cut into blocks of rows of one expert each; int32, on the device.

    Pair ``p`` is choice ``p % A`` of token ``p // A``. Block ``b`` takes the rows ``[starts[b], ends[b])`` of
    ``pairs``, at most one block's worth, for expert ``experts[b]``; only the first ``num_blocks`` are set.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    num_blocks: torch.Tensor
    """[1]: it stays on the device, so that grids are sized by ``most_blocks`` and a CUDA graph can hold them."""

    @classmethod
    def empty(cls, num_pairs: int, device: torch.device) -> RowBlocks:
        """Return room for ``num_pairs`` and blocks of one row or more."""
        sizes = (num_pairs, num_pairs, num_pairs, num_pairs, 1)
        return cls(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))


def most_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return the most blocks that ``num_pairs`` can need: one part-filled block per expert, the others full."""
    return min(num_pairs, num_experts + num_pairs // block_m)


def sort_by_expert(
    ids: torch.Tensor, num_experts: int, block_m: int, blocks: RowBlocks, overlaps: bool = False
) -> None:
    """Fill ``blocks`` for the pairs of ``ids`` [T, A], in the order of tokens within an expert; -1 is left out.

    One launch, one program per expert: each counts all pairs for itself, so that none waits for another.
    """
    num_pairs = ids.numel()
    chunk = min(_MOST_PAIRS, max(32, triton.next_power_of_2(num_pairs)))
    launch(
        _sort_kernel, (num_experts,),
        ids, blocks.pairs, blocks.experts, blocks.starts, blocks.ends, blocks.num_blocks, num_pairs,
        num_experts=num_experts, bins=triton.next_power_of_2(num_experts + 1),
        chunk=chunk, block_m=block_m, most_own=triton.next_power_of_2(triton.cdiv(num_pairs, block_m)),
        overlaps=overlaps, num_warps=8 if chunk > 1024 else 4, launch_pdl=overlaps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    ids, sorted_pairs, block_experts, block_starts, block_ends, num_blocks, num_pairs,
    num_experts: tl.constexpr, bins: tl.constexpr, chunk: tl.constexpr, block_m: tl.constexpr,
    most_own: tl.constexpr, overlaps: tl.constexpr,
):  # fmt: skip
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    bin_ids = tl.arange(0, bins)
    counts = tl.zeros([bins], dtype=tl.int32)
    for first in range(0, num_pairs, chunk):
        pair = first + tl.arange(0, chunk)
        chosen = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        # The last bin belongs to no expert.
        counts += tl.histogram(tl.where(chosen < 0, bins - 1, chosen), bins)
    counts = tl.where(bin_ids < num_experts, counts, 0)
    blocks = (counts + block_m - 1) // block_m
    start = tl.sum(tl.where(bin_ids < expert, counts, 0), axis=0)
    end = start + tl.sum(tl.where(bin_ids == expert, counts, 0), axis=0)
    block = tl.sum(tl.where(bin_ids < expert, blocks, 0), axis=0)
    if expert == num_experts - 1:
        tl.store(num_blocks, tl.sum(blocks, axis=0))
    own = tl.arange(0, most_own)
    row = start + own * block_m
    tl.store(block_experts + block + own, expert, mask=row < end)
    tl.store(block_starts + block + own, row, mask=row < end)
    tl.store(block_ends + block + own, tl.minimum(row + block_m, end), mask=row < end)
    for first in range(0, num_pairs, chunk):
        pair = first + tl.arange(0, chunk)
        chosen = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        is_mine = (chosen == expert).to(tl.int32)
        rank = tl.cumsum(is_mine, axis=0) - 1
        tl.store(sorted_pairs + start + rank, pair, mask=is_mine > 0)
        start += tl.sum(is_mine, axis=0)
