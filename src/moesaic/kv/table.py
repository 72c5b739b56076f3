"""Block tables of all sequences over one pool, with leases that can be given back. No torch."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import CapacityError, InvariantError
from moesaic.kv.geometry import blocks_for_tokens
from moesaic.kv.pool import BlockId, BlockPool
from moesaic.sequence import SeqId, Sequence


@dataclass(slots=True)
class BlockTable:
    """The ordered block ids of one sequence; those past ``num_kept`` belong to a lease."""

    blocks: list[BlockId] = field(default_factory=list)
    num_kept: int = 0
    _array: NDArray[np.int32] | None = field(default=None, repr=False, compare=False)

    def as_array(self) -> NDArray[np.int32]:
        """Return the block ids as int32, cached until the table changes (treat as read-only)."""
        if self._array is None:
            self._array = np.array(self.blocks, dtype=np.int32)
        return self._array

    def extend(self, blocks: list[BlockId]) -> None:
        """Add leased blocks at the end."""
        self.blocks.extend(blocks)
        self._array = None

    def cut(self) -> list[BlockId]:
        """Remove the leased blocks and return them."""
        leased = self.blocks[self.num_kept :]
        del self.blocks[self.num_kept :]
        self._array = None
        return leased


def slot_mapping(table: BlockTable, start: int, num_tokens: int, block_size: int) -> list[int]:
    """Return the KV slot of each position in ``[start, start + num_tokens)``.

    Shapes: result has ``num_tokens`` entries, one per query token.
    Raises: ``CapacityError`` if the table does not yet cover the last position.
    Source: paged KV layout of the vLLM paper (SOSP 2023), section 4.2.
    """
    end = start + num_tokens
    if end > len(table.blocks) * block_size:
        raise CapacityError(f"position {end - 1} lies past the {len(table.blocks) * block_size} slots of the table")
    return [table.blocks[p // block_size] * block_size + p % block_size for p in range(start, end)]


class PagedKVCache:
    """Block tables over one pool. Capacity grows under a lease, then is kept or rolled back."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self._tables: dict[SeqId, BlockTable] = {}

    def ensure_sequence_capacity(self, seq: Sequence, num_tokens: int) -> None:
        """Lease blocks until ``seq`` can hold ``num_tokens`` tokens in all; never shrinks, idempotent.

        Raises: ``CapacityError`` if the pool has too few; then nothing changes.
        """
        table = self._tables.get(seq.seq_id)
        missing = blocks_for_tokens(num_tokens, self.block_size) - (0 if table is None else len(table.blocks))
        if missing <= 0:
            return
        blocks = self.pool.reserve(missing)
        if table is None:
            table = self._tables[seq.seq_id] = BlockTable()
        table.extend(blocks)

    def num_reserved_tokens(self, seq: Sequence | SeqId) -> int:
        """Return how many tokens the blocks of ``seq`` can hold, leased ones included."""
        return self.num_blocks(seq) * self.block_size

    def num_blocks(self, seq: Sequence | SeqId) -> int:
        """Return how many blocks ``seq`` holds, leased ones included."""
        table = self._tables.get(seq.seq_id if isinstance(seq, Sequence) else seq)
        return 0 if table is None else len(table.blocks)

    def block_table(self, seq: Sequence | SeqId) -> NDArray[np.int32]:
        """Return the block ids of ``seq`` as int32 (read-only).

        Raises: ``InvariantError`` if it has none.
        """
        seq_id = seq.seq_id if isinstance(seq, Sequence) else seq
        table = self._tables.get(seq_id)
        if table is None:
            raise InvariantError(f"sequence {seq_id} has no block table")
        return table.as_array()

    def block_ids(self, seq: Sequence) -> tuple[BlockId, ...]:
        """Return the block ids of ``seq`` in order; empty if it holds none."""
        table = self._tables.get(seq.seq_id)
        return () if table is None else tuple(table.blocks)

    def commit_sequence_reservation(self, seq: Sequence) -> None:
        """Keep the leased blocks of ``seq``; without a lease a no-op."""
        table = self._tables.get(seq.seq_id)
        if table is not None:
            table.num_kept = len(table.blocks)

    def reopen_sequence_reservation(self, seq: Sequence, num_kept: int) -> None:
        """Undo ``commit_sequence_reservation``: the blocks past ``num_kept`` are leased again."""
        table = self._tables.get(seq.seq_id)
        if table is not None:
            table.num_kept = num_kept

    def rollback_sequence_reservation(self, seq: Sequence) -> None:
        """Return exactly the leased blocks of ``seq``; without a lease a no-op."""
        table = self._tables.get(seq.seq_id)
        if table is None or table.num_kept == len(table.blocks):
            return
        self.pool.release(table.cut())
        if not table.blocks:
            del self._tables[seq.seq_id]

    def free_sequences(self, sequences: Iterable[Sequence]) -> None:
        """Return all blocks of ``sequences`` at once; those without any are passed over.

        Raises: ``InvariantError`` if one block has no owner; then nothing is returned.
        """
        held = [seq.seq_id for seq in sequences if seq.seq_id in self._tables]
        self.pool.release([b for seq_id in held for b in self._tables[seq_id].blocks])
        for seq_id in held:
            del self._tables[seq_id]

    def fork_sequence(self, donor: Sequence, seq: Sequence, num_blocks: int) -> None:
        """Lease to ``seq``, which has none, the first blocks of ``donor``: full ones, which nobody writes any more.

        Raises: ``InvariantError`` if ``donor`` has fewer or ``seq`` has some.
        """
        blocks = self.block_ids(donor)[:num_blocks]
        if len(blocks) != num_blocks or seq.seq_id in self._tables:
            raise InvariantError(f"sequence {seq.seq_id} cannot begin with {num_blocks} blocks of {donor.seq_id}")
        self.pool.share(blocks)
        self._tables[seq.seq_id] = BlockTable(list(blocks))

    def shared_head(self, seq: Sequence | SeqId) -> tuple[BlockId, ...]:
        """Return the leading blocks of ``seq`` that others hold too; only a fork makes any."""
        table = self._tables.get(seq.seq_id if isinstance(seq, Sequence) else seq)
        return () if table is None else tuple(takewhile(self.pool.is_shared, table.blocks))

    def num_freed_by(self, sequences: Iterable[Sequence]) -> int:
        """Return how many blocks ``free_sequences`` would free: those that nobody else holds."""
        held = Counter(b for seq in sequences for b in self.block_ids(seq))
        return sum(self.pool.num_references(b) == n for b, n in held.items())

    def fence_sequence(self, seq: Sequence, fence_id: int) -> None:
        """Give up all blocks of ``seq``, which a step in flight may still write, until the fence is lifted."""
        table = self._tables.pop(seq.seq_id, None)
        if table is not None:
            self.pool.fence(table.blocks, fence_id)

    def fingerprint(self) -> tuple[object, ...]:
        """Return a value that is equal exactly when pool and tables are."""
        tables = {k: (tuple(t.blocks), t.num_kept) for k, t in self._tables.items()}
        return self.pool.fingerprint(), tables

    def check(self) -> None:
        """Return if the pool is whole and no block stands in two tables unless shared.

        Raises: ``InvariantError`` naming the block or the counts.
        """
        self.pool.check()
        owners: dict[BlockId, SeqId] = {}
        for seq_id, table in self._tables.items():
            for block in table.blocks:
                if block in owners and not self.pool.is_shared(block):
                    raise InvariantError(f"KV block {block} belongs to sequences {owners[block]} and {seq_id}")
                owners[block] = seq_id
