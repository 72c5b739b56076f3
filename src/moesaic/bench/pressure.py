"""What a small KV pool costs: tokens computed again, for each choice of victims and for swap, in simulated time.

No model runs: the real scheduler serves conversation-like requests, and the clock moves by a model of the step time.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from moesaic.bench.report import Report
from moesaic.config import EngineConfig
from moesaic.kv.geometry import blocks_needed
from moesaic.request import Request, SamplingParams
from moesaic.sched.factory import make_scheduler
from moesaic.sched.preempt import VictimOrder, cheapest_last, youngest_last
from moesaic.sched.scheduler import Scheduler

Progress = Callable[[str, float], None]

PROMPT_TOKENS = (1020, 2735, 14050)
OUTPUT_TOKENS = (129, 424, 1000)
"""Median, 90th percentile and maximum of lengths in the Azure conversation trace of 2023 (CC BY 4.0; Patel et al.,
"Splitwise", ISCA 2024); lengths are drawn from the lognormal through the first two, cut at the third."""

STEP_BASE_S = 0.012
STEP_TOKEN_S = 0.00003
"""Simulated seconds of a step and of each of its query tokens: the order of a 30B mixture on one large GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureSettings:
    """Simulated traffic against a pool of ``pool_factor`` times the largest request."""

    hours: float = 1.0
    requests_per_s: float = 1.2
    pool_factor: float = 1.2
    block_size: int = 16
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureResult:
    """Counts of one arm. Every request that came also ended, and every block came back."""

    arm: str
    num_requests: int
    num_steps: int
    num_preemptions: int
    num_computed_tokens: int
    num_recomputed_tokens: int
    num_leaked_blocks: int
    simulated_s: float

    @property
    def recompute_tax(self) -> float:
        """Recomputed over computed tokens."""
        return self.num_recomputed_tokens / max(1, self.num_computed_tokens)


ARMS: tuple[tuple[str, VictimOrder, bool], ...] = (
    ("recompute, cheapest first", cheapest_last, False),
    ("recompute, youngest first", youngest_last, False),
    ("swap", cheapest_last, True),
)


def run_pressure(settings: PressureSettings, progress: Progress) -> Report:
    """Return the recompute tax of each arm under the same arrivals."""
    results = []
    for i, (name, order, swaps) in enumerate(ARMS):
        report_hours = _scaled(progress, name, i / len(ARMS), 1 / len(ARMS))
        results.append(simulate(settings, name, order, swaps, report_hours))
    return Report(
        name="KV pressure (simulated time, no model)",
        settings=asdict(settings),
        columns=("arm", "requests", "steps", "preemptions", "recomputed / computed", "leaked blocks"),
        rows=tuple(
            (
                r.arm,
                f"{r.num_requests}",
                f"{r.num_steps}",
                f"{r.num_preemptions}",
                f"{r.recompute_tax:.4f}",
                f"{r.num_leaked_blocks}",
            )
            for r in results
        ),
        remarks=(f"{settings.hours} h of arrivals; the pool holds {settings.pool_factor} times the largest request.",),
        samples=tuple(asdict(r) for r in results),
    )


def simulate(
    settings: PressureSettings, name: str, order: VictimOrder, swaps: bool, progress: Callable[[float], None]
) -> PressureResult:
    """Return what one arm did; runs until the last request has ended.

    Raises: ``AssertionError`` if a request does not end exactly once.
    """
    scheduler = _scheduler(settings, order, swaps)
    arrivals = list(_arrivals(settings))
    heapq.heapify(arrivals)
    num_requests, now_s, ended = len(arrivals), 0.0, set[str]()
    while arrivals or scheduler.has_unfinished:
        if not scheduler.has_unfinished:
            now_s = max(now_s, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now_s:
            _, index, num_prompt, num_output = heapq.heappop(arrivals)
            scheduler.add(_request(index, num_prompt, num_output))
        scheduler.begin_swap_ins()
        for transfer in scheduler.take_swap_transfers():
            scheduler.end_swap(transfer)
        with scheduler.step() as tx:
            for output in tx.commit([0] * len(tx.plan.sampling_row_ids)):
                if output.finish_reason is not None:
                    assert output.request_id not in ended, output.request_id
                    ended.add(output.request_id)
        now_s += STEP_BASE_S + STEP_TOKEN_S * tx.plan.num_tokens
        if scheduler.counts.num_steps % 4096 == 0:
            progress(len(ended) / num_requests)
    assert len(ended) == num_requests, (len(ended), num_requests)
    counts, pool = scheduler.counts, scheduler.kv.pool
    return PressureResult(
        arm=name,
        num_requests=num_requests,
        num_steps=counts.num_steps,
        num_preemptions=counts.num_preemptions,
        num_computed_tokens=counts.num_prompt_tokens + counts.num_generation_tokens,
        num_recomputed_tokens=counts.num_recomputed_tokens,
        num_leaked_blocks=pool.num_blocks - pool.num_free,
        simulated_s=now_s,
    )


def _scheduler(settings: PressureSettings, order: VictimOrder, swaps: bool) -> Scheduler:
    config = EngineConfig(enable_chunked_prefill=True, block_size=settings.block_size)
    largest = blocks_needed(PROMPT_TOKENS[2], OUTPUT_TOKENS[2], settings.block_size)
    num_blocks = int(largest * settings.pool_factor)
    return make_scheduler(
        config,
        num_blocks=num_blocks,
        max_model_len=PROMPT_TOKENS[2] + OUTPUT_TOKENS[2],
        num_swap_blocks=10 * num_blocks if swaps else 0,
        victim_order=order,
    )


def _arrivals(settings: PressureSettings) -> Iterator[tuple[float, int, int, int]]:
    """Yield arrival in seconds, index, prompt and output tokens: a Poisson process of drawn lengths."""
    rng = random.Random(settings.seed)
    now_s, index = rng.expovariate(settings.requests_per_s), 0
    while now_s < settings.hours * 3600:
        yield now_s, index, _length(rng, PROMPT_TOKENS), _length(rng, OUTPUT_TOKENS)
        now_s, index = now_s + rng.expovariate(settings.requests_per_s), index + 1


def _length(rng: random.Random, shape: tuple[int, int, int]) -> int:
    p50, p90, largest = shape
    sigma = math.log(p90 / p50) / 1.2816  # the 90th percentile of the normal distribution
    return min(largest, max(1, round(rng.lognormvariate(math.log(p50), sigma))))


def _request(index: int, num_prompt: int, num_output: int) -> Request:
    params = SamplingParams(max_tokens=num_output, temperature=0.0)
    return Request(request_id=str(index), prompt_token_ids=(0,) * num_prompt, sampling_params=params)


def _scaled(progress: Progress, name: str, start: float, share: float) -> Callable[[float], None]:
    return lambda fraction: progress(f"pressure: {name}", start + share * fraction)
