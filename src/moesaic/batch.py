"""The tensors of one step, built from its plan without a Python loop over tokens."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic.errors import InvariantError
from moesaic.kv.table import PagedKVCache
from moesaic.sched.plan import PagedBatchLengths, StepPlan
from moesaic.sequence import SeqId, Sequence

_ALIGNMENT_BYTES = 512  # of torch's allocator on CUDA


@dataclass(frozen=True, slots=True)
class CarriedTokens:
    """What the step before this one samples; the host does not have it yet."""

    token_ids: torch.Tensor
    """int64 [S] on the model's device; negative where there is none to be had."""
    index: Mapping[SeqId, int]
    """Which of them is the last token of a sequence."""

    def for_rows(
        self, decode_seq_ids: SequenceOf[SeqId]
    ) -> tuple[torch.Tensor, NDArray[np.int64], NDArray[np.int64]] | None:
        """Return the token ids, which of them decode rows take, and those rows; None if they take none."""
        pairs = [(n, row) for row, i in enumerate(decode_seq_ids) if (n := self.index.get(i)) is not None]
        if not pairs:
            return None
        sources, rows = np.array(pairs, dtype=np.int64).T
        return self.token_ids, sources, rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """``R`` rows with ``T`` query tokens in all, concatenated; decode rows first.

    Row ``r`` owns flat tokens ``[query_offsets[r], query_offsets[r + 1])``.
    All tensors are on the model's device.
    """

    lengths: PagedBatchLengths
    num_decode_rows: int
    block_size: int
    token_ids: torch.Tensor
    """int64 [T]."""
    positions: torch.Tensor
    """int64 [T]: position of each query token in its own sequence."""
    slot_mapping: torch.Tensor
    """int64 [T]: ``block_id * block_size + offset`` where each query token's K and V go."""
    block_tables: torch.Tensor
    """int32 [R, max blocks of a row], rows padded with block 0; entry ``j`` holds positions ``[j*B, (j+1)*B)``."""
    logit_indices: torch.Tensor
    """int64 [S]: flat tokens whose logits are wanted: first the sampling rows' last tokens, in row order,
    then the tokens that prompt log probabilities need."""
    num_sampling_rows: int
    page_indices: torch.Tensor
    """int32 [all blocks of all rows]: the rows' block tables one after the other, without padding."""
    num_valid_tokens: torch.Tensor | None = None
    """int32 [1], or None: tokens from this one on are padding, of no request (captured graphs only)."""

    @property
    def num_rows(self) -> int:
        return len(self.lengths.query_lengths)

    @property
    def num_tokens(self) -> int:
        return self.lengths.query_offsets[-1]

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        sequences: Mapping[SeqId, Sequence],
        kv: PagedKVCache,
        *,
        extra_logit_indices: SequenceOf[int] = (),
        carried: CarriedTokens | None = None,
        device: torch.device | str = "cpu",
    ) -> RaggedBatch:
        """Return the batch of a plan whose leases ``kv`` holds (arguments as in ``build``).

        Decode rows of sequences that ``carried`` has take their tokens from there: the host does not know them yet.
        """
        decode = [sequences[i].last_token_id for i, _ in plan.decode_rows]
        chunks = [sequences[c.seq_id].tokens(c.start, c.num_tokens) for c in plan.chunks]
        num_decode = len(plan.decode_rows)
        terminal = [i for i, c in enumerate(plan.chunks, num_decode) if c.is_terminal]
        return cls.build(
            lengths=plan.lengths(),
            num_decode_rows=num_decode,
            block_size=kv.block_size,
            token_ids=np.concatenate([np.array(decode, dtype=np.int64), *chunks]),
            block_tables=[kv.block_table(i) for i in sequences],
            sampling_rows=[*range(num_decode), *terminal],
            extra_logit_indices=extra_logit_indices,
            carried=None if carried is None else carried.for_rows([i for i, _ in plan.decode_rows]),
            device=device,
        )

    @classmethod
    def build(
        cls,
        *,
        lengths: PagedBatchLengths,
        num_decode_rows: int,
        block_size: int,
        token_ids: NDArray[np.int64],
        block_tables: SequenceOf[NDArray[np.int32]],
        sampling_rows: SequenceOf[int],
        extra_logit_indices: SequenceOf[int] = (),
        carried: tuple[torch.Tensor, NDArray[np.int64], NDArray[np.int64]] | None = None,
        device: torch.device | str = "cpu",
    ) -> RaggedBatch:
        """Return the batch of rows with these lengths.

        ``token_ids`` [T] are the query tokens in row order; ``block_tables`` one int32 array per row that covers
        its KV length; ``sampling_rows`` are row indices; ``extra_logit_indices`` flat token indices.
        ``carried``: token ids on the device, which of them, and the flat tokens that they replace.
        Raises: ``InvariantError`` if a table is too short for its row.
        """
        flat, table = _page_tables(lengths, block_tables, block_size)
        query = np.asarray(lengths.query_lengths, dtype=np.int64)
        offsets = np.asarray(lengths.query_offsets, dtype=np.int64)
        row_of_token = np.repeat(np.arange(len(query)), query)
        shift = np.asarray(lengths.context_lengths, dtype=np.int64) - offsets[:-1]
        positions = np.arange(offsets[-1], dtype=np.int64) + shift[row_of_token]
        slots = table[row_of_token, positions // block_size].astype(np.int64) * block_size + positions % block_size
        last = offsets[1:][np.asarray(sampling_rows, dtype=np.int64)] - 1
        logit_indices = np.concatenate([last, np.asarray(extra_logit_indices, dtype=np.int64)])
        arrays: dict[str, NDArray[Any]] = {
            "token_ids": token_ids,
            "positions": positions,
            "slot_mapping": slots,
            "logit_indices": logit_indices,
            "block_tables": table,
            "page_indices": flat,
        }
        if carried is not None:
            arrays |= {"carried_from": carried[1], "carried_to": carried[2]}
        tensors = _upload(arrays, torch.device(device))
        if carried is not None:
            source = carried[0].index_select(0, tensors.pop("carried_from")).clamp(min=0)  # negative: a broken row
            tensors["token_ids"].index_copy_(0, tensors.pop("carried_to"), source)
        return cls(
            lengths=lengths,
            num_decode_rows=num_decode_rows,
            block_size=block_size,
            num_sampling_rows=len(sampling_rows),
            **tensors,
        )


def _page_tables(
    lengths: PagedBatchLengths, block_tables: SequenceOf[NDArray[np.int32]], block_size: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the blocks that rows need, one row after the other, and as a table [R, max blocks] padded with block 0."""
    needed = -(-np.asarray(lengths.kv_seq_lengths, dtype=np.int64) // block_size)
    held = np.fromiter(map(len, block_tables), dtype=np.int64, count=len(block_tables))
    if len(held) != len(needed) or bool((held < needed).any()):
        raise InvariantError(f"block tables of {held.tolist()} blocks do not cover rows needing {needed.tolist()}")
    flat = np.concatenate([t[:n] for t, n in zip(block_tables, needed.tolist(), strict=True)])
    table = np.zeros((len(needed), int(needed.max())), dtype=np.int32)
    table[np.arange(table.shape[1]) < needed[:, None]] = flat
    return flat, table


def _upload(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the arrays (Any: int64 or int32) on ``device``, by one copy from pinned memory; waits for nothing."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    return tensors if device.type == "cpu" else packed_copy(tensors, device)


def packed_copy(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Return copies of host tensors on ``device``, views of one buffer that one copy fills.

    Each begins where torch's own allocations could: kernels are compiled anew for less aligned addresses.
    """
    ends = list(accumulate(_aligned(t.nbytes) for t in tensors.values()))
    is_pinned = device.type == "cuda"
    staging = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=is_pinned)
    spans = {
        name: slice(end - _aligned(t.nbytes), end - _aligned(t.nbytes) + t.nbytes)
        for (name, t), end in zip(tensors.items(), ends, strict=True)
    }
    for name, tensor in tensors.items():
        staging[spans[name]].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    buffer = staging.to(device, non_blocking=True)
    return {name: buffer[spans[name]].view(t.dtype).view(t.shape) for name, t in tensors.items()}


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
