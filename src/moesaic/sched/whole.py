"""The default policy: prompts run whole, in the order of arrival, beside the decode rows."""

from collections.abc import Iterator

from moesaic.kv.geometry import blocks_for_tokens
from moesaic.sched.plan import PrefillChunk
from moesaic.sched.policy import PrefillCandidate, Proposal, StepView, grant_blocks
from moesaic.sched.queues import ARRIVALS, Service


class WholePrefill:
    """Classic scheduling: each prompt is computed in one step.

    A prompt that does not fit beside the decode rows gets a step of its own (with other prompts if they fit,
    alone if it is longer than a step), at most every other step while something decodes. So it never blocks the
    queue behind it, and it stalls the running streams for one step: what chunked prefill is there to avoid.
    When the oldest lacks KV blocks, younger prompts may pass it for ``starvation_threshold_steps`` steps.
    """

    name = "whole"
    short_prompt_tokens = 0
    may_run_alone = True
    bounds_waits = False

    def __init__(self, *, starvation_threshold_steps: int) -> None:
        self.starvation_threshold_steps = starvation_threshold_steps

    def propose(self, view: StepView) -> Proposal:
        """Return the decode rows and as many whole prompts as fit, or a step for one long prompt."""
        grants = grant_blocks(view)
        admission = _Admission(view, grants.num_free_blocks)
        is_own_step = self._needs_own_step(view, admission)
        decode_rows = () if is_own_step else grants.decode_rows
        chunks = tuple(self._admit(view, admission, view.max_tokens - len(decode_rows)))
        return Proposal(decode_rows=decode_rows, chunks=chunks, services=self._services(view, chunks))

    @staticmethod
    def _needs_own_step(view: StepView, admission: "_Admission") -> bool:
        head = next(iter(view.waiting), None)
        if head is None or not view.decode_rows or view.num_decode_gap_steps:
            return False
        fits_beside_decode = head.num_prefill_tokens_left <= view.max_tokens - len(view.decode_rows)
        return not fits_beside_decode and admission.has_room_for(head)

    def _admit(self, view: StepView, admission: "_Admission", budget: int) -> Iterator[PrefillChunk]:
        may_pass = view.rotation.wait_steps.get(ARRIVALS, 0) < self.starvation_threshold_steps
        is_own_step = budget == view.max_tokens
        for candidate in view.waiting:
            if admission.num_free_rows == 0 or budget <= 0:
                return
            length = candidate.num_prefill_tokens_left
            is_alone = is_own_step and budget == view.max_tokens
            if (length <= budget or is_alone) and admission.take(candidate):
                budget -= length
                yield PrefillChunk(seq_id=candidate.seq_id, start=0, num_tokens=length, is_terminal=True)
            elif not may_pass:
                return

    @staticmethod
    def _services(view: StepView, chunks: tuple[PrefillChunk, ...]) -> tuple[Service, ...]:
        """Count a wait of the oldest prompt only while younger ones pass it."""
        head = next(iter(view.waiting), None)
        if head is None or not chunks:
            return ()
        num_tokens = next((c.num_tokens for c in chunks if c.seq_id == head.seq_id), 0)
        return (Service(ARRIVALS, num_tokens, 0),)


class _Admission:
    """Rows and blocks still to be had in this step."""

    def __init__(self, view: StepView, num_free_blocks: int) -> None:
        self.num_free_rows = view.num_free_rows
        self._num_free_blocks = num_free_blocks
        self._headroom = view.num_headroom_blocks
        self._block_size = view.block_size

    def has_room_for(self, candidate: PrefillCandidate) -> bool:
        needed = blocks_for_tokens(candidate.num_prefill_tokens_left, self._block_size)
        return self.num_free_rows > 0 and needed <= self._num_free_blocks - self._headroom

    def take(self, candidate: PrefillCandidate) -> bool:
        """Take a row and the blocks of the whole prompt; False, and nothing taken, if there are too few."""
        if not self.has_room_for(candidate):
            return False
        self.num_free_rows -= 1
        self._num_free_blocks -= blocks_for_tokens(candidate.num_prefill_tokens_left, self._block_size)
        return True
