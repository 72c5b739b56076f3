import pytest

from moesaic.config import SchedulingPolicy
from moesaic.errors import QueueFullError
from moesaic.sched.ordering import Ordering
from moesaic.sequence import SeqId
from moesaic.testing.scheduling import FakeRunner, create_request, create_scheduler, run_step, run_until_idle


def order_of_finish(scheduler: object, requests: list[tuple[str, int, int]]) -> list[str]:
    for name, length, priority in requests:
        scheduler.add(create_request(name, length, max_tokens=1, priority=priority))  # type: ignore[attr-defined]
    finished: list[str] = []
    while scheduler.has_unfinished:  # type: ignore[attr-defined]
        finished += [o.request_id for o in run_step(scheduler, FakeRunner())]  # type: ignore[arg-type]
    return finished


def test_first_come_first_served_by_default() -> None:
    scheduler = create_scheduler(max_batch_size=1, max_tokens_per_step=8)
    assert order_of_finish(scheduler, [("a", 8, 0), ("b", 2, 0), ("c", 4, 0)]) == ["a", "b", "c"]


def test_lower_priority_values_go_first() -> None:
    scheduler = create_scheduler(max_batch_size=1, max_tokens_per_step=8, scheduling_policy="priority")
    assert order_of_finish(scheduler, [("a", 4, 2), ("b", 4, -1), ("c", 4, 1), ("d", 4, -1)]) == ["b", "d", "c", "a"]


def test_shorter_prompts_go_first() -> None:
    scheduler = create_scheduler(max_batch_size=1, max_tokens_per_step=8, scheduling_policy="shortest-prefill-first")
    assert order_of_finish(scheduler, [("a", 8, 0), ("b", 2, 0), ("c", 4, 0)]) == ["b", "c", "a"]


@pytest.mark.parametrize(("policy", "length", "priority"), [("priority", 4, 5), ("shortest-prefill-first", 40, 0)])
def test_nobody_waits_for_ever_behind_an_endless_stream(policy: SchedulingPolicy, length: int, priority: int) -> None:
    scheduler = create_scheduler(max_batch_size=1, max_tokens_per_step=8, scheduling_policy=policy, aging_steps=10)
    scheduler.add(create_request("patient", length, max_tokens=1, priority=priority))
    for step in range(200):
        while len(scheduler.waiting) < 3:
            scheduler.add(create_request(f"s{step}-{len(scheduler.waiting)}", 4, max_tokens=1))
        if "patient" in {o.request_id for o in run_step(scheduler, FakeRunner())}:
            return
    raise AssertionError("starved")


def test_a_rank_counts_waiting_as_priority() -> None:
    rank = Ordering("priority", aging_steps=10).rank
    old = rank(SeqId(0), priority=2, num_prompt_tokens=1, step=0)
    assert rank(SeqId(1), priority=1, num_prompt_tokens=1, step=9) < old
    assert rank(SeqId(2), priority=1, num_prompt_tokens=1, step=10) > old


def test_more_than_may_wait_are_refused() -> None:
    scheduler = create_scheduler(max_waiting_requests=2)
    for name in "ab":
        scheduler.add(create_request(name))
    with pytest.raises(QueueFullError, match="2 requests wait"):
        scheduler.add(create_request("c"))
    assert set(run_until_idle(scheduler, FakeRunner())) == {"a", "b"}
