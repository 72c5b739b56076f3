"""One step's leases: kept by ``commit``, given back by leaving the block without it."""

from collections.abc import Sequence as SequenceOf
from types import TracebackType
from typing import TYPE_CHECKING

from moesaic.errors import InvariantError
from moesaic.kv.table import PagedKVCache
from moesaic.request import StepOutput, TokenLogprobs
from moesaic.sched.blocked import BlockedBy
from moesaic.sched.plan import StepPlan
from moesaic.sched.policy import Proposal
from moesaic.sequence import SeqId, Sequence

if TYPE_CHECKING:
    from moesaic.sched.scheduler import Scheduler


class StepTransaction:
    """The plan of one step and the leases of its rows, in flight until commit or rollback (both idempotent)."""

    def __init__(
        self,
        scheduler: "Scheduler",
        step_id: int,
        proposal: Proposal,
        sequences: dict[SeqId, Sequence],
        max_tokens: int,
    ) -> None:
        self.step_id = step_id
        self.max_tokens = max_tokens
        """Query tokens that the plan could have."""
        self.plan = StepPlan(decode_rows=proposal.decode_rows, chunks=proposal.chunks)
        self.proposal = proposal
        self.sequences = sequences
        """The sequences of the rows, in row order."""
        self.blocked_by: BlockedBy | None = None
        """Why the first waiting prompt is not in the plan; for statistics."""
        self.is_open = True
        self._scheduler = scheduler
        self._leases: list[tuple[Sequence, int]] = []
        """Rows that took blocks, with how many each held before; see ``_live_leases``."""

    def lease(self, kv: PagedKVCache, seq_id: SeqId, num_tokens: int) -> None:
        """Reserve blocks so that the row's sequence can hold ``num_tokens`` tokens in all."""
        seq, num_blocks = self.sequences[seq_id], kv.num_blocks(seq_id)
        kv.ensure_sequence_capacity(seq, num_tokens)
        self._leases.append((seq, num_blocks))

    def _live_leases(self) -> list[tuple[Sequence, int]]:
        """Return the leases of rows that still belong to the step: others lost theirs, and may have one elsewhere."""
        return [lease for lease in self._leases if self._scheduler.is_live(self, lease[0])]

    def keep_leases(self, kv: PagedKVCache) -> None:
        """Make the leased blocks their sequences' own."""
        for seq, _ in self._live_leases():
            kv.commit_sequence_reservation(seq)

    def reopen_leases(self, kv: PagedKVCache) -> None:
        """Undo ``keep_leases``."""
        for seq, num_blocks in self._live_leases():
            kv.reopen_sequence_reservation(seq, num_blocks)

    def return_leases(self, kv: PagedKVCache) -> None:
        """Give the leased blocks back, last taken first, so that the pool is exactly as before."""
        for seq, _ in reversed(self._live_leases()):
            kv.rollback_sequence_reservation(seq)

    def commit(
        self,
        token_ids: SequenceOf[int],
        logprobs: SequenceOf[TokenLogprobs | None] | None = None,
    ) -> list[StepOutput]:
        """Move progress: keep the leases, advance every row, add one token per sampling row.

        ``token_ids`` and ``logprobs`` follow ``plan.sampling_row_ids``. Returns what each request got; rows of
        requests aborted meanwhile give nothing. A second call returns an empty list.
        Raises: ``InvariantError`` if the counts do not match or the step was rolled back; nothing has moved then.
        """
        if not self.is_open:
            if self._scheduler.was_rolled_back(self.step_id):
                raise InvariantError(f"step {self.step_id} was rolled back and cannot be committed")
            return []
        return self._scheduler.commit(self, token_ids, logprobs)

    @property
    def has_rows(self) -> bool:
        """False once every row has ended or lost its KV: nothing can come of the step."""
        return any(self._scheduler.is_live(self, seq) for seq in self.sequences.values())

    @property
    def is_advanced(self) -> bool:
        """True between ``advance`` and ``commit`` or ``rollback``."""
        return self._scheduler.is_advanced(self)

    def advance(self) -> bool:
        """Move progress before the tokens are known, so that the next step can be planned while this one runs.

        Every sampling row ends with a placeholder, which ``commit`` fills; until then no other step can be committed
        and no sequence swapped in. A step planned meanwhile reads the placeholders' tokens from where they are
        sampled. Returns False, and nothing changes, if the commit may have to preempt.
        Raises: ``InvariantError`` if the step is over or another has advanced.
        """
        return self._scheduler.advance(self)

    def rollback(self) -> None:
        """Give every lease back; state is exactly as before the step. After commit or rollback a no-op."""
        if self.is_open:
            self._scheduler.rollback(self)

    def __enter__(self) -> "StepTransaction":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.rollback()
