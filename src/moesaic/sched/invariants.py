"""The rules every plan must obey, checked each step under ``MOESAIC_CHECK=1``: bugs surface where they happen."""

import os

from moesaic.errors import InvariantError
from moesaic.sched.plan import PrefillChunk, StepPlan
from moesaic.sched.policy import StepView
from moesaic.sequence import SeqId, Sequence

CHECK_VARIABLE = "MOESAIC_CHECK"


def checks_enabled() -> bool:
    """Return whether the environment asks for the checks."""
    return os.environ.get(CHECK_VARIABLE, "0") not in ("", "0")


def check_plan(
    view: StepView, plan: StepPlan, sequences: dict[SeqId, Sequence], *, max_rows: int, may_run_alone: bool
) -> None:
    """Return if ``plan`` obeys the rules for the state that ``view`` shows.

    Raises: ``InvariantError`` naming the rule.
    """
    _check_budget(view, plan, max_rows, may_run_alone)
    _check_decode_first(view, plan, may_run_alone)
    for chunk in plan.chunks:
        _check_chunk(chunk, sequences[chunk.seq_id])


def check_progress(view: StepView, plan: StepPlan, *, is_idle: bool) -> None:
    """Return unless work is feasible, nothing is in flight, and yet the plan is empty.

    Raises: ``InvariantError`` then.
    """
    has_work = bool(view.decode_rows or view.lanes or len(view.waiting))
    if is_idle and has_work and plan.num_tokens == 0:
        raise InvariantError(
            f"nothing scheduled with {len(view.decode_rows)} decoding, {len(view.lanes)} part-way, "
            f"{len(view.waiting)} waiting and {view.num_free_blocks} KV blocks free"
        )


def check_waits(view: StepView, threshold_steps: int) -> None:
    """Return if nobody who could run was passed over for more than ``threshold_steps`` steps.

    Raises: ``InvariantError`` naming the member.
    """
    for member, wait in view.rotation.wait_steps.items():
        if wait > threshold_steps:
            raise InvariantError(f"prefill {member} waited {wait} steps, more than {threshold_steps}")


def _check_budget(view: StepView, plan: StepPlan, max_rows: int, may_run_alone: bool) -> None:
    is_alone = may_run_alone and plan.num_rows == 1
    if plan.num_tokens > view.max_tokens and not is_alone:
        raise InvariantError(f"step has {plan.num_tokens} tokens, more than {view.max_tokens}")
    if plan.num_rows > max_rows:
        raise InvariantError(f"step has {plan.num_rows} rows, more than {max_rows}")
    if len({r.seq_id for r in plan.rows}) != plan.num_rows:
        raise InvariantError("a sequence has two rows in one step")


def _check_decode_first(view: StepView, plan: StepPlan, may_run_alone: bool) -> None:
    """A decode row may be missing only for want of a block, or in an own step of a whole prompt."""
    missing = set(view.decode_rows) - set(plan.decode_rows)
    is_own_step = may_run_alone and not plan.decode_rows and plan.chunks and view.num_decode_gap_steps == 0
    if not missing or is_own_step:
        return
    num_needy = len(view.decode_needs_block) + sum(lane.num_spare == 0 for lane in view.lanes)
    if num_needy <= view.num_free_blocks or any(r.seq_id not in view.decode_needs_block for r in missing):
        raise InvariantError(f"feasible decode rows {sorted(missing)} are missing from the step")


def _check_chunk(chunk: PrefillChunk, seq: Sequence) -> None:
    end = chunk.start + chunk.num_tokens
    if chunk.start != seq.committed_kv_tokens or end > seq.prefill_target:
        raise InvariantError(f"chunk [{chunk.start}, {end}) does not continue sequence {seq.seq_id}")
    if chunk.is_terminal != (end == seq.prefill_target):
        raise InvariantError(f"chunk [{chunk.start}, {end}) of sequence {seq.seq_id} has the wrong terminal flag")
