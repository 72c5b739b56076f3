"""Moves sequences between the running and host memory; the copies themselves are the engine's."""

from moesaic.kv.geometry import blocks_for_tokens
from moesaic.kv.table import PagedKVCache
from moesaic.sched.running import RunningSet
from moesaic.sched.swap import SwapLedger, SwapTransfer
from moesaic.sequence import Sequence, SequenceStatus


class Swapper:
    """Keeps device blocks, host blocks and the running set in step while copies are asked for, made or failed."""

    def __init__(self, ledger: SwapLedger, kv: PagedKVCache, running: RunningSet) -> None:
        self._ledger = ledger
        self._kv = kv
        self._running = running

    def has_room_for(self, seq: Sequence) -> bool:
        """Return whether the host pool can take the blocks of ``seq`` now.

        Not if it shares some: a block that its other holder frees must not be written while it is copied.
        """
        return self._kv.num_blocks(seq) <= self._ledger.num_free_blocks and not self._kv.shared_head(seq)

    def split(self, victims: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Return who fits the host pool, in the order given, and who does not or shares blocks."""
        room, swapped, lost = self._ledger.num_free_blocks, [], []
        for seq in victims:
            num_blocks = self._kv.num_blocks(seq)
            if num_blocks <= room and not self._kv.shared_head(seq):
                room -= num_blocks
                swapped.append(seq)
            else:
                lost.append(seq)
        return swapped, lost

    def begin_out(self, seq: Sequence) -> None:
        """Take ``seq`` off the running and ask for its copy to the host; its blocks stay fenced until the copy ends."""
        self._running.discard(seq)
        seq.move_to(SequenceStatus.SWAPPED)
        seq.num_preemptions += 1
        transfer = self._ledger.begin_out(seq, self._kv.block_ids(seq))
        self._kv.fence_sequence(seq, transfer.fence_id)

    def num_blocks_to_return(self) -> int:
        """Return the blocks with which the first of those in host memory comes back; 0 if nobody is there."""
        resting = self._ledger.resting()
        return self._num_blocks_back(resting[0]) if resting else 0

    def _num_blocks_back(self, seq: Sequence) -> int:
        """Return its blocks and that of its next token: two that came back together could else fill the pool, and
        neither could move.
        """
        num_blocks = blocks_for_tokens(seq.committed_kv_tokens + 1, self._kv.block_size)
        return max(self._ledger.sizes[seq.seq_id], num_blocks)

    def begin_ins(self, num_blocks_to_leave: int) -> None:
        """Lease blocks for those in host memory, by rank, as long as so many stay free, and ask for the copies."""
        for seq in self._ledger.resting():
            num_blocks = self._num_blocks_back(seq)
            if num_blocks + num_blocks_to_leave > self._kv.pool.num_free:
                return
            self._kv.ensure_sequence_capacity(seq, num_blocks * self._kv.block_size)
            self._kv.commit_sequence_reservation(seq)
            self._ledger.begin_in(seq.seq_id, self._kv.block_ids(seq)[: self._ledger.sizes[seq.seq_id]])

    def end(self, transfer: SwapTransfer) -> None:
        """A copy is made: ``out`` frees the device blocks, ``in`` lets the sequence run on at its old offset."""
        seq = self._ledger.owner(transfer)
        self._kv.pool.lift(transfer.fence_id)
        if seq is None:
            return
        if transfer.direction == "out":
            self._ledger.end_out(transfer.seq_id)
        else:
            self._ledger.remove(transfer.seq_id)
            self._running.enter(seq)

    def drop(self, seq: Sequence) -> None:
        """Forget the host copy of ``seq``, if it has one; blocks that a copy under way may write stay fenced for it."""
        copy = self._ledger.current.get(seq.seq_id)
        unbegun = self._ledger.remove(seq.seq_id)
        if unbegun is not None:
            self._kv.pool.lift(unbegun.fence_id)
        elif copy is not None:
            self._kv.fence_sequence(seq, copy.fence_id)
