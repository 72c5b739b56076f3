"""The loop that records token times, over the real engine and a clock that only the test moves."""

from itertools import count
from pathlib import Path

import pytest

from moesaic.bench.timeline import Ask, Scenario, run_scenario
from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore


def _engine(tiny_dir: Path, *, is_chunked: bool) -> EngineCore:
    config = EngineConfig(
        enable_chunked_prefill=is_chunked,
        prefill_chunk_size=16,
        max_tokens_per_step=128,
        max_batch_size=8,
        num_kv_blocks=32,
        device="cpu",
    )
    return EngineCore.from_path(tiny_dir, config)


def _scenario() -> Scenario:
    streams = tuple(
        Ask(request_id=f"s{i}", prompt_token_ids=(5 + i,) * 4, max_tokens=10, ignore_eos=True) for i in range(2)
    )
    late = Ask(request_id="late", prompt_token_ids=tuple(range(1, 65)), max_tokens=3, ignore_eos=True)
    return Scenario(streams=streams, late=late, lead_in_tokens=2)


@pytest.mark.parametrize(("is_chunked", "num_chunks"), [(False, 1), (True, 4)])
def test_a_late_prompt_is_counted_in_the_parts_in_which_it_ran(
    tiny_dir: Path, is_chunked: bool, num_chunks: int
) -> None:
    ticks = count()
    timeline = run_scenario(_engine(tiny_dir, is_chunked=is_chunked), _scenario(), clock=lambda: float(next(ticks)))
    assert timeline.num_late_chunks == num_chunks
    # One tick per step once the late request is in: its first token comes with its last chunk.
    assert timeline.ttft_s == num_chunks
    assert [len(times.token_ids) for times in (*timeline.streams, timeline.late)] == [10, 10, 3]


def test_the_late_request_arrives_when_every_stream_has_its_lead_in(tiny_dir: Path) -> None:
    ticks = count()
    timeline = run_scenario(_engine(tiny_dir, is_chunked=True), _scenario(), clock=lambda: float(next(ticks)))
    num_before = [sum(at < timeline.late.arrival_s for at in stream.token_s) for stream in timeline.streams]
    assert num_before == [2, 2]


def test_the_share_done_grows_to_one_when_every_token_was_computed(tiny_dir: Path) -> None:
    shares: list[float] = []
    run_scenario(_engine(tiny_dir, is_chunked=True), _scenario(), share=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_long_prompt_is_admitted_at_once_into_the_blocks_that_a_scenario_asks_for(tiny_dir: Path) -> None:
    """Streams whose last block is already theirs leave no slack: an exact pool would make the prompt wait."""
    streams = tuple(Ask(request_id=f"s{i}", prompt_token_ids=(5,) * 8, max_tokens=8, ignore_eos=True) for i in range(4))
    late = Ask(request_id="late", prompt_token_ids=tuple(range(1, 65)), max_tokens=1)
    scenario = Scenario(streams=streams, late=late, lead_in_tokens=2)
    config = EngineConfig(
        max_tokens_per_step=128, max_batch_size=8, num_kv_blocks=scenario.num_kv_blocks(16), device="cpu"
    )
    ticks = count()
    timeline = run_scenario(EngineCore.from_path(tiny_dir, config), scenario, clock=lambda: float(next(ticks)))
    assert timeline.ttft_s == 1


def test_both_arms_give_the_same_tokens(tiny_dir: Path) -> None:
    off, on = (run_scenario(_engine(tiny_dir, is_chunked=c), _scenario()) for c in (False, True))
    assert off.outputs == on.outputs
