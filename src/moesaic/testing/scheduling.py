"""Factories for scheduling tests: defaults carry whatever the test is not about."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from moesaic.config import EngineConfig, SchedulingPolicy
from moesaic.request import Request, SamplingParams, StepOutput
from moesaic.sched.factory import make_scheduler
from moesaic.sched.plan import StepPlan
from moesaic.sched.scheduler import Scheduler
from moesaic.sequence import SeqId, Sequence


class ManualClock:
    """A monotonic clock in seconds that only moves when told."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self.now_s += seconds


def create_request(
    request_id: str = "r0",
    num_prompt_tokens: int = 4,
    max_tokens: int = 4,
    *,
    priority: int = 0,
    sibling_of: str | None = None,
    **params: object,
) -> Request:
    """Return a greedy request with a prompt of ``num_prompt_tokens`` token ids, the same for ids of one length."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, **params)  # type: ignore[arg-type]  # test input
    tokens = tuple((7 * i + len(request_id)) % 50 for i in range(num_prompt_tokens))
    return Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=sampling,
        priority=priority,
        sibling_of=sibling_of,
    )


def create_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    chunked: bool = True,
    chunk_size: int = 8,
    max_tokens_per_step: int = 32,
    max_batch_size: int = 8,
    threshold: int = 8,
    max_partial_prefills: int = 4,
    max_model_len: int = 10_000,
    eos_token_ids: tuple[int, ...] = (),
    scheduling_policy: SchedulingPolicy = "fcfs",
    aging_steps: int = 128,
    max_waiting_requests: int | None = None,
    num_swap_blocks: int = 0,
) -> Scheduler:
    """Return the engine's own scheduler over its own pool."""
    config = EngineConfig(
        enable_chunked_prefill=chunked,
        prefill_chunk_size=chunk_size,
        prefill_starvation_threshold_steps=threshold,
        max_partial_prefills=max_partial_prefills,
        max_tokens_per_step=max_tokens_per_step,
        max_batch_size=max_batch_size,
        block_size=block_size,
        scheduling_policy=scheduling_policy,
        priority_aging_steps=aging_steps,
        max_waiting_requests=max_waiting_requests,
    )
    return make_scheduler(
        config,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        num_swap_blocks=num_swap_blocks,
    )


def create_sequences(count: int, num_prompt_tokens: int = 4, max_tokens: int = 4) -> list[Sequence]:
    """Return ``count`` waiting sequences with ids ``0 .. count - 1``."""
    return [
        Sequence(SeqId(i), create_request(f"r{i}", num_prompt_tokens, max_tokens), max_tokens=max_tokens)
        for i in range(count)
    ]


class FakeRunner:
    """Runs plans without a model: each sampling row yields a token that only depends on sequence and position."""

    def __init__(self, vocab_size: int = 1000) -> None:
        self.vocab_size = vocab_size
        self.plans: list[StepPlan] = []

    def token(self, seq: Sequence) -> int:
        """Return the token that follows all tokens of ``seq`` known so far."""
        return (31 * seq.seq_id + 17 * seq.num_tokens) % self.vocab_size

    def run(self, plan: StepPlan, sequences: dict[SeqId, Sequence]) -> list[int]:
        """Return one token per sampling row and remember the plan."""
        self.plans.append(plan)
        return [self.token(sequences[i]) for i in plan.sampling_row_ids]


def run_step(scheduler: Scheduler, runner: FakeRunner) -> list[StepOutput]:
    """Run one whole step and return its outputs, aborts included; swap copies are made at once."""
    scheduler.begin_swap_ins()
    for transfer in scheduler.take_swap_transfers():
        scheduler.end_swap(transfer)
    with scheduler.step() as tx:
        outputs = tx.commit(runner.run(tx.plan, tx.sequences))
    return scheduler.take_events() + outputs


def run_until_idle(
    scheduler: Scheduler,
    runner: FakeRunner,
    *,
    max_steps: int = 10_000,
    before_step: Callable[[int], None] = lambda step: None,
) -> dict[str, list[int]]:
    """Step until nothing is left; return the tokens of each request.

    Raises: ``AssertionError`` if ``max_steps`` are not enough.
    """
    tokens: dict[str, list[int]] = {}
    for step in range(max_steps):
        before_step(step)
        if not scheduler.has_unfinished:
            return tokens
        for output in run_step(scheduler, runner):
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    raise AssertionError(f"not idle after {max_steps} steps: {scheduler.sequences}")


def chunk_lengths(plans: SequenceOf[StepPlan], seq_id: int) -> list[int]:
    """Return the chunk lengths that one sequence got, in order."""
    return [c.num_tokens for p in plans for c in p.chunks if c.seq_id == seq_id]
