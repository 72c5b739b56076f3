"""Steps whose progress moves before their tokens are known, with the next step planned meanwhile."""

import pytest

from moesaic.errors import InvariantError
from moesaic.request import StepOutput
from moesaic.sched.scheduler import Scheduler
from moesaic.sched.transaction import StepTransaction
from moesaic.testing.scheduling import FakeRunner, create_request, create_scheduler, run_step, run_until_idle


def decoding_scheduler(max_tokens: int = 9, *, count: int = 2, **settings: int) -> tuple[Scheduler, FakeRunner]:
    """Return a scheduler whose ``count`` requests r0, r1, ... decode, each with one token so far."""
    scheduler, runner = create_scheduler(**settings), FakeRunner()
    for i in range(count):
        scheduler.add(create_request(f"r{i}", 3, max_tokens=max_tokens))
    run_step(scheduler, runner)
    return scheduler, runner


def run_ahead(scheduler: Scheduler, runner: FakeRunner) -> dict[str, list[int]]:
    """Run until nothing is left, each step planned before the tokens of the one before it are known."""
    received: dict[str, list[int]] = {}
    following: StepTransaction | None = None
    while scheduler.has_unfinished:
        tx = scheduler.step() if following is None else following
        tokens = runner.run(tx.plan, tx.sequences)
        following = scheduler.step() if tx.advance() else None
        if following is not None and not following.plan.num_rows:
            following.rollback()
            following = None
        for output in tx.commit(tokens):
            received.setdefault(output.request_id, []).extend(output.new_token_ids)
    return received


def texts(outputs: list[StepOutput]) -> dict[str, tuple[int, ...]]:
    return {o.request_id: o.new_token_ids for o in outputs}


@pytest.mark.parametrize("num_blocks", [11, 64])
@pytest.mark.parametrize("chunked", [False, True])
def test_tokens_are_those_of_steps_one_by_one(chunked: bool, num_blocks: int) -> None:
    def create() -> Scheduler:
        scheduler = create_scheduler(chunked=chunked, num_blocks=num_blocks, max_batch_size=4, max_tokens_per_step=8)
        for i, (num_prompt, max_tokens) in enumerate([(3, 9), (17, 5), (1, 1), (9, 0), (30, 7)]):
            scheduler.add(create_request(f"r{i}", num_prompt, max_tokens))
        return scheduler

    expected = run_until_idle(create(), FakeRunner())
    scheduler = create()
    assert run_ahead(scheduler, FakeRunner()) == expected
    assert scheduler.kv.pool.num_free == num_blocks
    assert (scheduler.counts.num_preemptions > 0) == (chunked and num_blocks == 11)


def test_the_next_step_goes_on_where_this_one_will_end() -> None:
    scheduler, runner = decoding_scheduler()
    first = scheduler.step()
    tokens = runner.run(first.plan, first.sequences)
    assert first.advance()
    second = scheduler.step()
    assert [row.start for row in first.plan.decode_rows] == [3, 3]
    assert [row.start for row in second.plan.decode_rows] == [4, 4]
    more = runner.run(second.plan, second.sequences)
    assert texts(first.commit(tokens)) == {"r0": (tokens[0],), "r1": (tokens[1],)}
    assert texts(second.commit(more)) == {"r0": (more[0],), "r1": (more[1],)}
    seq = scheduler.get("r0")
    assert seq is not None
    assert seq.output_token_ids.tolist()[1:] == [tokens[0], more[0]]


def test_the_last_token_by_length_is_not_followed_by_another() -> None:
    scheduler, runner = decoding_scheduler(max_tokens=2)
    first = scheduler.step()
    tokens = runner.run(first.plan, first.sequences)
    assert first.advance()
    second = scheduler.step()
    assert second.plan.num_rows == 0
    second.rollback()
    assert [o.finish_reason for o in first.commit(tokens)] == ["length", "length"]
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks


def test_a_request_that_stops_leaves_the_step_planned_meanwhile() -> None:
    """Its blocks stay fenced until that step, which may still write them, is over."""
    scheduler, runner = create_scheduler(), FakeRunner()
    scheduler.add(create_request("r0", 3, max_tokens=9, stop_token_ids=(7,)))
    scheduler.add(create_request("r1", 3, max_tokens=9))
    run_step(scheduler, runner)
    first = scheduler.step()
    assert first.advance()
    second = scheduler.step()
    ended, _ = first.commit([7, 8])
    assert (ended.finish_reason, ended.stop_reason, ended.new_token_ids) == ("stop", 7, (7,))
    pool = scheduler.kv.pool
    assert (pool.num_fenced, pool.num_free) == (2, pool.num_blocks - 2 - 2)
    assert texts(second.commit([1, 2])) == {"r1": (2,)}
    assert (pool.num_fenced, pool.num_free) == (0, pool.num_blocks - 2)


def begin_ahead(scheduler: Scheduler, runner: FakeRunner) -> tuple[StepTransaction, list[int], StepTransaction]:
    """Return an advanced step, its tokens, and the step planned behind it."""
    first = scheduler.step()
    tokens = runner.run(first.plan, first.sequences)
    assert first.advance()
    return first, tokens, scheduler.step()


@pytest.mark.parametrize("verb", ["abort", "preempt", "pause"])
@pytest.mark.parametrize("is_undone", [False, True])
def test_a_row_that_leaves_meanwhile_gets_nothing_and_loses_nothing(verb: str, is_undone: bool) -> None:
    scheduler, runner = decoding_scheduler()
    first, tokens, second = begin_ahead(scheduler, runner)
    assert getattr(scheduler, verb)("r0")
    if is_undone:
        second.rollback()
        first.rollback()
    else:
        assert texts(first.commit(tokens)) == {"r1": (tokens[1],)}
        second.commit(runner.run(second.plan, second.sequences))
    scheduler.resume("r0")
    received = run_until_idle(scheduler, runner)
    if verb == "abort":
        assert received["r0"] == []
    else:
        assert received["r0"] == [runner.token(seq) for seq in _lengths("r0", range(4, 12))]
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks


def _lengths(name: str, lengths: range) -> list[object]:
    """Return stand-ins for the sequence ``name`` with so many tokens, as ``FakeRunner.token`` reads them."""

    class Known:
        def __init__(self, num_tokens: int) -> None:
            self.seq_id, self.num_tokens = int(name[1:]), num_tokens

    return [Known(n) for n in lengths]


def test_undone_steps_leave_no_trace() -> None:
    scheduler, runner = decoding_scheduler()
    scheduler.add(create_request("late", 20, max_tokens=3))
    before = scheduler.fingerprint()
    first, _, second = begin_ahead(scheduler, runner)
    assert second.plan.chunks
    with pytest.raises(InvariantError, match="in a later step"):
        first.rollback()
    second.rollback()
    first.rollback()
    assert scheduler.fingerprint() == before


def test_steps_are_committed_in_order() -> None:
    scheduler, runner = decoding_scheduler()
    first, tokens, second = begin_ahead(scheduler, runner)
    with pytest.raises(InvariantError, match="is to be committed before"):
        second.commit(tokens)
    with pytest.raises(InvariantError, match="another step has advanced"):
        second.advance()
    assert len(first.commit(tokens)) == 2
    with pytest.raises(InvariantError, match="it is over"):
        first.advance()


def test_a_step_whose_commit_may_preempt_does_not_advance() -> None:
    scheduler, _ = decoding_scheduler(count=3, num_blocks=5)
    tx = scheduler.step()
    before = scheduler.fingerprint()
    assert not tx.advance()
    assert scheduler.fingerprint() == before
    tx.rollback()


def test_nothing_is_swapped_out_while_a_step_has_advanced() -> None:
    scheduler, runner = decoding_scheduler(num_swap_blocks=8)
    first, tokens, second = begin_ahead(scheduler, runner)
    second.rollback()
    assert not scheduler.preempt("r0", by="swap")
    first.commit(tokens)
    assert scheduler.preempt("r0", by="swap")
    before = scheduler.step()
    assert not before.advance()
