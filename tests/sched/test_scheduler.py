"""Transactions: what commits, what rolls back, and what an abort leaves."""

import pytest

from moesaic.errors import CapacityError, DuplicateRequestError, InvariantError, RequestTooLargeError
from moesaic.sched import scheduler as scheduler_module
from moesaic.sched.scheduler import Scheduler
from moesaic.sequence import Sequence, SequenceStatus
from moesaic.testing.scheduling import FakeRunner, create_request, create_scheduler, run_step, run_until_idle


def busy_scheduler(*, chunked: bool = True, num_blocks: int = 64) -> tuple[Scheduler, FakeRunner]:
    """Return a scheduler with decoding, half-prefilled and waiting sequences."""
    scheduler, runner = create_scheduler(chunked=chunked, num_blocks=num_blocks, max_batch_size=4), FakeRunner()
    scheduler.add(create_request("a", 3, max_tokens=9))
    scheduler.add(create_request("b", 4, max_tokens=9))
    run_step(scheduler, runner)
    scheduler.add(create_request("c", 30, max_tokens=3))
    scheduler.add(create_request("d", 30, max_tokens=3))
    run_step(scheduler, runner)
    scheduler.add(create_request("e", 5, max_tokens=3))
    return scheduler, runner


@pytest.mark.parametrize("chunked", [False, True])
def test_leaving_the_step_without_commit_changes_nothing(chunked: bool) -> None:
    scheduler, runner = busy_scheduler(chunked=chunked)
    for _ in range(8):
        before = scheduler.fingerprint()
        with pytest.raises(RuntimeError, match="forward failed"), scheduler.step():
            raise RuntimeError("forward failed")
        assert scheduler.fingerprint() == before
        run_step(scheduler, runner)
    assert scheduler.counts.num_rolled_back_steps == 8


def test_planning_changes_no_sequence() -> None:
    scheduler, _ = busy_scheduler()
    marks = [s.mark() for s in scheduler.sequences]
    with scheduler.step() as tx:
        assert tx.plan.num_rows > 0
        assert [s.mark() for s in scheduler.sequences] == marks


def test_commit_and_rollback_are_idempotent() -> None:
    scheduler, runner = busy_scheduler()
    tx = scheduler.step()
    tokens = runner.run(tx.plan, tx.sequences)
    assert tx.commit(tokens)
    after = scheduler.fingerprint()
    assert tx.commit(tokens) == []
    tx.rollback()
    assert scheduler.fingerprint() == after


def test_a_step_that_was_rolled_back_cannot_be_committed() -> None:
    scheduler, runner = busy_scheduler()
    tx = scheduler.step()
    tx.rollback()
    before = scheduler.fingerprint()
    with pytest.raises(InvariantError, match="was rolled back"):
        tx.commit(runner.run(tx.plan, tx.sequences))
    assert scheduler.fingerprint() == before


def test_rollback_after_an_error_does_not_hide_it() -> None:
    scheduler, _ = busy_scheduler()

    def fail_after_rollback() -> None:
        with scheduler.step() as tx:
            tx.rollback()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_after_rollback()


def test_wrong_number_of_tokens_moves_nothing() -> None:
    scheduler, runner = busy_scheduler()
    before = scheduler.fingerprint()
    with pytest.raises(InvariantError, match="samples 2 rows but got 1"), scheduler.step() as tx:
        tx.commit(runner.run(tx.plan, tx.sequences)[:1])
    assert scheduler.fingerprint() == before


def fail_on_call(number: int) -> object:
    """Return a function that raises on its n-th call and else calls the original given as first argument."""
    calls = iter(range(1, 1000))

    def wrap(original: object) -> object:
        def run(*args: object, **kwargs: object) -> object:
            if next(calls) == number:
                raise OSError("planted fault")
            return original(*args, **kwargs)  # type: ignore[operator]

        return run

    return wrap


COMMIT_STEPS = [
    (Sequence, "advance_decode"),
    (Sequence, "advance_prefill"),
    (Sequence, "append_token"),
    (Sequence, "restart"),
    (scheduler_module.PagedKVCache, "commit_sequence_reservation"),
    (scheduler_module.PagedKVCache, "free_sequences"),
    (scheduler_module.RunningSet, "regroup"),
    (scheduler_module.RunningSet, "discard"),
    (scheduler_module, "choose_victims"),
]


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(("owner", "name"), COMMIT_STEPS, ids=[n for _, n in COMMIT_STEPS])
def test_a_fault_anywhere_in_commit_leaves_the_state_before_the_step(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, number: int
) -> None:
    """With a tight pool, so that finishing, preempting and growing all happen; then the run ends as if undisturbed."""
    expected = run_until_idle(busy_scheduler(num_blocks=14)[0], FakeRunner())
    scheduler, runner = busy_scheduler(num_blocks=14)
    got: dict[str, list[int]] = {}
    num_faults = 0
    for _ in range(500):
        if not scheduler.has_unfinished:
            break
        before = scheduler.fingerprint()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail_on_call(number)(getattr(owner, name)))  # type: ignore[operator]
            try:
                outputs = run_step(scheduler, runner)
            except OSError:
                num_faults += 1
                assert scheduler.fingerprint() == before
                outputs = None
        for output in outputs or run_step(scheduler, runner):
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert num_faults > 0 or number > 1
    tail = {k: v[-len(got.get(k, ())) :] if got.get(k) else [] for k, v in expected.items()}
    assert {k: got.get(k, []) for k in tail} == tail


def test_a_fault_while_leasing_returns_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, runner = busy_scheduler()
    before = scheduler.fingerprint()
    name = "ensure_sequence_capacity"
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.kv, name, fail_on_call(2)(getattr(scheduler.kv, name)))  # type: ignore[operator]
        with pytest.raises(OSError, match="planted fault"):
            scheduler.step()
    assert scheduler.fingerprint() == before
    run_until_idle(scheduler, runner)


def test_two_steps_in_flight_never_share_a_sequence() -> None:
    scheduler, runner = busy_scheduler()
    scheduler.add(create_request("f", 4))
    first = scheduler.step()
    second = scheduler.step()
    assert not set(first.sequences) & set(second.sequences)
    second.commit(runner.run(second.plan, second.sequences))
    first.commit(runner.run(first.plan, first.sequences))
    scheduler.check()
    run_until_idle(scheduler, runner)


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize("victim", ["a", "c", "d", "e"])
def test_abort_in_flight_yields_no_token_and_frees_blocks_when_the_step_ends(victim: str, ending: str) -> None:
    scheduler, runner = busy_scheduler()
    tx = scheduler.step()
    num_written = sum(scheduler.kv.num_blocks(s) for s in tx.sequences.values() if s.request.request_id == victim)
    assert scheduler.abort(victim)
    assert scheduler.kv.pool.num_fenced == num_written
    outputs = tx.commit(runner.run(tx.plan, tx.sequences)) if ending == "commit" else []
    tx.rollback()
    assert victim not in {o.request_id for o in outputs}
    assert [(e.request_id, e.finish_reason) for e in scheduler.take_events()] == [(victim, "abort")]
    assert scheduler.kv.pool.num_fenced == 0
    scheduler.check()
    run_until_idle(scheduler, runner)
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks


@pytest.mark.parametrize("victim", ["a", "c", "e"])
def test_abort_between_steps_frees_at_once(victim: str) -> None:
    scheduler, runner = busy_scheduler()
    assert scheduler.abort(victim)
    assert not scheduler.abort(victim)
    scheduler.check()
    tokens = run_until_idle(scheduler, runner)
    assert tokens.get(victim, []) == []
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks


def test_aborting_an_unknown_request_is_a_no_op() -> None:
    scheduler, _ = busy_scheduler()
    before = scheduler.fingerprint()
    assert not scheduler.abort("nobody")
    assert scheduler.fingerprint() == before


def test_a_duplicate_id_is_refused_until_the_first_is_over() -> None:
    scheduler, runner = create_scheduler(), FakeRunner()
    scheduler.add(create_request("a", 3, max_tokens=1))
    with pytest.raises(DuplicateRequestError, match="'a' is in use"):
        scheduler.add(create_request("a", 3))
    run_until_idle(scheduler, runner)
    scheduler.add(create_request("a", 3))


@pytest.mark.parametrize("total", range(62, 67))
@pytest.mark.parametrize("chunked", [False, True])
def test_every_length_around_capacity_is_admitted_exactly_if_it_can_be_served(chunked: bool, total: int) -> None:
    """16 blocks of 4: prompt + output of 65 needs 64 positions, since the last token is never written."""
    for max_tokens in (1, 3):
        scheduler = create_scheduler(num_blocks=16, chunked=chunked)
        request = create_request("r", total - max_tokens, max_tokens=max_tokens)
        if total > 65:
            with pytest.raises(RequestTooLargeError, match="pool has 16"):
                scheduler.add(request)
            continue
        scheduler.add(request)
        assert len(run_until_idle(scheduler, FakeRunner())["r"]) == max_tokens


def test_max_tokens_zero_computes_the_prompt_and_yields_no_token() -> None:
    scheduler = create_scheduler()
    scheduler.add(create_request("r", 20, max_tokens=0))
    outputs = []
    while scheduler.has_unfinished:
        outputs += run_step(scheduler, FakeRunner())
    assert [(o.new_token_ids, o.finish_reason) for o in outputs] == [((), "length")]


def test_an_eos_token_ends_the_request() -> None:
    scheduler, runner = create_scheduler(eos_token_ids=(5,)), FakeRunner()
    seq = scheduler.add(create_request("r", 4, max_tokens=50))
    with scheduler.step() as tx:
        (output,) = tx.commit([5])
    assert (output.finish_reason, output.stop_reason, seq.status) == ("stop", None, SequenceStatus.FINISHED)
    assert not scheduler.has_unfinished
    del runner


def test_an_idle_step_is_empty_and_counts_as_nothing() -> None:
    scheduler = create_scheduler()
    with scheduler.step() as tx:
        assert tx.plan.num_rows == 0
    assert (scheduler.counts.num_steps, scheduler.counts.num_rolled_back_steps) == (0, 0)


def test_leases_never_exceed_the_pool() -> None:
    scheduler = create_scheduler(num_blocks=4)
    with pytest.raises(CapacityError):
        scheduler.kv.pool.reserve(5)


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_step_that_lost_a_row_leaves_the_row_s_next_lease_alone(ending: str) -> None:
    """The request is paused in flight and is in a second step when the first one ends."""
    scheduler, runner = create_scheduler(), FakeRunner()
    scheduler.add(create_request("a", 6))
    first = scheduler.step()
    tokens = runner.run(first.plan, first.sequences)
    scheduler.pause("a")
    scheduler.resume("a")
    second = scheduler.step()
    (seq,) = second.sequences.values()
    first.commit(tokens) if ending == "commit" else first.rollback()
    assert scheduler.kv.num_blocks(seq) == 2
    second.rollback()
    assert scheduler.kv.num_blocks(seq) == 0
    scheduler.check()


@pytest.mark.parametrize("chunked", [True, False])
def test_newcomers_leave_the_running_a_block_to_grow(chunked: bool) -> None:
    scheduler, runner = create_scheduler(num_blocks=4, block_size=1, chunked=chunked), FakeRunner()
    scheduler.add(create_request("a", 2, max_tokens=3))
    run_step(scheduler, runner)
    scheduler.add(create_request("b", 1, max_tokens=1))
    with scheduler.step() as tx:
        assert (len(tx.plan.decode_rows), tx.plan.chunks) == (1, ())


def test_newcomers_in_flight_count_as_rows() -> None:
    scheduler = create_scheduler(max_batch_size=1)
    scheduler.add(create_request("a"))
    scheduler.add(create_request("b"))
    with scheduler.step() as first, scheduler.step() as second:
        assert (first.plan.num_rows, second.plan.num_rows) == (1, 0)
