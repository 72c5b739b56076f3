"""Steps that fail: who is told, what goes on, and when the engine gives up."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from moesaic.engine.chunk_budget import ChunkBudget
from moesaic.engine.core import EngineCore
from moesaic.engine.prompt_logprobs import PromptScoringError
from moesaic.errors import SamplingError
from moesaic.request import StepOutput
from moesaic.sched.transaction import StepTransaction
from moesaic.sequence import SeqId, SequenceStatus

logger = logging.getLogger(__name__)

_NOTHING_LEFT = (
    "the request's own parameters (min_tokens, stop_token_ids, penalties, grammar) leave no token; relax them"
)
_BROKEN_LOGITS = "the model gave NaN or infinite logits for this request, so no token can be chosen"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """What follows from a failed step."""

    failures: dict[str, str]
    """Who is to fail, and what each is told."""
    is_counted: bool
    """Whether the step speaks against the engine."""
    is_about_logits: bool = False
    """Whether only a step that gives a token can say otherwise: one that computes prompts alone looks at no logits."""


class StepSupervisor:
    """Steps a core so that a failed step ends only the requests that were in it; see ``docs/faults.md``.

    One supervisor per core: it owns the core's ``max_tokens_per_step`` and, when too many steps in a row fail, shuts
    the core. ``KeyboardInterrupt`` and ``SystemExit`` go through.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._budget = ChunkBudget(core.config)
        self._num_in_a_row = 0
        self._num_without_logits_in_a_row = 0
        self._num_failed_steps = 0
        self._num_failed_requests = 0
        self._num_out_of_memory_steps = 0
        self._last_error: str | None = None

    @property
    def is_healthy(self) -> bool:
        """False once the engine has given up."""
        return self._core.death_cause is None

    def step(self) -> list[StepOutput]:
        """Run one step and return what each request got; of a failed one, the last events of those it failed.

        A request gets exactly one last event. Requests that are not to blame run on with the next call.
        Raises: ``EngineDeadError`` in the calls after the one that gave up.
        """
        self._core.check_alive()
        scheduler = self._core.scheduler
        scheduler.max_tokens_per_step = self._budget.step_limit(self._num_decoding())
        num_steps = scheduler.counts.num_steps
        try:
            outputs = self._core.step()
        except Exception as error:
            step = self._core.take_failed_step()
            verdict = self._judge(error, step)
            logger.exception("step failed: %s", self._summary(step, verdict))
            return self._carry_out(verdict, error)
        if scheduler.counts.num_steps > num_steps:  # a step without rows proves nothing
            self._num_in_a_row = 0
            if any(output.new_token_ids for output in outputs):
                self._num_without_logits_in_a_row = 0
            self._budget.grow()
        return outputs

    def stats(self) -> dict[str, Any]:
        """Return the core's stats and the supervisor's own (Any: JSON values)."""
        return {
            **self._core.stats(),
            "num_failed_steps": self._num_failed_steps,
            "num_failed_requests": self._num_failed_requests,
            "num_out_of_memory_steps": self._num_out_of_memory_steps,
            "chunk_budget_tokens": self._budget.tokens,
            "is_healthy": self.is_healthy,
            "last_error": self._last_error,
        }

    def _num_decoding(self) -> int:
        """Return how many decode rows the next step can have; swapped sequences may come back in time for it."""
        scheduler = self._core.scheduler
        num_swapped = sum(s.status is SequenceStatus.SWAPPED for s in scheduler.sequences)
        return len(scheduler.running.decoding) + num_swapped

    def _summary(self, step: StepTransaction | None, verdict: _Verdict) -> str:
        size = "unplanned" if step is None else f"rows={step.plan.num_rows} tokens={step.plan.num_tokens}"
        return f"{size} failed_requests={len(verdict.failures)} chunk_budget_tokens={self._budget.tokens}"

    def _carry_out(self, verdict: _Verdict, error: Exception) -> list[StepOutput]:
        self._num_failed_steps += 1
        self._num_in_a_row += verdict.is_counted
        self._num_without_logits_in_a_row += verdict.is_counted and verdict.is_about_logits
        self._last_error = type(error).__name__
        # Rows still in flight after a rollback: it failed too, and what it left cannot be trusted.
        is_broken = bool(self._core.scheduler.in_flight)
        events = self._fail(verdict.failures)
        num_in_a_row = max(self._num_in_a_row, self._num_without_logits_in_a_row)
        if num_in_a_row >= self._core.config.max_consecutive_failed_steps or is_broken:
            events += self._give_up(error)
        return events

    def _judge(self, error: Exception, step: StepTransaction | None) -> _Verdict:
        # After a commit the rows' outputs are lost, and after half a rollback their state: none of them can go on.
        is_undone = step is None or self._core.scheduler.was_rolled_back(step.step_id)
        is_out_of_memory = isinstance(error, torch.OutOfMemoryError)
        self._num_out_of_memory_steps += is_out_of_memory
        if is_out_of_memory and is_undone:
            return self._judge_out_of_memory(step)
        if step is None:
            return _Verdict(failures={}, is_counted=True)
        if isinstance(error, SamplingError) and error.rows and is_undone:
            return _judge_logits(error, step)
        message = f"the engine failed in a step of this request ({type(error).__name__}); its log has the cause"
        return _Verdict(failures=dict.fromkeys(_request_ids(step), message), is_counted=True)

    def _judge_out_of_memory(self, step: StepTransaction | None) -> _Verdict:
        """Make the next step smaller; where that is impossible, fail the later half of the rows (at least one)."""
        num_chunk_tokens = 0 if step is None else sum(c.num_tokens for c in step.plan.chunks)
        is_one_prompt = step is not None and not step.plan.decode_rows and len(step.plan.chunks) == 1
        can_shrink = self._core.config.enable_chunked_prefill or not is_one_prompt
        if can_shrink and self._budget.shrink(num_chunk_tokens):
            return _Verdict(failures={}, is_counted=False)
        if step is None:
            return _Verdict(failures={}, is_counted=True)
        by_rank = sorted(step.sequences.values(), key=lambda s: s.rank)
        later = [s.request.request_id for s in by_rank[len(by_rank) // 2 :]]
        remedy = "try again later, or send a shorter prompt"
        message = f"the device ran out of memory in the smallest step that could hold this request; {remedy}"
        return _Verdict(failures=dict.fromkeys(later, message), is_counted=True)

    def _fail(self, failures: dict[str, str]) -> list[StepOutput]:
        """End these requests and return every last event that is untold."""
        for request_id, message in failures.items():
            self._core.fail_request(request_id, message)
        self._num_failed_requests += len(failures)
        events = self._core.scheduler.take_events()
        told = {event.request_id for event in events}
        # A request that its step finished before it failed is unknown by now, and its output was lost.
        lost = [StepOutput(i, (), "error", error=m) for i, m in failures.items() if i not in told]
        return events + lost

    def _give_up(self, cause: Exception) -> list[StepOutput]:
        """Shut the core; return the last events of all its requests."""
        ids = [s.request.request_id for s in self._core.scheduler.sequences]
        logger.critical(
            "engine gives up: failed_steps_in_a_row=%d error=%s failed_requests=%d",
            max(self._num_in_a_row, self._num_without_logits_in_a_row),
            type(cause).__name__,
            len(ids),
        )
        self._core.shut(cause)
        return self._fail(dict.fromkeys(ids, f"the engine has stopped ({type(cause).__name__}); its log has the cause"))


def _judge_logits(error: SamplingError, step: StepTransaction) -> _Verdict:
    """Blame the rows that the error names.

    Not held against the engine where other rows go on, nor where a request's own parameters are the cause: clients
    must not be able to stop it.
    """
    if isinstance(error, PromptScoringError):
        failures = {error.request_id: _BROKEN_LOGITS}
    else:
        blamed = _request_ids(step, (step.plan.sampling_row_ids[i] for i in error.rows))
        messages = (_NOTHING_LEFT if i in error.own_fault_rows else _BROKEN_LOGITS for i in error.rows)
        failures = dict(zip(blamed, messages, strict=True))
    # Rows that do not sample say nothing of logits.
    is_alone = len(failures) >= len(step.plan.sampling_row_ids)
    is_counted = is_alone and _BROKEN_LOGITS in failures.values()
    return _Verdict(failures=failures, is_counted=is_counted, is_about_logits=True)


def _request_ids(step: StepTransaction, seq_ids: Iterable[SeqId] | None = None) -> list[str]:
    ids = step.sequences if seq_ids is None else seq_ids
    return [step.sequences[i].request.request_id for i in ids]
