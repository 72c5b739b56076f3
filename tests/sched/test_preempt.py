from moesaic.sched.preempt import Holder, choose_victims
from moesaic.sequence import Rank, SeqId
from moesaic.testing.scheduling import FakeRunner, create_request, create_scheduler, run_step, run_until_idle


def holder(seq_id: int, *, needs: bool = False, blocks: int = 2, cost: int = 8, movable: bool = True) -> Holder:
    return Holder(Rank(0, SeqId(seq_id)), needs, blocks, cost, movable)


def test_nobody_is_preempted_while_blocks_suffice() -> None:
    assert choose_victims([holder(0, needs=True), holder(1, needs=True)], 2) == ()


def test_victims_are_younger_than_the_one_in_need() -> None:
    assert choose_victims([holder(0), holder(1, needs=True)], 0) == ()
    assert choose_victims([holder(0, needs=True), holder(1)], 0) == (1,)


def test_the_cheapest_to_recompute_goes_first() -> None:
    holders = [holder(0, needs=True), holder(1, cost=3), holder(2, cost=9), holder(3, cost=5)]
    assert choose_victims(holders, 0) == (1,)


def test_among_equals_the_youngest_goes_first() -> None:
    assert choose_victims([holder(0, needs=True), holder(1), holder(2)], 0) == (2,)


def test_a_step_in_flight_keeps_its_rows() -> None:
    assert choose_victims([holder(0, needs=True), holder(1, movable=False), holder(2, cost=99)], 0) == (2,)
    assert choose_victims([holder(0, needs=True), holder(1, movable=False)], 0) == ()


def test_a_victim_is_no_longer_in_need() -> None:
    assert choose_victims([holder(0, needs=True), holder(1, needs=True, blocks=1)], 0) == (1,)


def test_a_preempted_sequence_repeats_no_token_and_keeps_its_place() -> None:
    runner = FakeRunner()
    roomy = create_scheduler(num_blocks=100)
    tight = create_scheduler(num_blocks=7)
    for scheduler in (roomy, tight):
        for i in range(3):
            scheduler.add(create_request(f"r{i}", 7, max_tokens=12))
    expected = run_until_idle(roomy, FakeRunner())
    got = run_until_idle(tight, runner)
    assert tight.counts.num_preemptions > 0
    assert tight.counts.num_recomputed_tokens > 0
    assert got == expected


def test_a_victim_is_served_before_later_arrivals() -> None:
    scheduler, runner = create_scheduler(num_blocks=6, max_batch_size=4), FakeRunner()
    scheduler.add(create_request("old", 7, max_tokens=14))
    scheduler.add(create_request("victim", 7, max_tokens=14))
    while scheduler.counts.num_preemptions == 0:
        assert run_step(scheduler, runner)
    scheduler.add(create_request("late", 3, max_tokens=1))
    order = [s.request.request_id for s in scheduler.waiting]
    assert order == ["victim", "late"]
    finished: list[str] = []
    while scheduler.has_unfinished:
        finished += [o.request_id for o in run_step(scheduler, runner) if o.finish_reason]
    assert len(finished) == 3
