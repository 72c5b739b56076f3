"""A scheduler that writes down what it is told and what it decides."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

from moesaic.request import Request, StepOutput, TokenLogprobs
from moesaic.sched.decisions import DecisionLog
from moesaic.sched.scheduler import PreemptionKind, Scheduler
from moesaic.sched.swap import SwapTransfer
from moesaic.sched.transaction import StepTransaction
from moesaic.sequence import SeqId, Sequence

_PREEMPTION_VERBS: dict[PreemptionKind, str] = {"recompute": "preempt", "swap": "swap_out"}


class RecordingScheduler(Scheduler):
    """A ``Scheduler`` with a log; each call is written once it has taken effect, so one that raised is not."""

    def __init__(self, log: DecisionLog, clock: Callable[[], float], **settings: Any) -> None:
        """``settings`` are the scheduler's own (Any: of several types)."""
        super().__init__(**settings)
        self.log = log
        self._clock = clock
        self._planned: dict[int, tuple[float, float]] = {}
        """When the planning of each step in flight began and ended."""

    def add(self, request: Request) -> Sequence:
        seq = super().add(request)
        leader = self._leader_of(seq)
        self.log.add(seq, None if leader is None else leader.seq_id)
        return seq

    def abort(self, request_id: str) -> bool:
        return self._command("abort", request_id, super().abort)

    def fail(self, request_id: str, error: str) -> bool:
        fail = super().fail
        return self._command("fail", request_id, lambda name: fail(name, error))

    def preempt(self, request_id: str, by: PreemptionKind = "recompute") -> bool:
        preempt = super().preempt
        return self._command(_PREEMPTION_VERBS[by], request_id, lambda name: preempt(name, by))

    def pause(self, request_id: str) -> bool:
        return self._command("pause", request_id, super().pause)

    def resume(self, request_id: str) -> bool:
        return self._command("resume", request_id, super().resume)

    def _command(self, verb: str, request_id: str, act: Callable[[str], bool]) -> bool:
        seq = self.get(request_id)
        took_effect = act(request_id)
        if seq is not None and took_effect:
            self.log.command(verb, seq.seq_id)
        return took_effect

    def step(self) -> StepTransaction:
        start_s = self._clock()
        tx = super().step()
        self._planned[tx.step_id] = start_s, self._clock()
        self.log.step(tx.step_id, tx.max_tokens, tx.plan)
        return tx

    def advance(self, tx: StepTransaction) -> bool:
        has_advanced = super().advance(tx)
        if has_advanced:
            self.log.advance(tx.step_id)
        return has_advanced

    def commit(
        self,
        tx: StepTransaction,
        token_ids: SequenceOf[int],
        logprobs: SequenceOf[TokenLogprobs | None] | None,
    ) -> list[StepOutput]:
        launched_s = self._clock()
        outputs = super().commit(tx, token_ids, logprobs)
        self.log.commit(tx.step_id, finished_rows(tx, outputs))
        start_s, planned_s = self._planned.pop(tx.step_id)
        self.log.times(tx.step_id, start_s, (planned_s - start_s, launched_s - planned_s, self._clock() - launched_s))
        return outputs

    def rollback(self, tx: StepTransaction) -> None:
        was_open = tx.is_open
        super().rollback(tx)
        if was_open:
            del self._planned[tx.step_id]
            self.log.rollback(tx.step_id, is_failure=bool(tx.sequences))

    def begin_swap_ins(self) -> None:
        resting = [seq.seq_id for seq in self.swap.resting()]
        super().begin_swap_ins()
        if resting:
            self.log.swap_in(i for i in resting if self.swap.states[i] == "in")

    def take_swap_transfers(self) -> list[SwapTransfer]:
        transfers = super().take_swap_transfers()
        if transfers:
            self.log.swap_begin(transfers)
        return transfers

    def end_swap(self, transfer: SwapTransfer) -> None:
        super().end_swap(transfer)
        self.log.swap_over(transfer, is_failure=False)

    def fail_swap(self, transfer: SwapTransfer) -> None:
        super().fail_swap(transfer)
        self.log.swap_over(transfer, is_failure=True)


def finished_rows(tx: StepTransaction, outputs: list[StepOutput]) -> list[tuple[SeqId, str]]:
    """Return the sequences that ended with the step, in row order, and why."""
    reasons = {o.request_id: o.finish_reason for o in outputs if o.finish_reason is not None}
    if not reasons:
        return []
    return [(i, reasons[name]) for i, s in tx.sequences.items() if (name := s.request.request_id) in reasons]
