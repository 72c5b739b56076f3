"""Host memory for the KV of swapped sequences, and the copies between it and the store."""

from collections.abc import Container

from moesaic.kv.store import BlockTensors, LayeredPagedKVStore
from moesaic.sched.swap import SwapTransfer
from moesaic.sequence import SeqId


class HostSwapPool:
    """Holds what ``SwapLedger`` accounts for: one host copy per swapped sequence."""

    def __init__(self, store: LayeredPagedKVStore) -> None:
        self._store = store
        self._copies: dict[SeqId, BlockTensors] = {}
        self.num_copied_bytes = 0

    @property
    def num_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self._copies.values())

    def run(self, transfer: SwapTransfer) -> None:
        """Make one copy; ``out`` waits for the device, ``in`` is in the stream's order before the next step.

        Raises: whatever the allocation or the copy raises; the store and the pool are then as before.
        """
        if transfer.direction == "out":
            copy = self._store.checkpoint(transfer.block_ids)
            self._copies[transfer.seq_id] = copy
        else:
            copy = self._copies[transfer.seq_id]
            self._store.restore(transfer.block_ids, copy)
            del self._copies[transfer.seq_id]
        self.num_copied_bytes += copy.num_bytes

    def keep(self, seq_ids: Container[SeqId]) -> None:
        """Drop the copies of all other sequences: their requests are over."""
        for seq_id in [i for i in self._copies if i not in seq_ids]:
            del self._copies[seq_id]
