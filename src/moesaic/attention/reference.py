"""Paged attention in plain torch: the oracle of the fast backends, and the backend of CPUs.

Rows are packed into a few groups of like shape; a group gathers its keys and values from the pages once and
attends with one call. The queries that share a KV head are laid side by side, ``[G, K, g * Q, D]`` for
``g = H / K``, so that grouped-query attention needs no copy of K or V and decode is a matrix product.
Measured on 2 shared cores (AVX2, torch 2.13, 2026-12-01), 32 decode rows of 1024 tokens, 4 KV heads of 128,
``g`` = 8, one thread, without the gather: packed 27 ms in float32 and 24 ms in bfloat16, ``enable_gqa`` 56 and
416 ms, explicit matmul and softmax 172 and 439 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from moesaic.attention.base import AttentionLimits, AttentionParams
from moesaic.batch import RaggedBatch
from moesaic.errors import InvariantError, Refused
from moesaic.kv.geometry import KVGeometry

MAX_GATHER_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
"""Keys gathered by one group, unless one row alone has more. Beyond some 30 MiB every layer pays for fresh memory
on a CPU: 16 rows of 1024 tokens, 8 KV heads of 128 in float32 take 39 ms in pieces of 8 MiB, 45 in 16, 91 in 32,
132 in one of 64 (one thread, 2026-12-01). Pieces of 1 MiB are no faster and slower when threads share cores."""

MAX_SCORES = 1 << 25
"""Largest ``rows * heads * queries * keys`` of one group: scores of 128 MiB in float32, masks less."""

MAX_CACHED_MASK = 1 << 26
"""Mask elements kept for the other layers of the step; masks beyond are built again in each layer."""

LONG_CHUNK_TOKENS = 256
"""A chunk this long keeps the machine busy alone and shares no group: it is never padded."""

SHORT_KV_TOKENS = 64
"""Rows this short share a group whatever their lengths: the call costs more than the padding."""


class TorchAttention:
    """Attention over paged KV by gather and ``scaled_dot_product_attention``; runs everywhere, all shapes."""

    name = "torch"

    def supports(self, geometry: KVGeometry) -> Refused | None:
        """Return None: every geometry works."""
        return None

    def prepare(self, limits: AttentionLimits) -> None:
        """Change nothing: memory is allocated as it is needed."""

    def plan(self, batch: RaggedBatch) -> TorchPlan:
        """Return the step's groups, made once for each kind of layer when its first layer asks."""
        return TorchPlan(batch)

    def run(
        self,
        plan: TorchPlan,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        params: AttentionParams,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention output [T, H, Dv] of ``query`` [T, H, D] in the dtype of ``query``, in ``out`` if given.

        Softmax is in float32. Memory beyond the output: one group's keys, values, mask and, with sinks or a
        softcap, scores. Raises: ``InvariantError`` if the heads do not divide or the tokens are not the batch's.
        """
        _check_shapes(plan, query, key_pages)
        keys, values = key_pages.flatten(0, 1), value_pages.flatten(0, 1)
        out = query.new_empty(*query.shape[:2], value_pages.shape[3]) if out is None else out
        kind = _LayerKind.of(query, key_pages, value_pages, params)
        for group in plan.groups(kind):
            attended = _attend(group, query, keys, values, params, kind)
            out.index_copy_(0, group.targets, attended)
        return out


@dataclass(frozen=True, slots=True)
class _LayerKind:
    """What the grouping depends on; layers of one kind share groups and masks."""

    window: int | None
    is_fused: bool
    queries_per_kv_head: int
    dtype: torch.dtype
    max_keys: int
    """Keys of one group, its rows times the longest of them."""
    max_pairs: int
    """Query-key pairs of one group."""

    @classmethod
    def of(
        cls, query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, params: AttentionParams
    ) -> _LayerKind:
        num_heads, num_kv_heads = query.shape[1], key_pages.shape[2]
        bytes_per_key = num_kv_heads * max(key_pages.shape[3], value_pages.shape[3]) * key_pages.element_size()
        return cls(
            window=params.sliding_window,
            is_fused=params.sinks is None and params.logit_softcap is None,
            queries_per_kv_head=num_heads // num_kv_heads,
            dtype=query.dtype,
            max_keys=MAX_GATHER_BYTES["cuda" if query.is_cuda else "cpu"] // bytes_per_key,
            max_pairs=MAX_SCORES // num_heads,
        )


class _Piece(NamedTuple):
    """Queries ``[first, first + num_queries)`` of a row and the positions ``[kv_start, kv_end)`` they see."""

    row: int
    first: int
    num_queries: int
    kv_start: int
    kv_end: int
    is_fresh: bool
    """No context, window or tile cuts it: plain causal attention of its queries over themselves."""

    @property
    def num_keys(self) -> int:
        return self.kv_end - self.kv_start


@dataclass(slots=True, kw_only=True)
class _Group:
    """``G`` pieces padded to ``Q`` queries and ``L`` keys; padding repeats the piece's last query and last key.

    So padding reads nothing but what its own row may see, and stale pages can hold anything, even NaN.
    """

    num_rows: int
    is_fresh: bool
    query_index: torch.Tensor
    """int64 [G * Q] flat tokens."""
    kept: torch.Tensor | None
    """int64: which of the ``G * Q`` are no padding, if some are."""
    targets: torch.Tensor
    """int64: flat tokens of those."""
    slots: torch.Tensor
    """int64 [G * L]: where the keys and values lie."""
    query_positions: torch.Tensor
    """int64 [G, Q]."""
    key_positions: torch.Tensor
    """int64 [G, L]; the padding counts on, so that causality hides it."""
    needs_mask: bool
    keeps_mask: bool = False
    _mask: torch.Tensor | None = field(default=None, repr=False)

    def mask(self, kind: _LayerKind) -> torch.Tensor | None:
        """Return what to add to the scores, [G, 1, g * Q, L] of 0 and -inf, or None if all keys are seen."""
        if not self.needs_mask or self._mask is not None:
            return self._mask
        mask = self._new_mask(kind)
        if self.keeps_mask:
            self._mask = mask
        return mask

    def _new_mask(self, kind: _LayerKind) -> torch.Tensor:
        seen_from = self.query_positions[:, :, None]
        hidden = self.key_positions[:, None, :] > seen_from
        if kind.window is not None:
            hidden |= self.key_positions[:, None, :] <= seen_from - kind.window
        mask = torch.zeros(hidden.shape, dtype=kind.dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
        return mask.repeat(1, kind.queries_per_kv_head, 1).unsqueeze(1)


class TorchPlan:
    """The groups of one step, per kind of layer."""

    def __init__(self, batch: RaggedBatch) -> None:
        self.num_tokens = batch.num_tokens
        self._batch = batch
        self._groups: dict[_LayerKind, tuple[_Group, ...]] = {}

    def groups(self, kind: _LayerKind) -> tuple[_Group, ...]:
        """Return the groups for layers of this kind; the same objects for each layer of the step."""
        if kind not in self._groups:
            packed = _pack(_pieces(self._batch, kind), kind)
            self._groups[kind] = tuple(_group(self._batch, pieces) for pieces in packed)
            _keep_masks(self._groups[kind], kind)
        return self._groups[kind]


def _pieces(batch: RaggedBatch, kind: _LayerKind) -> Iterator[_Piece]:
    """Yield the rows, the long ones cut so that no piece has more than ``kind.max_pairs`` pairs."""
    lengths = batch.lengths
    for row, (num_queries, context) in enumerate(zip(lengths.query_lengths, lengths.context_lengths, strict=True)):
        is_windowed = kind.window is not None and context + num_queries > kind.window
        if context == 0 and kind.is_fused and not is_windowed:
            yield _Piece(row, 0, num_queries, 0, num_queries, True)
            continue
        step = max(1, kind.max_pairs // (context + num_queries))
        if kind.window is not None:  # else each query would be compared with all keys of the chunk, not of its window
            step = min(step, max(kind.window, LONG_CHUNK_TOKENS))
        for first in range(0, num_queries, step):
            size = min(step, num_queries - first)
            start = max(0, context + first - kind.window + 1) if kind.window is not None else 0
            yield _Piece(row, first, size, start, context + first + size, False)


def _pack(pieces: Iterator[_Piece], kind: _LayerKind) -> Iterator[list[_Piece]]:
    """Yield pieces of like shape together: padding at most doubles the queries and the keys of a group."""

    def shape_class(piece: _Piece) -> tuple[bool, int]:
        return piece.is_fresh, (piece.num_queries - 1).bit_length()

    ordered = sorted(pieces, key=lambda p: (shape_class(p), -p.num_keys))
    for (_, log_queries), alike in groupby(ordered, key=shape_class):
        pack: list[_Piece] = []
        for piece in alike:
            if pack and not _can_join(len(pack), pack[0].num_keys, 1 << log_queries, piece, kind):
                yield pack
                pack = []
            pack.append(piece)
        yield pack


def _can_join(num_rows: int, num_keys: int, num_queries: int, piece: _Piece, kind: _LayerKind) -> bool:
    padded = (num_rows + 1) * num_keys
    is_alike = 2 * piece.num_keys >= num_keys or num_keys <= SHORT_KV_TOKENS
    has_room = padded <= kind.max_keys and padded * num_queries <= kind.max_pairs
    return is_alike and has_room and num_queries < LONG_CHUNK_TOKENS


def _group(batch: RaggedBatch, pieces: list[_Piece]) -> _Group:
    row, first, num_queries, kv_start, kv_end, _ = np.array(pieces, dtype=np.int64).T[..., None]
    last_query = first + num_queries - 1
    query_range = np.arange(num_queries.max())
    query_in_row = np.minimum(first + query_range, last_query)
    context = np.asarray(batch.lengths.context_lengths, dtype=np.int64)[row]
    flat = np.asarray(batch.lengths.query_offsets, dtype=np.int64)[row] + query_in_row
    is_real = query_range < num_queries
    key_positions = kv_start + np.arange((kv_end - kv_start).max())
    has_padded_keys = bool((key_positions[:, -1:] >= kv_end).any())
    is_fresh = pieces[0].is_fresh

    def upload(array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(batch.block_tables.device)

    return _Group(
        num_rows=len(pieces),
        is_fresh=is_fresh,
        query_index=upload(flat.ravel()),
        kept=None if is_real.all() else upload(np.flatnonzero(is_real)),
        targets=upload(flat[is_real]),
        slots=_slots(batch, upload(row), upload(np.minimum(key_positions, kv_end - 1))),
        query_positions=upload(context + query_in_row),
        key_positions=upload(key_positions),
        needs_mask=not is_fresh and (len(query_range) > 1 or has_padded_keys),
    )


def _slots(batch: RaggedBatch, row: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return int64 [G * L] slots of ``positions`` [G, L] in the tables of ``row`` [G, 1]."""
    block = batch.block_tables[row, positions // batch.block_size].long()
    return (block * batch.block_size + positions % batch.block_size).flatten()


def _keep_masks(groups: tuple[_Group, ...], kind: _LayerKind) -> None:
    """Let groups keep their masks for the next layers, in order, as far as ``MAX_CACHED_MASK`` goes."""
    room = MAX_CACHED_MASK
    for group in groups:
        size = group.query_positions.shape[1] * group.key_positions.numel() * kind.queries_per_kv_head
        group.keeps_mask = size <= room
        room -= size if group.keeps_mask and group.needs_mask else 0


def _attend(
    group: _Group,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    kind: _LayerKind,
) -> torch.Tensor:
    """Return the output of the group's real queries, in the order of ``group.targets``."""
    q = query.index_select(0, group.query_index).view(group.num_rows, -1, *query.shape[1:])
    k = keys.index_select(0, group.slots).view(group.num_rows, -1, *keys.shape[1:]).transpose(1, 2)
    v = values.index_select(0, group.slots).view(group.num_rows, -1, *values.shape[1:]).transpose(1, 2)
    if group.is_fresh:
        out = _fused(q.transpose(1, 2), k, v, params.scale, is_causal=True).transpose(1, 2)
    else:
        out = _unpack_heads(_masked(group, _pack_heads(q, k.shape[1]), k, v, params, kind), q.shape[1])
    out = out.flatten(0, 1)
    return out if group.kept is None else out.index_select(0, group.kept)


def _fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Return torch's fused attention [G, H, Q, Dv] of ``q`` [G, H, Q, D], kept off its slow paths."""
    groups, value_dim = q.shape[1] // k.shape[1], v.shape[3]
    if q.device.type == "cpu" and q.shape[3] != value_dim:
        # The CPU kernel wants one dim: 16 rows x 16 heads of 192/128 on 1024 keys take 211 ms padded, 674 as they are.
        q, k, v = (functional.pad(t, (0, max(q.shape[3], value_dim) - t.shape[3])) for t in (q, k, v))
    if groups > 1 and q.is_cuda and q.dtype == torch.float32:
        # Flash takes no float32 and the memory-efficient kernel no grouped heads; what is left keeps all scores.
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        groups = 1
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=groups > 1
    )
    return out[..., :value_dim]


def _masked(
    group: _Group, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams, kind: _LayerKind
) -> torch.Tensor:
    """Return the output [G, K, g * Q, Dv] of packed ``q``: every head of ``k`` serves its own ``g * Q`` queries."""
    mask = group.mask(kind)
    if kind.is_fused:
        return _fused(q, k, v, params.scale, mask=mask)
    scores = (q.float() @ k.float().transpose(-1, -2)).mul_(params.scale)
    if params.logit_softcap is not None:
        scores = scores.div_(params.logit_softcap).tanh_().mul_(params.logit_softcap)
    if mask is not None:
        scores += mask
    normaliser = scores.logsumexp(dim=-1, keepdim=True)
    if params.sinks is not None:
        # A sink is one more logit of the softmax whose probability is dropped, so it enters the normaliser only.
        sinks = params.sinks.float().view(k.shape[1], -1, 1)  # [K, g, 1], then each for its Q queries
        sinks = sinks.repeat_interleave(q.shape[2] // sinks.shape[1], dim=1)
        normaliser = torch.logaddexp(normaliser, sinks)
    return (scores.sub_(normaliser).exp_() @ v.float()).to(q.dtype)


def _pack_heads(q: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return ``q`` [G, Q, H, D] as [G, K, g * Q, D]."""
    return q.view(*q.shape[:2], num_kv_heads, -1, q.shape[3]).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _unpack_heads(out: torch.Tensor, num_queries: int) -> torch.Tensor:
    """Return ``out`` [G, K, g * Q, Dv] as [G, Q, H, Dv]."""
    return out.reshape(*out.shape[:2], -1, num_queries, out.shape[3]).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _check_shapes(plan: TorchPlan, query: torch.Tensor, key_pages: torch.Tensor) -> None:
    if query.shape[0] != plan.num_tokens or query.shape[1] % key_pages.shape[2] or query.shape[2] != key_pages.shape[3]:
        raise InvariantError(
            f"query {tuple(query.shape)} does not fit {plan.num_tokens} planned tokens and key pages "
            f"{tuple(key_pages.shape)}: tokens and head dim must be equal, heads a multiple of KV heads"
        )
