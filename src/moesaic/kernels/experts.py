"""Routed SwiGLU experts for decode-sized batches, weights found through a slot table (Triton).

Three or four launches: pairs sorted by expert (not in pairwise mode); gate and up with the activation; down; the
weighted sum. Every grid is a host bound, with surplus programs that leave at once, and every count stays on the
device, so a CUDA graph can hold all of it. No atomics: the sum over a token's experts has one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from moesaic.kernels.launch import launch
from moesaic.kernels.routing import RowBlocks, most_blocks, sort_by_expert
from moesaic.kernels.tiles import ExpertTiles, Tile

_SUM_COLUMNS = 512


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory between the launches, for up to so many pairs; one stream may use it at a time."""

    blocks: RowBlocks
    hidden: torch.Tensor
    """[pairs, I], rows in the order of ``blocks.pairs``."""
    outputs: torch.Tensor
    """[pairs, C], in the order of pairs, not weighted yet."""

    @classmethod
    def empty(cls, num_pairs: int, width: int, inner: int, dtype: torch.dtype, device: torch.device) -> Scratch:
        return cls(
            RowBlocks.empty(num_pairs, device),
            torch.empty((num_pairs, inner), dtype=dtype, device=device),
            torch.empty((num_pairs, width), dtype=dtype, device=device),
        )


def fused_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    slots: torch.Tensor,
    tiles: ExpertTiles,
    scratch: Scratch,
    overlaps: bool = False,
) -> torch.Tensor:
    """Return what ``reference.fused_experts`` does; waits for nothing.

    ``ids``, ``weights`` and the last dimension of ``x`` are contiguous; ``gate_up`` and ``down`` are so within a slot.
    ``scratch`` holds at least T * A pairs. ``overlaps`` (compute capability 9.0 or newer) starts each kernel while the
    one before it ends.
    """
    num_tokens, width = x.shape
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    num_pairs = ids.numel()
    if tiles.is_pairwise:
        num_blocks = num_pairs
    else:
        sort_by_expert(ids, slots.numel(), tiles.block_m, scratch.blocks, overlaps)
        num_blocks = most_blocks(num_pairs, slots.numel(), tiles.block_m)
    product = partial(
        _launch_product,
        ids=ids,
        slots=slots,
        blocks=scratch.blocks,
        num_blocks=num_blocks,
        tiles=tiles,
        overlaps=overlaps,
    )
    product(_gate_up_kernel, tiles.gate_up, x, gate_up, scratch.hidden)
    if tiles.sums_in_down:
        _launch_down_sum(down, ids, weights, slots, scratch, out, tiles.down, overlaps)
        return out
    product(_down_kernel, tiles.down, scratch.hidden, down, scratch.outputs)
    launch(
        _sum_kernel, (num_tokens, triton.cdiv(width, _SUM_COLUMNS)),
        scratch.outputs, ids, weights, out, width=width, num_chosen=ids.shape[1], block=_SUM_COLUMNS,
        overlaps=overlaps, num_warps=4, launch_pdl=overlaps,
    )  # fmt: skip
    return out


def _launch_product(
    kernel: Any, tile: Tile, source: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, ids: torch.Tensor,
    slots: torch.Tensor, blocks: RowBlocks, num_blocks: int, tiles: ExpertTiles, overlaps: bool,
) -> None:  # fmt: skip
    """Launch one product (Any: a Triton function) over ``num_blocks`` row blocks, ``source`` to ``target``."""
    columns, depth = target.shape[1], source.shape[1]
    launch(
        kernel, (num_blocks * triton.cdiv(columns, tile.block_n),),
        source, weight, target, ids, blocks.pairs, blocks.experts, blocks.starts, blocks.ends, blocks.num_blocks, slots,
        source.stride(0), weight.stride(0), num_blocks,
        columns=columns, depth=depth, num_chosen=ids.shape[1], is_pairwise=tiles.is_pairwise, block_m=tiles.block_m,
        block_n=tile.block_n, block_k=min(tile.block_k, triton.next_power_of_2(depth)), group_m=tile.group_m,
        overlaps=overlaps, num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=overlaps,
    )  # fmt: skip


def _launch_down_sum(
    down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor, scratch: Scratch,
    out: torch.Tensor, tile: Tile, overlaps: bool,
) -> None:  # fmt: skip
    (num_tokens, columns), depth = out.shape, down.shape[2]
    launch(
        _down_sum_kernel, (num_tokens * triton.cdiv(columns, tile.block_n),),
        scratch.hidden, down, ids, weights, slots, out, scratch.hidden.stride(0), down.stride(0),
        columns=columns, depth=depth, num_chosen=ids.shape[1], choices=triton.next_power_of_2(ids.shape[1]),
        block_n=tile.block_n, block_k=min(tile.block_k, triton.next_power_of_2(depth)),
        overlaps=overlaps, num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=overlaps,
    )  # fmt: skip


@triton.jit
def _wait_for_inputs():
    """Wait until the kernel before this one is done and seen, then let the next one start and wait (Hopper, PDL)."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _tile_of(num_blocks, columns: tl.constexpr, block_n: tl.constexpr, group_m: tl.constexpr):
    """Return the row block and the column tile of this program, columns fastest within ``group_m`` row blocks."""
    program = tl.program_id(0)
    num_tiles: tl.constexpr = (columns + block_n - 1) // block_n
    if group_m == 1:
        return program // num_tiles, program % num_tiles
    group = program // (group_m * num_tiles)
    size = tl.minimum(num_blocks - group * group_m, group_m)
    within = program % (group_m * num_tiles)
    return group * group_m + within % size, within // size


@triton.jit(do_not_specialize=["num_blocks"])
def _gate_up_kernel(
    x, weight, hidden, ids, pairs, experts, starts, ends, num_set, slots, x_stride, slot_stride, num_blocks,
    columns: tl.constexpr, depth: tl.constexpr, num_chosen: tl.constexpr, is_pairwise: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, group_m: tl.constexpr, overlaps: tl.constexpr,
):  # fmt: skip
    if overlaps:
        _wait_for_inputs()
    block, tile = _tile_of(num_blocks, columns, block_n, group_m)
    lane = tl.arange(0, block_m)
    if is_pairwise:
        expert = tl.load(ids + block).to(tl.int32)
        if expert < 0:
            return
        rows = block + lane
        is_row = lane == 0
        tokens = block // num_chosen + lane * 0
    else:
        if block >= tl.load(num_set):
            return
        expert = tl.load(experts + block)
        rows = tl.load(starts + block) + lane
        is_row = rows < tl.load(ends + block)
        tokens = tl.load(pairs + rows, mask=is_row, other=0) // num_chosen
    column = tile * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    x_at = x + tokens.to(tl.int64)[:, None] * x_stride + k[None, :]
    slot = tl.load(slots + expert).to(tl.int64)
    # Columns beyond the last are read as earlier ones and not stored.
    gate_at = weight + slot * slot_stride + (column % columns)[None, :] * depth + k[:, None]
    up_at = gate_at + columns * depth
    gate = tl.zeros([block_m, block_n], dtype=tl.float32)
    up = tl.zeros([block_m, block_n], dtype=tl.float32)
    for first in range(0, depth, block_k):
        if depth % block_k == 0:
            x_tile = tl.load(x_at + first, mask=is_row[:, None], other=0.0)
            gate_tile = tl.load(gate_at + first)
            up_tile = tl.load(up_at + first)
        else:
            is_inside = first + k < depth
            x_tile = tl.load(x_at + first, mask=is_row[:, None] & is_inside[None, :], other=0.0)
            gate_tile = tl.load(gate_at + first, mask=is_inside[:, None], other=0.0)
            up_tile = tl.load(up_at + first, mask=is_inside[:, None], other=0.0)
        gate = tl.dot(x_tile, gate_tile, gate)
        up = tl.dot(x_tile, up_tile, up)
    value = gate / (1.0 + tl.exp(-gate)) * up
    target = hidden + rows.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(target, value.to(hidden.dtype.element_ty), mask=is_row[:, None] & (column < columns)[None, :])


@triton.jit(do_not_specialize=["num_blocks"])
def _down_kernel(
    hidden, weight, outputs, ids, pairs, experts, starts, ends, num_set, slots, hidden_stride, slot_stride, num_blocks,
    columns: tl.constexpr, depth: tl.constexpr, num_chosen: tl.constexpr, is_pairwise: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, group_m: tl.constexpr, overlaps: tl.constexpr,
):  # fmt: skip
    block, tile = _tile_of(num_blocks, columns, block_n, group_m)
    lane = tl.arange(0, block_m)
    if is_pairwise:
        # Ids are older than the kernel before this one, which has waited for them: they can be read at once.
        expert = tl.load(ids + block).to(tl.int32)
        if overlaps:
            _wait_for_inputs()
        if expert < 0:
            return
        rows = block + lane
        is_row = lane == 0
        targets = rows
    else:
        if overlaps:
            _wait_for_inputs()
        if block >= tl.load(num_set):
            return
        expert = tl.load(experts + block)
        rows = tl.load(starts + block) + lane
        is_row = rows < tl.load(ends + block)
        targets = tl.load(pairs + rows, mask=is_row, other=0)
    column = tile * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    hidden_at = hidden + rows.to(tl.int64)[:, None] * hidden_stride + k[None, :]
    slot = tl.load(slots + expert).to(tl.int64)
    weight_at = weight + slot * slot_stride + (column % columns)[None, :] * depth + k[:, None]
    total = tl.zeros([block_m, block_n], dtype=tl.float32)
    for first in range(0, depth, block_k):
        if depth % block_k == 0:
            hidden_tile = tl.load(hidden_at + first, mask=is_row[:, None], other=0.0)
            weight_tile = tl.load(weight_at + first)
        else:
            is_inside = first + k < depth
            hidden_tile = tl.load(hidden_at + first, mask=is_row[:, None] & is_inside[None, :], other=0.0)
            weight_tile = tl.load(weight_at + first, mask=is_inside[:, None], other=0.0)
        total = tl.dot(hidden_tile, weight_tile, total)
    target = outputs + targets.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(target, total.to(outputs.dtype.element_ty), mask=is_row[:, None] & (column < columns)[None, :])


@triton.jit
def _sum_kernel(
    outputs, ids, weights, out,
    width: tl.constexpr, num_chosen: tl.constexpr, block: tl.constexpr, overlaps: tl.constexpr,
):  # fmt: skip
    if overlaps:
        _wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], dtype=tl.float32)
    for choice in tl.static_range(num_chosen):
        pair = token * num_chosen + choice
        # The output of a pair without an expert was never written.
        is_set = (tl.load(ids + pair) >= 0) & (column < width)
        output = tl.load(outputs + pair * width + column, mask=is_set, other=0.0)
        total += tl.load(weights + pair).to(tl.float32) * output.to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _down_sum_kernel(
    hidden, weight, ids, weights, slots, out, hidden_stride, slot_stride,
    columns: tl.constexpr, depth: tl.constexpr, num_chosen: tl.constexpr, choices: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr, overlaps: tl.constexpr,
):  # fmt: skip
    """Down and the weighted sum of one token's columns: its experts one after another in one pipelined loop."""
    num_tiles: tl.constexpr = (columns + block_n - 1) // block_n
    num_steps: tl.constexpr = (depth + block_k - 1) // block_k
    token = tl.program_id(0) // num_tiles
    choice = tl.arange(0, choices)
    # Ids and weights are older than the kernel before this one, which has waited for them. All are held in registers:
    # a load whose address is loaded within the loop could not be started early.
    experts = tl.load(ids + token * num_chosen + choice, mask=choice < num_chosen, other=-1).to(tl.int32)
    is_set = experts >= 0
    offsets = tl.load(slots + experts, mask=is_set, other=0).to(tl.int64) * slot_stride
    scales = tl.load(weights + token * num_chosen + choice, mask=is_set, other=0.0).to(tl.float32)
    if overlaps:
        _wait_for_inputs()
    column = tl.program_id(0) % num_tiles * block_n + tl.arange(0, block_n)
    lane = tl.arange(0, 16)
    k = tl.arange(0, block_k)
    weight_at = weight + (column % columns)[None, :] * depth + k[:, None]
    hidden_at = hidden + (token * num_chosen).to(tl.int64) * hidden_stride + k[None, :] + lane[:, None] * 0
    part = tl.zeros([16, block_n], dtype=tl.float32)
    total = tl.zeros([16, block_n], dtype=tl.float32)
    for step in range(num_chosen * num_steps):
        current = step // num_steps
        first = (step % num_steps) * block_k
        is_current = choice == current
        offset = tl.sum(tl.where(is_current, offsets, 0), axis=0)
        exists = tl.sum((is_current & is_set).to(tl.int32), axis=0) > 0
        source = hidden_at + current * hidden_stride + first
        # One mask for a whole tile where there can be: masks by column would split the copies into narrow ones.
        if depth % block_k == 0:
            hidden_tile = tl.load(source, mask=(lane == 0)[:, None] & exists, other=0.0)
            weight_tile = tl.load(weight_at + offset + first, mask=exists, other=0.0)
        else:
            is_inside = (first + k < depth) & exists
            hidden_tile = tl.load(source, mask=(lane == 0)[:, None] & is_inside[None, :], other=0.0)
            weight_tile = tl.load(weight_at + offset + first, mask=is_inside[:, None], other=0.0)
        part = tl.dot(hidden_tile, weight_tile, part)
        if first + block_k >= depth:
            # Rounded as an output that is stored would be.
            scale = tl.sum(tl.where(is_current, scales, 0.0), axis=0)
            total += scale * part.to(out.dtype.element_ty).to(tl.float32)
            part = tl.zeros([16, block_n], dtype=tl.float32)
    value = tl.sum(tl.where((lane == 0)[:, None], total, 0.0), axis=0)
    tl.store(out + token.to(tl.int64) * columns + column, value.to(out.dtype.element_ty), mask=column < columns)
