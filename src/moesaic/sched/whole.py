"""The default policy: prompts run whole, in the order of arrival, beside the decode rows."""

from collections.abc import Iterator

from moesaic.kv.geometry import blocks_for_tokens
from moesaic.sched.plan import PrefillChunk
from moesaic.sched.policy import LaneView, PrefillCandidate, Proposal, StepView, grant_blocks
from moesaic.sched.queues import ARRIVALS, Service


class WholePrefill:
    """Classic scheduling: each prompt is computed in one step.

    A prompt that does not fit beside the decode rows gets a step of its own (with other prompts if they fit,
    alone if it is longer than a step), at most every other step while something decodes. So it never blocks the
    queue behind it, and it stalls the running streams for one step: what chunked prefill is there to avoid.
    When the oldest lacks KV blocks, younger prompts may pass it for ``starvation_threshold_steps`` steps.
    Only prompts that share their head with another are ever part-way: their last tokens go before all arrivals.
    """

    name = "whole"
    short_prompt_tokens = 0
    may_run_alone = True
    max_lanes = 1
    bounds_waits = False

    def __init__(self, *, starvation_threshold_steps: int) -> None:
        self.starvation_threshold_steps = starvation_threshold_steps

    def propose(self, view: StepView) -> Proposal:
        """Return the decode rows and as many whole prompts as fit, or a step for one long prompt."""
        grants = grant_blocks(view)
        admission = _Admission(view, grants.num_free_blocks)
        lanes = [lane for lane in view.lanes if lane.seq_id in grants.lanes]
        is_own_step = self._needs_own_step(view, admission, lanes)
        decode_rows = () if is_own_step else grants.decode_rows
        budget = view.max_tokens - len(decode_rows)
        tails = self._finish(lanes, budget, is_own_step=budget == view.max_tokens)
        budget -= sum(c.num_tokens for c in tails)
        chunks = (*tails, *self._admit(view, admission, budget))
        return Proposal(decode_rows=decode_rows, chunks=chunks, services=self._services(view, chunks))

    @staticmethod
    def _needs_own_step(view: StepView, admission: "_Admission", lanes: list[LaneView]) -> bool:
        if not view.decode_rows or view.num_decode_gap_steps:
            return False
        budget = view.max_tokens - len(view.decode_rows)
        if lanes:
            return lanes[0].num_left > budget
        head = next(iter(view.waiting), None)
        return head is not None and head.num_prefill_tokens_left > budget and admission.has_room_for(head)

    @staticmethod
    def _finish(lanes: list[LaneView], budget: int, *, is_own_step: bool) -> list[PrefillChunk]:
        """Return the last chunks of the lanes that fit, or of one alone."""
        chunks: list[PrefillChunk] = []
        for lane in lanes:
            if lane.num_left <= budget or (is_own_step and not chunks):
                budget -= lane.num_left
                chunks.append(
                    PrefillChunk(seq_id=lane.seq_id, start=lane.start, num_tokens=lane.num_left, is_terminal=True)
                )
        return chunks

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
