"""What a step costs before and after the model: planning, leases and commit, without any model."""

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from statistics import median

from moesaic.bench.report import Report
from moesaic.config import EngineConfig
from moesaic.kv.geometry import blocks_for_tokens
from moesaic.request import Request, SamplingParams
from moesaic.sched.factory import make_scheduler
from moesaic.sched.invariants import checks_enabled
from moesaic.sched.scheduler import Scheduler

STREAM_PROMPT_TOKENS = 64
BLOCK_SIZE = 16
TOKEN_ID = 7
"""Every row samples this; without EOS ids no value ends a request."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """Numbers of decode rows to measure, and the chunks that share each step with them."""

    num_decode_rows: tuple[int, ...] = (32, 64, 128, 256, 512)
    num_chunks: int = 4
    chunk_size: int = 512
    num_steps: int = 300
    """Measured steps for each number of rows."""
    num_warmup_steps: int = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of each measured step with ``num_decode_rows`` decode rows."""

    num_decode_rows: int
    plan_s: tuple[float, ...]
    commit_s: tuple[float, ...]

    @property
    def total_s(self) -> tuple[float, ...]:
        return tuple(map(sum, zip(self.plan_s, self.commit_s, strict=True)))


def run_planner(settings: PlannerSettings, progress: Progress) -> Report:
    """Return the times of planning and commit for each number of decode rows.

    ``MOESAIC_CHECK`` should be off: with it every step also proves the invariants (the report says which).
    """
    times = []
    for i, num_rows in enumerate(settings.num_decode_rows):
        progress("planner: rows in turn", i / len(settings.num_decode_rows))
        times.append(time_steps(settings, num_rows))
    return report(settings, times)


def time_steps(settings: PlannerSettings, num_decode_rows: int) -> StepTimes:
    """Return the times of steps that all have ``num_decode_rows`` decode rows and ``num_chunks`` chunks.

    Raises: ``AssertionError`` if a step has other rows.
    """
    scheduler = _loaded_scheduler(settings, num_decode_rows)
    plan_s, commit_s = [], []
    for _ in range(settings.num_warmup_steps + settings.num_steps):
        started_s = time.perf_counter()
        tx = scheduler.step()
        planned_s = time.perf_counter()
        assert (len(tx.plan.decode_rows), len(tx.plan.chunks)) == (num_decode_rows, settings.num_chunks)
        token_ids = [TOKEN_ID] * num_decode_rows
        begun_s = time.perf_counter()
        tx.commit(token_ids)
        commit_s.append(time.perf_counter() - begun_s)
        plan_s.append(planned_s - started_s)
    first = settings.num_warmup_steps
    return StepTimes(num_decode_rows=num_decode_rows, plan_s=tuple(plan_s[first:]), commit_s=tuple(commit_s[first:]))


def _loaded_scheduler(settings: PlannerSettings, num_decode_rows: int) -> Scheduler:
    """Return a scheduler whose next steps all have the rows asked for: streams decode, long prompts are part-way."""
    num_steps = settings.num_warmup_steps + settings.num_steps
    config = EngineConfig(
        enable_chunked_prefill=True,
        prefill_chunk_size=settings.chunk_size,
        max_partial_prefills=settings.num_chunks,
        max_tokens_per_step=num_decode_rows + settings.num_chunks * settings.chunk_size,
        max_batch_size=num_decode_rows + settings.num_chunks,
        block_size=BLOCK_SIZE,
    )
    long_tokens = settings.chunk_size * (num_steps + 2)
    # Streams may have to wait for several steps until all of them have had their prompt.
    stream_tokens = num_steps + num_decode_rows + 2
    lengths = [STREAM_PROMPT_TOKENS + stream_tokens] * num_decode_rows + [long_tokens + 1] * settings.num_chunks
    num_blocks = sum(blocks_for_tokens(n, BLOCK_SIZE) for n in lengths)
    scheduler = make_scheduler(config, num_blocks=num_blocks, max_model_len=max(lengths))
    for i in range(num_decode_rows):
        scheduler.add(_request(f"stream-{i}", STREAM_PROMPT_TOKENS, stream_tokens))
    while len(scheduler.running.decoding) < num_decode_rows:
        with scheduler.step() as tx:
            tx.commit([TOKEN_ID] * len(tx.plan.sampling_row_ids))
    for i in range(settings.num_chunks):
        scheduler.add(_request(f"long-{i}", long_tokens, 1))
    return scheduler


def _request(request_id: str, num_prompt_tokens: int, max_tokens: int) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=(TOKEN_ID,) * num_prompt_tokens,
        sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
    )


def report(settings: PlannerSettings, times: SequenceOf[StepTimes]) -> Report:
    """Return table and samples."""
    return Report(
        name="planning and commit",
        settings={**asdict(settings), "checks": "on" if checks_enabled() else "off"},
        columns=("decode rows", "plan ms", "commit ms", "both ms", "least ms", "both us/row"),
        rows=tuple(_row(t) for t in times),
        remarks=(
            f"Medians of n = {settings.num_steps} steps, each with {settings.num_chunks} chunks besides the rows.",
        ),
        samples=tuple(asdict(t) for t in times),
    )


def _row(times: StepTimes) -> tuple[str, ...]:
    both_s = median(times.total_s)
    return (
        str(times.num_decode_rows),
        f"{1e3 * median(times.plan_s):.3f}",
        f"{1e3 * median(times.commit_s):.3f}",
        f"{1e3 * both_s:.3f}",
        f"{1e3 * min(times.total_s):.3f}",
        f"{1e6 * both_s / times.num_decode_rows:.2f}",
    )
