"""Which sequences have their KV in host memory or on the way, and how many blocks that takes. No torch."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from moesaic.errors import InvariantError
from moesaic.kv.pool import BlockId
from moesaic.sequence import SeqId, Sequence

SwapState = Literal["out", "host", "in"]


class SwapTransfer(NamedTuple):
    """A copy that the engine must make: the blocks of one sequence to host memory (``out``) or back (``in``)."""

    transfer_id: int
    seq_id: SeqId
    direction: Literal["out", "in"]
    block_ids: tuple[BlockId, ...]

    @property
    def fence_id(self) -> int:
        """The fence of the device blocks while the copy runs; ids of steps are never negative."""
        return -1 - self.transfer_id


@dataclass(slots=True)
class SwapLedger:
    """Host blocks in use, all-or-nothing, by sequence.

    A sequence goes ``out`` (its device blocks are fenced until the copy is made), rests in ``host`` memory, and comes
    back ``in`` (its new device blocks are leased while the copy runs).
    """

    num_blocks: int
    """Capacity of the host pool; 0 turns swapping off."""
    sequences: dict[SeqId, Sequence] = field(default_factory=dict)
    states: dict[SeqId, SwapState] = field(default_factory=dict)
    sizes: dict[SeqId, int] = field(default_factory=dict)
    current: dict[SeqId, SwapTransfer] = field(default_factory=dict)
    """The last copy asked for, by sequence; an older one that ends late changes nothing."""
    transfers: list[SwapTransfer] = field(default_factory=list)
    """Copies not yet handed to the engine, in order."""
    num_transfers: int = 0

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - sum(self.sizes.values())

    def begin_out(self, seq: Sequence, block_ids: tuple[BlockId, ...]) -> SwapTransfer:
        """Take host blocks for ``seq``, ask for the copy and return it.

        Raises: ``InvariantError`` if the host pool has too few.
        """
        if len(block_ids) > self.num_free_blocks:
            raise InvariantError(f"{len(block_ids)} blocks to swap out, {self.num_free_blocks} free in the host pool")
        self.sequences[seq.seq_id], self.sizes[seq.seq_id] = seq, len(block_ids)
        return self._begin(seq.seq_id, "out", block_ids)

    def end_out(self, seq_id: SeqId) -> None:
        """The copy to the host is made."""
        self.states[seq_id] = "host"

    def begin_in(self, seq_id: SeqId, block_ids: tuple[BlockId, ...]) -> SwapTransfer:
        """Ask for the copy back into ``block_ids`` and return it."""
        return self._begin(seq_id, "in", block_ids)

    def _begin(self, seq_id: SeqId, direction: Literal["out", "in"], block_ids: tuple[BlockId, ...]) -> SwapTransfer:
        transfer = SwapTransfer(self.num_transfers, seq_id, direction, block_ids)
        self.num_transfers += 1
        self.states[seq_id] = direction
        self.current[seq_id] = transfer
        self.transfers.append(transfer)
        return transfer

    def owner(self, transfer: SwapTransfer) -> Sequence | None:
        """Return the sequence that still waits for this copy, or None if it was ended or moved meanwhile."""
        return self.sequences.get(transfer.seq_id) if self.current.get(transfer.seq_id) == transfer else None

    def remove(self, seq_id: SeqId) -> SwapTransfer | None:
        """Give the host blocks of the sequence back; return its copy if one was asked for and not yet handed out."""
        self.sequences.pop(seq_id, None)
        self.states.pop(seq_id, None)
        self.sizes.pop(seq_id, None)
        transfer = self.current.pop(seq_id, None)
        if transfer in self.transfers:
            self.transfers.remove(transfer)
            return transfer
        return None

    def take_transfers(self) -> list[SwapTransfer]:
        """Return the copies to make now, each once."""
        transfers, self.transfers = self.transfers, []
        return transfers

    def resting(self) -> list[Sequence]:
        """Return the sequences whose KV rests in host memory, first in rank first."""
        return sorted((s for i, s in self.sequences.items() if self.states[i] == "host"), key=lambda s: s.rank)

    def fingerprint(self) -> tuple[object, ...]:
        """Return a value that is equal exactly when the ledgers are."""
        return dict(self.states), dict(self.sizes), list(self.transfers)

    def check(self) -> None:
        """Return if the host pool is within its size and each sequence has one state.

        Raises: ``InvariantError``.
        """
        if self.num_free_blocks < 0 or not (self.states.keys() == self.sizes.keys() == self.sequences.keys()):
            raise InvariantError(f"swap ledger: {self.num_free_blocks} host blocks free, states {self.states}")
