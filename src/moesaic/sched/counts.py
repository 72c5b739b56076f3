"""What a scheduler has done so far."""

from dataclasses import dataclass, replace

from moesaic.sched.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCounts:
    """What the scheduler has done so far; all monotonic."""

    num_steps: int = 0
    num_progress_only_steps: int = 0
    num_rolled_back_steps: int = 0
    num_prefill_chunks: int = 0
    num_forced_prefills: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    """Committed tokens that preemption threw away."""
    num_prompt_tokens: int = 0
    """Prompt tokens computed, recomputed ones included."""
    num_shared_tokens: int = 0
    """Prompt tokens not computed because another choice of the prompt had their KV."""
    num_generation_tokens: int = 0

    def after_step(self, plan: StepPlan, *, num_forced_prefills: int, num_new_tokens: int) -> "SchedulerCounts":
        """Return the counts after a committed step that gave ``num_new_tokens`` to requests."""
        return replace(
            self,
            num_steps=self.num_steps + 1,
            num_progress_only_steps=self.num_progress_only_steps + plan.is_progress_only,
            num_prefill_chunks=self.num_prefill_chunks + len(plan.chunks),
            num_forced_prefills=self.num_forced_prefills + num_forced_prefills,
            num_prompt_tokens=self.num_prompt_tokens + sum(c.num_tokens for c in plan.chunks),
            num_generation_tokens=self.num_generation_tokens + num_new_tokens,
        )

    def after_forks(self, num_tokens: int) -> "SchedulerCounts":
        """Return the counts after siblings began with the KV of ``num_tokens`` prompt tokens of others."""
        return replace(self, num_shared_tokens=self.num_shared_tokens + num_tokens)

    def after_rollback(self) -> "SchedulerCounts":
        """Return the counts after a step that failed."""
        return replace(self, num_rolled_back_steps=self.num_rolled_back_steps + 1)

    def after_preemption(self, *, num_victims: int, num_lost_tokens: int) -> "SchedulerCounts":
        """Return the counts after ``num_victims`` gave their blocks back, and with them the KV of these tokens."""
        return replace(
            self,
            num_preemptions=self.num_preemptions + num_victims,
            num_recomputed_tokens=self.num_recomputed_tokens + num_lost_tokens,
        )
