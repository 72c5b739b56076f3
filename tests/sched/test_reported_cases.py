"""Cases that broke other serving engines in the field, one test each.

Beside these: two half-loaded prompts that each need one more block (``test_preempt``), every length around capacity
(``test_scheduler``), a short prompt behind long ones (``test_chunked``).
"""

import pytest

from moesaic.errors import RequestTooLargeError
from moesaic.request import StepOutput
from moesaic.sched.scheduler import Scheduler
from moesaic.testing.scheduling import (
    FakeRunner,
    chunk_lengths,
    create_request,
    create_scheduler,
    run_step,
    run_until_idle,
)


def run_to_first_tokens(scheduler: Scheduler, runner: FakeRunner, count: int) -> None:
    while len(scheduler.running.decoding) < count:
        run_step(scheduler, runner)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_of_17_blocks_is_refused_by_a_pool_of_16_and_a_small_one_behind_it_is_served(chunked: bool) -> None:
    scheduler = create_scheduler(num_blocks=16, block_size=4, chunked=chunked)
    with pytest.raises(RequestTooLargeError, match=r"17 .*16"):
        scheduler.add(create_request("large", 60, max_tokens=9))
    scheduler.add(create_request("small", 5, max_tokens=3))
    assert len(run_until_idle(scheduler, FakeRunner(), max_steps=10)["small"]) == 3


@pytest.mark.parametrize("chunked", [False, True])
def test_a_prompt_of_1000_and_24_outputs_in_a_pool_of_1008_tokens_is_refused_at_the_door(chunked: bool) -> None:
    """Admission by prompt alone would let it in, and it would stand still at its ninth output token."""
    scheduler = create_scheduler(num_blocks=63, block_size=16, chunked=chunked, max_tokens_per_step=64)
    with pytest.raises(RequestTooLargeError, match=r"64 .*63"):
        scheduler.add(create_request("r", 1000, max_tokens=24))
    scheduler.add(create_request("fits", 1000, max_tokens=9))
    assert len(run_until_idle(scheduler, FakeRunner())["fits"]) == 9


def test_a_newcomer_is_served_within_the_threshold_beside_endless_decoders() -> None:
    """Decoders take every row but one and every token but a block; each that ends is replaced at once."""
    threshold = 3
    scheduler = create_scheduler(
        num_blocks=400, block_size=4, max_batch_size=6, max_tokens_per_step=10, threshold=threshold
    )
    runner = FakeRunner()
    for i in range(5):
        scheduler.add(create_request(f"d{i}", 1, max_tokens=40))
    run_to_first_tokens(scheduler, runner, 5)
    newcomer = scheduler.add(create_request("newcomer", 60, max_tokens=1))
    gap, num_added = 0, 0
    while scheduler.get("newcomer") is not None:
        gap = gap + 1 if newcomer.seq_id not in _served(scheduler, runner) else 0
        assert gap <= threshold
        while len(scheduler.running.decoding) + len(scheduler.waiting) < 5:
            num_added += 1
            scheduler.add(create_request(f"e{num_added}", 1, max_tokens=40))
    assert chunk_lengths(runner.plans, newcomer.seq_id)


def _served(scheduler: Scheduler, runner: FakeRunner) -> set[int]:
    run_step(scheduler, runner)
    return {row.seq_id for row in runner.plans[-1].rows}


def test_decoders_have_a_gap_of_one_step_beside_endless_prompts() -> None:
    scheduler, runner = create_scheduler(num_blocks=3000, max_batch_size=8, max_tokens_per_step=16), FakeRunner()
    for i in range(3):
        scheduler.add(create_request(f"d{i}", 3, max_tokens=60))
    run_to_first_tokens(scheduler, runner, 3)
    for step in range(50):
        scheduler.add(create_request(f"p{step}", 100, max_tokens=1))
        outputs = {o.request_id for o in run_step(scheduler, runner)}
        assert {"d0", "d1", "d2"} <= outputs


def test_a_prompt_that_waits_for_blocks_is_not_counted_as_forced() -> None:
    """A counter that grows while allocation fails would jump the queue later; one reset by trying would starve."""
    scheduler = create_scheduler(
        num_blocks=8, block_size=4, chunk_size=4, max_batch_size=3, max_tokens_per_step=7, threshold=2
    )
    runner = FakeRunner()
    scheduler.add(create_request("old", 8, max_tokens=18))
    run_to_first_tokens(scheduler, runner, 1)
    scheduler.add(create_request("big", 28, max_tokens=1))
    num_stuck = 0
    while scheduler.get("big") is not None:
        outputs = run_step(scheduler, runner)
        is_stuck = not runner.plans[-1].chunks and scheduler.get("old") is not None
        num_stuck += is_stuck
        assert not (is_stuck and any(scheduler.running.rotation.wait_steps.values())), (
            "no blocks: nobody is passed over"
        )
        assert outputs or runner.plans[-1].chunks
    assert num_stuck > 2
    assert scheduler.counts.num_forced_prefills == 0


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("num_prompt", [k * 4 + d for k in (1, 2, 5) for d in (-1, 0, 1)])
def test_prompts_around_a_block_edge_hold_as_many_blocks_as_their_tokens_fill(chunked: bool, num_prompt: int) -> None:
    scheduler, runner = create_scheduler(num_blocks=16, block_size=4, chunked=chunked), FakeRunner()
    seq = scheduler.add(create_request("r", num_prompt, max_tokens=6))
    while scheduler.get("r") is not None:
        run_step(scheduler, runner)
        if scheduler.get("r") is not None:
            assert scheduler.kv.num_blocks(seq.seq_id) == -(-seq.committed_kv_tokens // 4)
    assert scheduler.kv.pool.num_free == 16


@pytest.mark.parametrize("length", [k * 8 + d for k in (1, 2, 3) for d in (-1, 0, 1)])
def test_prompts_around_a_chunk_edge_sample_once_and_end_with_their_remainder(length: int) -> None:
    """A remainder of one token is a chunk of its own, terminal, and is no decode row."""
    scheduler, runner = create_scheduler(chunk_size=8), FakeRunner()
    seq = scheduler.add(create_request("r", length, max_tokens=2))
    assert len(run_until_idle(scheduler, runner)["r"]) == 2
    full, rest = divmod(length, 8)
    assert chunk_lengths(runner.plans, seq.seq_id) == [8] * full + ([rest] if rest else [])
    terminal = [c.is_terminal for p in runner.plans for c in p.chunks]
    assert terminal == [False] * (len(terminal) - 1) + [True]


@pytest.mark.parametrize("left", range(2, 9))
def test_a_step_with_two_to_eight_tokens_left_uses_them_all(left: int) -> None:
    """Fewer than two cannot be left to one prompt: a step takes at least rows + block_size tokens."""
    scheduler, runner = (
        create_scheduler(num_blocks=200, block_size=1, chunk_size=8, max_batch_size=4, max_tokens_per_step=3 + left),
        FakeRunner(),
    )
    for i in range(3):
        scheduler.add(create_request(f"d{i}", 1, max_tokens=60))
    run_to_first_tokens(scheduler, runner, 3)
    seq = scheduler.add(create_request("long", 30, max_tokens=1))
    while scheduler.get("long") is not None:
        run_step(scheduler, runner)
    lengths = chunk_lengths(runner.plans, seq.seq_id)
    assert lengths == [left] * (30 // left) + ([30 % left] if 30 % left else [])


def test_two_prompts_that_share_three_tokens_a_step_get_one_each_at_least() -> None:
    scheduler, runner = (
        create_scheduler(
            num_blocks=200, block_size=1, chunk_size=8, max_batch_size=4, max_tokens_per_step=5, max_partial_prefills=2
        ),
        FakeRunner(),
    )
    for i in range(2):
        scheduler.add(create_request(f"d{i}", 1, max_tokens=60))
    run_to_first_tokens(scheduler, runner, 2)
    longs = [scheduler.add(create_request(f"long{i}", 20, max_tokens=1)) for i in range(2)]
    for _ in range(8):
        run_step(scheduler, runner)
    shares = [sum(chunk_lengths(runner.plans, s.seq_id)) for s in longs]
    assert sum(shares) == 8 * 3
    assert min(shares) >= 8


@pytest.mark.parametrize("chunked", [False, True])
def test_requests_for_one_token_end_with_their_prompt_in_mixed_batches(chunked: bool) -> None:
    scheduler, runner = create_scheduler(num_blocks=200, chunked=chunked), FakeRunner()
    for i in range(12):
        scheduler.add(create_request(f"r{i}", 1 + 5 * i % 23, max_tokens=1 if i % 2 else 7))
    ends: dict[str, StepOutput] = {}
    while scheduler.has_unfinished:
        for output in run_step(scheduler, runner):
            assert output.request_id not in ends
            if output.finish_reason is not None:
                ends[output.request_id] = output
    assert {o.finish_reason for o in ends.values()} == {"length"}
    assert len(ends) == 12
    assert not any(r.seq_id % 2 for p in runner.plans for r in p.decode_rows), "one token needs no decode row"


def test_a_long_prompt_is_served_beside_an_endless_stream_of_shorter_ones_under_shortest_first() -> None:
    scheduler = create_scheduler(
        num_blocks=400,
        max_batch_size=4,
        max_tokens_per_step=8,
        scheduling_policy="shortest-prefill-first",
        aging_steps=8,
    )
    runner = FakeRunner()
    scheduler.add(create_request("long", 64, max_tokens=1))
    for step in range(400):
        while len(scheduler.waiting) < 6:
            scheduler.add(create_request(f"s{step}-{len(scheduler.waiting)}", 3, max_tokens=2))
        if any(o.request_id == "long" for o in run_step(scheduler, runner)):
            return
    raise AssertionError("the long prompt starved")
