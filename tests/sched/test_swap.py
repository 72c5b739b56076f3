"""Preemption by swap: nothing is computed twice, offsets are kept, and late copies change nothing."""

import pytest

from moesaic.kv.pool import BlockId
from moesaic.request import StepOutput
from moesaic.sched.scheduler import Scheduler
from moesaic.sched.swap import SwapLedger, SwapTransfer
from moesaic.sequence import SequenceStatus
from moesaic.testing.scheduling import (
    FakeRunner,
    create_request,
    create_scheduler,
    create_sequences,
    run_step,
    run_until_idle,
)


def create(num_blocks: int = 7, num_swap_blocks: int = 100, **settings: int) -> Scheduler:
    scheduler = create_scheduler(num_blocks=num_blocks, num_swap_blocks=num_swap_blocks, **settings)  # type: ignore[arg-type]
    for i in range(3):
        scheduler.add(create_request(f"r{i}", 7, max_tokens=12))
    return scheduler


def step_to_swap(scheduler: Scheduler, runner: FakeRunner) -> SwapTransfer:
    """Step until someone must be swapped out; return the copy, not yet made."""
    for _ in range(100):
        with scheduler.step() as tx:
            tx.commit(runner.run(tx.plan, tx.sequences))
        transfers = scheduler.take_swap_transfers()
        if transfers:
            return transfers[0]
    raise AssertionError("nobody was swapped out")


@pytest.mark.parametrize("chunked", [False, True])
def test_swapped_requests_yield_the_same_tokens_and_recompute_nothing(chunked: bool) -> None:
    expected = run_until_idle(create(num_blocks=100, chunked=chunked), FakeRunner())
    scheduler = create(chunked=chunked)
    assert run_until_idle(scheduler, FakeRunner()) == expected
    assert scheduler.counts.num_preemptions > 0
    assert scheduler.counts.num_recomputed_tokens == 0
    assert scheduler.swap.num_free_blocks == 100


def test_a_full_host_pool_falls_back_to_recompute() -> None:
    scheduler = create(num_swap_blocks=1)
    run_until_idle(scheduler, FakeRunner())
    assert scheduler.counts.num_recomputed_tokens > 0
    assert scheduler.swap.num_free_blocks == 1


def test_blocks_are_free_only_when_the_copy_is_made() -> None:
    scheduler = create()
    transfer = step_to_swap(scheduler, FakeRunner())
    free = scheduler.kv.pool.num_free
    assert scheduler.kv.pool.num_fenced == len(transfer.block_ids)
    scheduler.end_swap(transfer)
    assert scheduler.kv.pool.num_free == free + len(transfer.block_ids)
    scheduler.check()


def test_a_partial_prefill_comes_back_at_its_offset() -> None:
    scheduler, runner = create_scheduler(num_blocks=8, num_swap_blocks=50, max_batch_size=2, chunk_size=4), FakeRunner()
    scheduler.add(create_request("old", 8, max_tokens=20))
    run_step(scheduler, runner)
    run_step(scheduler, runner)
    scheduler.add(create_request("long", 26, max_tokens=2))
    transfer = step_to_swap(scheduler, runner)
    seq = scheduler.get("long")
    assert seq is not None
    offset = seq.committed_kv_tokens
    assert (seq.status, 0 < offset < 26) == (SequenceStatus.SWAPPED, True)
    scheduler.end_swap(transfer)
    while seq.status is SequenceStatus.SWAPPED:
        run_step(scheduler, runner)
    assert seq.status is SequenceStatus.PREFILL
    assert seq.committed_kv_tokens >= offset
    run_until_idle(scheduler, runner)
    assert scheduler.counts.num_recomputed_tokens == 0


@pytest.mark.parametrize("moment", ["before the copy", "during the copy out", "resting", "during the copy in"])
@pytest.mark.parametrize("command", ["abort", "pause"])
def test_a_command_at_any_moment_of_a_swap_loses_no_block(moment: str, command: str) -> None:
    scheduler, runner = create(), FakeRunner()
    for _ in range(100):
        with scheduler.step() as tx:
            tx.commit(runner.run(tx.plan, tx.sequences))
        if scheduler.swap.transfers:
            break
    name = next(iter(scheduler.swap.sequences.values())).request.request_id
    late: list[SwapTransfer] = []
    if moment != "before the copy":
        late = scheduler.take_swap_transfers()
    if moment in ("resting", "during the copy in"):
        scheduler.end_swap(late.pop())
    if moment == "during the copy in":
        while not late:
            with scheduler.step() as tx:
                tx.commit(runner.run(tx.plan, tx.sequences))
            scheduler.begin_swap_ins()
            late = scheduler.take_swap_transfers()
            assert scheduler.has_unfinished
    assert getattr(scheduler, command)(name)
    scheduler.check()
    assert scheduler.kv.pool.num_fenced == sum(len(t.block_ids) for t in late)
    for transfer in late:
        scheduler.end_swap(transfer)
    assert scheduler.kv.pool.num_fenced == 0
    scheduler.resume(name)
    run_until_idle(scheduler, runner)
    assert scheduler.kv.pool.num_free == 7
    assert scheduler.swap.num_free_blocks == 100


def test_a_failed_copy_is_computed_again() -> None:
    expected = run_until_idle(create(num_blocks=100), FakeRunner())
    scheduler, runner = create(), FakeRunner()
    scheduler.fail_swap(step_to_swap(scheduler, runner))
    scheduler.check()
    assert scheduler.counts.num_recomputed_tokens > 0
    got = run_until_idle(scheduler, runner)
    assert {k: v[-len(got[k]) :] for k, v in expected.items() if k in got} == got


def test_pause_holds_no_blocks_and_resume_keeps_the_place() -> None:
    scheduler, runner = create_scheduler(), FakeRunner()
    for name in ("a", "b"):
        scheduler.add(create_request(name, 9, max_tokens=6))
    run_step(scheduler, runner)
    assert scheduler.pause("a")
    assert not scheduler.pause("a")
    assert set(run_until_idle(scheduler, runner)) == {"b"}
    assert not scheduler.has_unfinished
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
    assert scheduler.resume("a")
    assert not scheduler.resume("a")
    assert len(run_until_idle(scheduler, runner)["a"]) >= 5


def test_preempting_in_flight_drops_the_token_and_samples_it_again() -> None:
    scheduler, runner = create_scheduler(), FakeRunner()
    scheduler.add(create_request("a", 5, max_tokens=4))
    run_step(scheduler, runner)
    tx = scheduler.step()
    assert scheduler.preempt("a")
    assert tx.commit(runner.run(tx.plan, tx.sequences)) == []
    assert len(run_until_idle(scheduler, runner)["a"]) == 3
    assert not scheduler.preempt("a")


def test_those_who_come_back_together_leave_each_other_a_next_block() -> None:
    """Two that came back at once filled the pool to the last block, and then neither could ever move again."""
    scheduler, runner = create_scheduler(num_blocks=5, block_size=1, num_swap_blocks=5), FakeRunner()
    for name, num_prompt, max_tokens in (("a", 1, 5), ("b", 2, 4), ("c", 2, 4)):
        scheduler.add(create_request(name, num_prompt, max_tokens))
    while len(scheduler.swap.resting()) < 2:
        run_step(scheduler, runner)
    assert sum(scheduler.swap.sizes.values()) == 5
    scheduler.abort("a")
    assert run_until_idle(scheduler, runner).keys() == {"a", "b", "c"}


def test_an_old_copy_has_no_owner_once_a_newer_one_was_asked_for() -> None:
    ledger, (seq,) = SwapLedger(4), create_sequences(1)
    old = ledger.begin_out(seq, (BlockId(0),))
    ledger.take_transfers()
    ledger.remove(seq.seq_id)
    new = ledger.begin_out(seq, (BlockId(1),))
    assert (ledger.owner(old), ledger.owner(new)) == (None, seq)


@pytest.mark.parametrize("phase", [SequenceStatus.PREFILL, SequenceStatus.DECODE])
def test_a_chosen_sequence_is_swapped_out_and_goes_on_at_its_offset(phase: SequenceStatus) -> None:
    requests = [create_request(f"r{i}", 20, max_tokens=5) for i in range(3)]
    scheduler, roomy = create_scheduler(num_swap_blocks=20), create_scheduler()
    for request in requests:
        scheduler.add(request)
        roomy.add(request)
    runner, got = FakeRunner(), dict[str, list[int]]()
    seq = scheduler.sequences[1]
    while seq.status is not phase:
        note(got, run_step(scheduler, runner))
    offset = seq.committed_kv_tokens
    assert scheduler.preempt("r1", by="swap")
    assert (seq.status, scheduler.kv.num_blocks(seq)) == (SequenceStatus.SWAPPED, 0)
    while seq.status is SequenceStatus.SWAPPED:
        note(got, run_step(scheduler, runner))
    assert (seq.status, seq.committed_kv_tokens >= offset) == (phase, True)
    while scheduler.has_unfinished:
        note(got, run_step(scheduler, runner))
    assert got == run_until_idle(roomy, FakeRunner())
    assert (scheduler.counts.num_preemptions, scheduler.counts.num_recomputed_tokens) == (1, 0)


def note(got: dict[str, list[int]], outputs: list[StepOutput]) -> None:
    for output in outputs:
        got.setdefault(output.request_id, []).extend(output.new_token_ids)


def test_a_swap_that_cannot_be_is_refused_and_changes_nothing() -> None:
    """The blocks of a row in flight may still be written; the host pool takes a sequence whole or not."""
    scheduler, runner = create_scheduler(num_swap_blocks=2), FakeRunner()
    scheduler.add(create_request("fits", 5, max_tokens=9))
    scheduler.add(create_request("large", 9, max_tokens=9))
    while len(scheduler.running.decoding) < 2:
        run_step(scheduler, runner)
    scheduler.add(create_request("waiting", 4))
    for name in ("large", "waiting", "nobody"):
        before = scheduler.fingerprint()
        assert not scheduler.preempt(name, by="swap")
        assert scheduler.fingerprint() == before
    with scheduler.step():
        assert not scheduler.preempt("fits", by="swap")
    run_until_idle(scheduler, runner)
    assert scheduler.counts.num_preemptions == 0
