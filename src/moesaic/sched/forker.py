"""Lets siblings begin with the KV of a donor's prompt; who and when is planned in ``siblings``."""

from moesaic.kv.table import PagedKVCache
from moesaic.sched.running import RunningSet
from moesaic.sched.siblings import Fork, ForkRoom, SiblingGroups, plan_forks
from moesaic.sched.swap import SwapLedger
from moesaic.sequence import Sequence


class Forker:
    """Moves held siblings to the running set, with references to the donor's blocks, within one commit.

    No block is taken, so nothing can be missing; what ``begin`` did is undone with the commit or settled with it.
    """

    def __init__(self, siblings: SiblingGroups, kv: PagedKVCache, running: RunningSet, swap: SwapLedger) -> None:
        self._siblings = siblings
        self._kv = kv
        self._running = running
        self._swap = swap

    def begin(self, room: ForkRoom, forks: list[Fork]) -> None:
        """Let siblings begin while there is room, and add each to ``forks`` before it does."""
        for fork in plan_forks(self._siblings, room, self._has_head):
            forks.append(fork)
            self._kv.fork_sequence(fork.donor, fork.sibling, fork.num_blocks)
            self._kv.commit_sequence_reservation(fork.sibling)
            fork.sibling.advance_prefill(fork.num_blocks * self._kv.block_size)
            self._running.begin(fork.sibling)

    def _has_head(self, seq: Sequence, num_blocks: int) -> bool:
        """Return whether so many blocks of ``seq`` hold KV that is committed, here and not in host memory."""
        is_committed = seq.committed_kv_tokens >= num_blocks * self._kv.block_size
        return is_committed and seq.seq_id not in self._swap.states

    def undo(self, forks: list[Fork]) -> None:
        """Give the references back; the running set is reset by its own mark."""
        for fork in forks:
            self._kv.reopen_sequence_reservation(fork.sibling, 0)
            self._kv.rollback_sequence_reservation(fork.sibling)
            fork.sibling.unfork()

    def settle(self, forks: list[Fork]) -> int:
        """Make those who began donors themselves; return the prompt tokens that were not computed again."""
        for fork in forks:
            self._siblings.fork(fork.sibling)
        return sum(fork.num_blocks for fork in forks) * self._kv.block_size
