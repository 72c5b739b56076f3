"""Chunks are sized so that a step takes the milliseconds that were asked for: known laws, a clock of the test's own."""

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.engine.stall_bound import GROWTH, WARM_UP_STEPS, DecodeStallBound
from moesaic.engine.step_time import StepSizes
from moesaic.engine.supervisor import StepSupervisor
from moesaic.errors import ConfigError
from moesaic.models.loader import load_model
from moesaic.request import SamplingParams
from moesaic.sched.recording import RecordingScheduler
from moesaic.sched.replay import replay
from moesaic.testing.scheduling import ManualClock, create_request, create_scheduler
from moesaic.testing.step_time import GPU_LIKE, StepTimeLaw, TimedEngine

LEAST, FULL = 16, 8192


def with_a_knee(sizes: StepSizes) -> float:
    """Bytes of experts are the floor for few tokens; beyond 300 each token costs."""
    floor_s = 0.006 if sizes.num_chunk_tokens else 0.0
    return 0.8 * GPU_LIKE(sizes) + floor_s + 2e-5 * max(0, sizes.num_chunk_tokens - 300)


def create_timed(
    bound_ms: float, law: StepTimeLaw, *, streams: int = 8, max_tokens_per_step: int = FULL, **settings: Any
) -> TimedEngine:  # Any: settings of several types
    """Return an engine with ``streams`` that run, which have output tokens for thousands of steps."""
    scheduler = create_scheduler(
        num_blocks=20_000,
        block_size=16,
        chunk_size=FULL,
        max_tokens_per_step=max_tokens_per_step,
        max_batch_size=64,
        max_model_len=60_000,
        **settings,
    )
    bound = DecodeStallBound(bound_ms / 1e3, least_tokens=LEAST, full_tokens=max_tokens_per_step)
    engine = TimedEngine(scheduler, bound, law)
    for i in range(streams):
        scheduler.add(create_request(f"stream{i}", 64, 9000))
    while streams and len(scheduler.running.decoding) < streams:
        engine.step()
    return engine


def read_prompts(engine: TimedEngine, lengths: list[int], *, max_steps: int = 5000) -> None:
    """Give these prompts one after the other; return when all have their first token."""
    for i, length in enumerate(lengths):
        name = f"prompt{len(engine.steps)}-{i}"
        engine.scheduler.add(create_request(name, length, 1))
        for _ in range(max_steps):
            if engine.scheduler.get(name) is None:
                break
            engine.step()
        assert engine.scheduler.get(name) is None


@pytest.mark.parametrize("law", [GPU_LIKE, with_a_knee])
@pytest.mark.parametrize("bound_ms", [30, 60, 200])
def test_steps_stay_within_the_bound_and_come_near_it(law: StepTimeLaw, bound_ms: int) -> None:
    engine = create_timed(bound_ms, law)
    read_prompts(engine, [16_384, 500, 40_000])
    assert max(s.seconds for s in engine.mixed()) <= bound_ms / 1e3
    assert max(s.seconds for s in engine.mixed(WARM_UP_STEPS)) >= 0.8 * bound_ms / 1e3
    assert engine.bound.stats()["num_decode_stall_unmet_steps"] == 0


def test_chunks_begin_at_the_least_and_grow_at_most_twofold() -> None:
    engine = create_timed(60, GPU_LIKE)
    read_prompts(engine, [16_384])
    sizes = [sum(c.num_tokens for c in s.plan.chunks) for s in engine.mixed()]
    assert sizes[0] == LEAST
    assert all(after <= GROWTH * max(sizes[: i + 1]) for i, after in enumerate(sizes[1:]))


def test_the_limit_falls_as_the_context_grows_and_is_back_for_a_new_prompt() -> None:
    engine = create_timed(40, GPU_LIKE)
    read_prompts(engine, [16_384, 30_000])
    limits = [s.chunk_limit for s in engine.mixed()]
    starts = [i for i, s in enumerate(engine.mixed()) if s.plan.chunks[0].start == 0]
    first, last = limits[starts[1]], limits[-1]
    assert first is not None
    assert last is not None
    assert last < first / 2


def test_few_steps_exceed_the_bound_when_times_are_noisy() -> None:
    noise = random.Random(0)
    engine = create_timed(40, lambda sizes: GPU_LIKE(sizes) * (1 + abs(noise.gauss(0, 0.08))))
    read_prompts(engine, [30_000] * 8)
    steps = engine.mixed(WARM_UP_STEPS)
    assert len(steps) > 300
    assert sum(s.seconds > 0.04 for s in steps) <= 0.015 * len(steps)
    assert engine.bound.stats()["num_decode_stall_exceeded_steps"] == sum(s.seconds > 0.04 for s in engine.mixed())


def test_a_slower_machine_is_noticed_within_steps_and_a_faster_one_used() -> None:
    factor = 1.0
    engine = create_timed(60, lambda sizes: factor * GPU_LIKE(sizes))
    read_prompts(engine, [30_000] * 3)
    num_before = len(engine.mixed())
    tokens = engine.bound.tokens
    factor = 2.0
    read_prompts(engine, [30_000] * 2)
    assert max(s.seconds for s in engine.mixed(num_before + 12)) <= 0.06
    assert engine.bound.tokens < tokens / 2
    factor = 1.0
    read_prompts(engine, [30_000] * 8)
    assert engine.bound.tokens > 0.7 * tokens


def test_a_rare_pause_does_not_make_chunks_small() -> None:
    engine = create_timed(40, GPU_LIKE)
    engine.law = lambda sizes: GPU_LIKE(sizes) * (20 if len(engine.mixed()) == 60 else 1)
    read_prompts(engine, [30_000] * 2)
    steps = engine.mixed()
    assert steps[60].seconds > 0.5
    before, after = steps[60].chunk_limit, min(s.chunk_limit or 0 for s in steps[61:70])
    assert before is not None
    assert after > 0.5 * before


def test_a_bound_that_cannot_be_met_leaves_the_least_chunk_is_counted_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = create_timed(10, GPU_LIKE)
        read_prompts(engine, [1000, 600])
    assert {s.chunk_limit for s in engine.mixed()} == {LEAST}
    stats = engine.bound.stats()
    assert stats["num_decode_stall_unmet_steps"] == len(engine.mixed()) - WARM_UP_STEPS
    assert stats["num_decode_stall_exceeded_steps"] == sum(bool(s.plan.decode_rows) for s in engine.steps)
    (record,) = caplog.records
    assert record.getMessage().startswith("decode stall bound not met: bound_ms=10.0 expected_ms=")


def test_a_step_without_streams_has_its_whole_budget() -> None:
    engine = create_timed(20, GPU_LIKE, streams=0)
    read_prompts(engine, [5000])
    assert [[c.num_tokens for c in s.plan.chunks] for s in engine.steps] == [[5000]]
    assert engine.bound.stats()["num_decode_stall_exceeded_steps"] == 0


def test_the_limit_of_a_step_with_streams_ends_with_the_streams() -> None:
    engine = create_timed(10, GPU_LIKE, streams=2)
    engine.scheduler.add(create_request("prompt", 1000, 1))
    engine.step()
    assert engine.steps[-1].chunk_limit == LEAST
    for i in range(2):
        engine.scheduler.abort(f"stream{i}")
    engine.step()
    assert [c.num_tokens for c in engine.steps[-1].plan.chunks] == [1000 - LEAST]


@pytest.mark.parametrize("seed", range(4))
def test_prompts_advance_and_nobody_starves_however_the_limit_jumps(seed: int) -> None:
    """The scheduler's own checks (``MOESAIC_CHECK``) raise when a prompt waits longer than the threshold."""
    chance = random.Random(seed)
    engine = create_timed(
        60, lambda sizes: GPU_LIKE(sizes) * chance.choice((0.1, 0.5, 1, 1, 4)), max_tokens_per_step=512, threshold=2
    )
    for i in range(30):
        engine.scheduler.add(create_request(f"r{i}", chance.choice((3, 40, 900)), chance.choice((1, 20))))
        for _ in range(chance.randrange(3)):
            engine.step()
    for _ in range(3000):
        if all(engine.scheduler.get(f"r{i}") is None for i in range(30)):
            break
        engine.step()
    assert all(engine.scheduler.get(f"r{i}") is None for i in range(30))
    assert len({s.chunk_limit for s in engine.mixed()}) > 4


# The engine

LONG = [(7 * i) % 250 for i in range(300)]


def create_core(tiny_dir: Path, clock: ManualClock, law: StepTimeLaw, **settings: Any) -> EngineCore:
    """Return an engine over ``tiny`` whose forwards move ``clock`` as ``law`` says."""
    defaults = {
        "enable_chunked_prefill": True,
        "prefill_chunk_size": 120,
        "max_batch_size": 8,
        "max_tokens_per_step": 128,
        "max_decode_stall_ms": 10,
        "block_size": 4,
        "num_kv_blocks": 400,
        "device": "cpu",
    }
    core = EngineCore(load_model(tiny_dir), EngineConfig(**(defaults | settings)), clock=clock)
    core.runner.run = _timed(core.runner.run, clock, law)  # type: ignore[method-assign]  # the seam of the forward
    return core


def _timed(run: Callable[..., torch.Tensor], clock: ManualClock, law: StepTimeLaw) -> Callable[..., torch.Tensor]:
    def timed(batch: Any) -> torch.Tensor:
        lengths = batch.lengths
        rows = list(zip(lengths.query_lengths, lengths.context_lengths, strict=True))
        chunks = [(n, start) for n, start in rows if n > 1]
        sizes = StepSizes(
            num_decode_rows=sum(n == 1 for n, _ in rows),
            num_decode_kv_tokens=sum(start for n, start in rows if n == 1),
            num_chunk_tokens=sum(n for n, _ in chunks),
            num_chunk_pairs=sum(n * (start + n / 2) for n, start in chunks),
        )
        clock.advance(law(sizes))
        return run(batch)

    return timed


def slow(sizes: StepSizes) -> float:
    """5 ms with a stream, and 0.1 ms for each token of a chunk."""
    return 0.005 + 1e-4 * sizes.num_chunk_tokens


def run_stream_and_prompt(core: EngineCore, step: Callable[[], Any]) -> None:
    core.add_request("stream", [1, 2, 3], SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
    for _ in range(3):
        step()
    for i in range(3):
        core.add_request(f"long{i}", LONG, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    for _ in range(200):
        if len(core.scheduler.sequences) <= 1:
            return
        step()
    raise AssertionError("the prompts did not end")


def test_an_engine_keeps_the_bound_reports_what_was_achieved_and_its_log_is_replayed(
    tiny_dir: Path, tmp_path: Path
) -> None:
    log, clock = tmp_path / "log", ManualClock()
    core = create_core(tiny_dir, clock, slow, decision_log=str(log))
    run_stream_and_prompt(core, core.step)
    stats = core.stats()
    assert stats["decode_stall_bound_seconds"] == 0.01
    assert stats["decode_stall_p99_seconds"] <= 0.01
    assert stats["num_decode_stall_exceeded_steps"] == stats["num_decode_stall_unmet_steps"] == 0
    assert 30 < stats["decode_stall_chunk_tokens"] <= 50
    assert core.features()["decode_stall_bound"]["active"]
    assert isinstance(core.scheduler, RecordingScheduler)
    core.scheduler.log.close()
    entries = [json.loads(line) for line in log.read_text(encoding="ascii").splitlines()[1:]]
    limits = [entry[2] for entry in entries if entry[0] == "step"]
    assert limits[0] == 128
    assert len(set(limits)) > 5
    assert min(limits) == 1 + 4
    result = replay(log)
    assert result.first_difference is None
    assert result.num_steps == len(limits)


def test_the_bound_and_a_short_memory_hold_together(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    core = create_core(tiny_dir, clock, slow)
    run, failures = core.runner.run, iter([False] * 14 + [True])

    def fail_once(batch: Any) -> torch.Tensor:
        if next(failures, False):
            raise torch.OutOfMemoryError("no memory")
        return run(batch)

    monkeypatch.setattr(core.runner, "run", fail_once)
    supervisor = StepSupervisor(core)
    sizes: list[int] = []

    def step() -> None:
        before = core.stats()["num_prompt_tokens"]
        supervisor.step()
        sizes.append(core.stats()["num_prompt_tokens"] - before)

    run_stream_and_prompt(core, step)
    budget = supervisor.stats()["chunk_budget_tokens"]
    assert core.stats()["num_rolled_back_steps"] == 1
    assert budget < max(sizes[4:14])
    assert max(sizes[15:]) == budget


def test_an_engine_without_a_bound_reports_stalls_and_no_bound(tiny_dir: Path) -> None:
    clock = ManualClock()
    core = create_core(tiny_dir, clock, slow, max_decode_stall_ms=None)
    run_stream_and_prompt(core, core.step)
    stats = core.stats()
    assert stats["decode_stall_p99_seconds"] == pytest.approx(0.005 + 120 * 1e-4, abs=2e-3)
    assert stats["decode_stall_bound_seconds"] == stats["decode_stall_chunk_tokens"] == 0
    assert core.scheduler.max_tokens_beside_decode is None
    assert not core.features()["decode_stall_bound"]["active"]


def test_a_bound_needs_chunked_prefill_and_a_positive_number() -> None:
    with pytest.raises(ConfigError, match=r"max_decode_stall_ms is 20 but chunked prefill is off.*--enable-chunked"):
        EngineConfig(max_decode_stall_ms=20)
    with pytest.raises(ConfigError, match="max_decode_stall_ms is 0; it must be at least 1"):
        EngineConfig(max_decode_stall_ms=0, enable_chunked_prefill=True)
