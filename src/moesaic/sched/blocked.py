"""Why the first waiting prompt did not start in a step."""

from typing import Literal, get_args

from moesaic.kv.geometry import blocks_for_tokens
from moesaic.sched.policy import PrefillCandidate, Proposal, StepView, extra_blocks

BlockedBy = Literal["rows", "kv_blocks", "tokens"]
"""What was missing: a place among ``max_batch_size``, free KV blocks, or tokens of the step (or a prefill lane)."""

BLOCKED_BY: tuple[BlockedBy, ...] = get_args(BlockedBy)


def blocked_by(view: StepView, proposal: Proposal, *, is_chunked: bool) -> BlockedBy | None:
    """Return what the first prompt lacks that waits and is not in the proposal; None if none waits."""
    chunked = {chunk.seq_id for chunk in proposal.chunks}
    head = next((c for c in view.waiting if c.seq_id not in chunked), None)
    if head is None:
        return None
    lanes = {lane.seq_id: lane.num_spare for lane in view.lanes}
    if view.num_free_rows <= sum(seq_id not in lanes for seq_id in chunked):
        return "rows"
    decode = sum(row.seq_id in view.decode_needs_block for row in proposal.decode_rows)
    prefill = sum(extra_blocks(c.num_tokens, lanes.get(c.seq_id, 0), view.block_size) for c in proposal.chunks)
    num_spare = view.num_free_blocks - view.num_headroom_blocks - decode - prefill
    return "kv_blocks" if _num_needed(head, view, is_chunked) > num_spare else "tokens"


def _num_needed(head: PrefillCandidate, view: StepView, is_chunked: bool) -> int:
    """Return the free blocks without which the policies do not start ``head``."""
    starts_small = is_chunked and not head.was_preempted
    return 1 if starts_small else blocks_for_tokens(head.num_prefill_tokens_left, view.block_size)
