"""No more preemptions than blocks that requests take for the first time: see ``docs/memory.md`` for the proof."""

import random

import pytest

from moesaic.kv.geometry import blocks_needed, kv_tokens_needed
from moesaic.sched.scheduler import Scheduler
from moesaic.testing.scheduling import FakeRunner, create_request, create_scheduler, run_step, run_until_idle

SEEDS = range(24)


def create(rng: random.Random, num_swap_blocks: int) -> Scheduler:
    block_size, rows = rng.choice([1, 2, 4]), rng.choice([2, 4, 8])
    return create_scheduler(
        num_blocks=rng.choice([8, 12, 20]),
        block_size=block_size,
        chunked=rng.random() < 0.8,
        chunk_size=rng.choice([1, 2, 8]),
        max_batch_size=rows,
        max_tokens_per_step=rows + block_size + rng.choice([2, 4, 16]),
        num_swap_blocks=num_swap_blocks,
    )


def fail_or_end_copies(scheduler: Scheduler, rng: random.Random) -> None:
    """A copy that fails costs its sequence what preemption by recompute would have cost, and no preemption more."""
    scheduler.begin_swap_ins()
    for transfer in scheduler.take_swap_transfers():
        (scheduler.fail_swap if rng.random() < 0.3 else scheduler.end_swap)(transfer)


@pytest.mark.parametrize("has_siblings", [False, True])
@pytest.mark.parametrize("num_swap_blocks", [0, 6])
def test_preemptions_and_recomputed_tokens_stay_within_their_bound(num_swap_blocks: int, has_siblings: bool) -> None:
    """Requests of any length up to the whole pool, more of them than fit, some ended by their clients."""
    num_preemptions = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        scheduler, runner = create(rng, num_swap_blocks), FakeRunner()
        num_slots = scheduler.kv.pool.num_blocks * scheduler.kv.block_size
        num_first_blocks = largest = num_added = 0
        while num_added < 30 or scheduler.has_unfinished:
            if num_added < 30 and len(scheduler.waiting) < 3:
                sibling = rng.choice((*scheduler.sequences, None)) if has_siblings else None
                num_prompt = rng.randrange(1, num_slots) if sibling is None else sibling.num_prompt_tokens
                max_tokens = rng.randrange(1, num_slots - num_prompt + 2)
                leader = None if sibling is None else sibling.request.request_id
                scheduler.add(create_request(f"r{num_added}", num_prompt, max_tokens, sibling_of=leader))
                num_first_blocks += blocks_needed(num_prompt, max_tokens, scheduler.kv.block_size)
                largest = max(largest, kv_tokens_needed(num_prompt, max_tokens))
                num_added += 1
            if rng.random() < 0.02:
                scheduler.abort(f"r{rng.randrange(num_added)}")
            fail_or_end_copies(scheduler, rng)
            run_step(scheduler, runner)
            counts = scheduler.counts
            # The older one in need has a block, which only a sibling may have too.
            most_lost = min(largest, num_slots - (0 if has_siblings else scheduler.kv.block_size))
            assert counts.num_preemptions <= num_first_blocks
            assert counts.num_recomputed_tokens <= counts.num_preemptions * most_lost
        num_preemptions += scheduler.counts.num_preemptions
    assert num_preemptions > 10 * len(SEEDS)


def test_the_first_in_rank_is_never_preempted_and_one_preemption_serves_each_need() -> None:
    """An old stream that needs a block in each step beside three that hold many: a preemption for each of its steps,
    were it not that a victim frees all of its blocks and waits for room.
    """
    scheduler = create_scheduler(num_blocks=30, block_size=1, max_batch_size=4, max_tokens_per_step=40, chunk_size=32)
    first = scheduler.add(create_request("first", 2, max_tokens=28))
    for i in range(3):
        scheduler.add(create_request(f"r{i}", 8, max_tokens=15))
    run_until_idle(scheduler, FakeRunner())
    assert not first.was_preempted
    assert 2 <= scheduler.counts.num_preemptions <= 8
