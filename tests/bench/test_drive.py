"""The loop that feeds an engine and notes when tokens came, over the real engine and a clock that the test moves."""

from collections.abc import Callable
from pathlib import Path

import pytest

from moesaic.bench.drive import drive
from moesaic.bench.events import ArmRun
from moesaic.bench.load import Call, Role, id_prompts
from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.errors import MoesaicError
from moesaic.request import StepOutput
from moesaic.testing.scheduling import ManualClock

STEP_S = 1.0


class SlowSteps(EngineCore):
    """An engine each of whose steps takes ``STEP_S`` of ``manual_clock``."""

    manual_clock: ManualClock

    def step(self) -> list[StepOutput]:
        self.manual_clock.advance(STEP_S)
        return super().step()


@pytest.fixture
def engine(tiny_dir: Path) -> SlowSteps:
    config = EngineConfig(
        enable_chunked_prefill=True,
        prefill_chunk_size=16,
        max_tokens_per_step=64,
        max_batch_size=8,
        num_kv_blocks=32,
        device="cpu",
    )
    engine = SlowSteps.from_path(tiny_dir, config)
    assert isinstance(engine, SlowSteps)
    engine.manual_clock = ManualClock(100.0)
    return engine


def call(name: str, role: Role = "decoder", *, at: float = 0.0, tokens: int = 4, lead_in: int = 0) -> Call:
    return Call(
        request_id=name, role=role, num_prompt_tokens=5, max_tokens=tokens, arrival_s=at, lead_in_tokens=lead_in
    )


def run(engine: SlowSteps, *calls: Call, share: Callable[[float], None] = lambda done: None) -> ArmRun:
    clock = engine.manual_clock
    return drive(engine, calls, id_prompts(calls, 200, 0), arm="a", share=share, clock=clock, sleep=clock.advance)


def test_each_token_is_noted_at_the_end_of_its_step(engine: SlowSteps) -> None:
    shares: list[float] = []
    done = run(engine, call("a"), call("b", tokens=2), share=shares.append)
    a, b = done.requests
    assert a.chunks == ((1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1))
    assert b.chunks == ((1.0, 1), (2.0, 1))
    assert a.token_ids is not None
    assert len(a.token_ids) == 4
    assert (done.duration_s, done.num_tokens, a.ttft_s) == (4.0, 6, 1.0)
    assert shares == pytest.approx([2 / 6, 4 / 6, 5 / 6, 1])


def test_a_request_that_arrives_during_a_step_counts_from_its_arrival(engine: SlowSteps) -> None:
    _, late = run(engine, call("a"), call("late", at=1.25)).requests
    assert late.arrival_s == 1.25
    assert late.ttft_s == 3.0 - 1.25  # it joins the step that begins at 2


def test_an_engine_without_work_sleeps_until_the_next_arrival(engine: SlowSteps) -> None:
    done = run(engine, call("a", tokens=2), call("late", at=9.5, tokens=2))
    assert [r.token_s for r in done.requests] == [(1.0, 2.0), (10.5, 11.5)]


def test_long_prompts_arrive_after_the_lead_in_of_every_decoder_and_their_own_gap(engine: SlowSteps) -> None:
    calls = (
        call("a", tokens=9),
        call("b", tokens=2),  # ends before it has 3 tokens
        call("first", "long", lead_in=3),
        call("second", "long", at=2.5, lead_in=3),
    )
    *_, first, second = run(engine, *calls).requests
    assert (first.arrival_s, second.arrival_s) == (3.0, 5.5)


def test_a_request_that_fails_ends_the_run_with_its_name(engine: SlowSteps) -> None:
    with pytest.raises(MoesaicError, match="request 'a' of the load failed: broken"):
        run(engine, call("a"), share=lambda done: engine.fail_request("a", "broken"))
