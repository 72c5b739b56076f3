"""Steps whose time follows a law that the test knows."""

from collections.abc import Callable
from dataclasses import dataclass

from moesaic.engine.stall_bound import DecodeStallBound
from moesaic.engine.step_time import StepCosts, StepSizes
from moesaic.request import StepOutput
from moesaic.sched.plan import StepPlan
from moesaic.sched.scheduler import Scheduler
from moesaic.testing.scheduling import FakeRunner, ManualClock, run_step

StepTimeLaw = Callable[[StepSizes], float]
"""Seconds of a step of these sizes."""

GPU_LIKE = StepCosts(
    step_s=0.015, decode_row_s=1e-5, decode_kv_token_s=2e-8, chunk_token_s=1.2e-5, chunk_pair_s=1.5e-9
).seconds
"""The order of a 30B mixture on one large GPU: some 16 ms with 32 rows, 8 and 12 ms more with 512 tokens on 16k."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One step, the limit it was planned under, and how long it took."""

    plan: StepPlan
    chunk_limit: int | None
    seconds: float


class TimedEngine:
    """A scheduler whose steps take what ``law`` says, under a decode stall bound as ``EngineCore`` applies it."""

    def __init__(self, scheduler: Scheduler, bound: DecodeStallBound, law: StepTimeLaw) -> None:
        self.scheduler = scheduler
        self.bound = bound
        self.law = law
        self.clock = ManualClock()
        self.steps: list[TimedStep] = []
        self._runner = FakeRunner()

    def step(self) -> list[StepOutput]:
        """Run one step; the clock moves, and the bound is told."""
        self.bound.limit(self.scheduler)
        outputs = run_step(self.scheduler, self._runner)
        sizes = StepSizes.of(plan := self._runner.plans[-1])
        self.clock.advance(seconds := self.law(sizes))
        self.bound.observe(sizes, seconds)
        limit = self.scheduler.max_tokens_beside_decode
        self.steps.append(TimedStep(plan=plan, chunk_limit=limit, seconds=seconds))
        return outputs

    def mixed(self, since: int = 0) -> list[TimedStep]:
        """Return the steps with decode rows and chunks, from the ``since``-th of them on."""
        return [s for s in self.steps if s.plan.decode_rows and s.plan.chunks][since:]
