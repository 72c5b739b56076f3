"""Requests of one prompt: who computes it, who begins with its KV, and what is left when one of them goes."""

from typing import Any

import pytest

from moesaic.kv.table import PagedKVCache
from moesaic.sched.preempt import Holder, choose_victims
from moesaic.sched.running import RunningSet
from moesaic.sched.scheduler import Scheduler
from moesaic.sequence import Rank, SeqId, Sequence
from moesaic.testing.scheduling import (
    FakeRunner,
    chunk_lengths,
    create_request,
    create_scheduler,
    run_step,
    run_until_idle,
)

BOTH = pytest.mark.parametrize("chunked", [False, True])
NUM_PROMPT, BLOCK_SIZE = 10, 4
NUM_SHARED = 8
"""Tokens of a prompt of 10 that fill blocks of 4."""


def add_choices(
    scheduler: Scheduler, count: int = 4, *, max_tokens: int = 5, name: str = "c", **params: Any
) -> list[Sequence]:
    """Add requests c0, c1, … of one prompt."""
    return [
        scheduler.add(
            create_request(f"{name}{i}", NUM_PROMPT, max_tokens, sibling_of=f"{name}0" if i else None, **params)
        )
        for i in range(count)
    ]


def run_until_decoding(scheduler: Scheduler, runner: FakeRunner, request_id: str) -> None:
    while (seq := scheduler.get(request_id)) is None or not seq.num_output_tokens:
        run_step(scheduler, runner)


@BOTH
def test_the_prompt_is_computed_once_and_the_tokens_are_those_of_independent_requests(chunked: bool) -> None:
    alone, shared = create_scheduler(chunked=chunked), create_scheduler(chunked=chunked)
    for i in range(4):
        alone.add(create_request(f"c{i}", NUM_PROMPT, 5))
    add_choices(shared)
    runner = FakeRunner()
    assert run_until_idle(shared, runner) == run_until_idle(alone, FakeRunner())
    assert shared.counts.num_prompt_tokens == NUM_PROMPT + 3 * (NUM_PROMPT - NUM_SHARED)
    assert shared.counts.num_shared_tokens == 3 * NUM_SHARED
    assert [chunk_lengths(runner.plans, i) for i in (1, 2, 3)] == [[2], [2], [2]]
    assert shared.kv.pool.num_free == shared.kv.pool.num_blocks


@BOTH
def test_siblings_hold_the_same_blocks_and_each_its_own_end(chunked: bool) -> None:
    scheduler, runner = create_scheduler(chunked=chunked), FakeRunner()
    choices = add_choices(scheduler)
    run_until_decoding(scheduler, runner, "c3")
    tables = [scheduler.kv.block_ids(seq) for seq in choices]
    assert len({table[:2] for table in tables}) == 1
    assert len({table[2] for table in tables}) == 4
    assert scheduler.kv.pool.num_blocks - scheduler.kv.pool.num_free == 2 + 4


def test_siblings_wait_until_the_prompt_is_committed() -> None:
    scheduler, runner = create_scheduler(chunk_size=4), FakeRunner()
    add_choices(scheduler, 2)
    run_step(scheduler, runner)
    run_step(scheduler, runner)
    assert (scheduler.num_waiting, len(scheduler.waiting)) == (0, 0)
    sibling = scheduler.get("c1")
    assert sibling is not None
    assert sibling.committed_kv_tokens == NUM_SHARED


def test_a_leader_that_ends_with_its_first_token_leaves_its_prompt_to_the_others() -> None:
    scheduler, runner = create_scheduler(), FakeRunner()
    add_choices(scheduler, 8, max_tokens=1)
    assert all(len(tokens) == 1 for tokens in run_until_idle(scheduler, runner).values())
    assert scheduler.counts.num_shared_tokens == 7 * NUM_SHARED


def test_with_one_row_each_choice_begins_where_the_one_before_it_ended() -> None:
    scheduler, runner = create_scheduler(max_batch_size=1), FakeRunner()
    add_choices(scheduler, 3)
    run_until_idle(scheduler, runner)
    assert scheduler.counts.num_shared_tokens == 2 * NUM_SHARED
    assert max(p.num_rows for p in runner.plans) == 1


@pytest.mark.parametrize("verb", ["abort", "pause"])
def test_if_the_leader_leaves_the_first_sibling_computes_the_prompt(verb: str) -> None:
    scheduler, runner = create_scheduler(chunk_size=4), FakeRunner()
    add_choices(scheduler, 3)
    run_step(scheduler, runner)
    getattr(scheduler, verb)("c0")
    assert [s.request.request_id for s in scheduler.waiting] == ["c1"]
    tokens = run_until_idle(scheduler, runner)
    assert (len(tokens["c1"]), len(tokens["c2"])) == (5, 5)
    assert scheduler.counts.num_shared_tokens == NUM_SHARED
    scheduler.resume("c0")
    run_until_idle(scheduler, runner)
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks


def test_a_sibling_can_leave_while_it_is_held_back() -> None:
    scheduler, runner = create_scheduler(chunk_size=4), FakeRunner()
    add_choices(scheduler, 3)
    run_step(scheduler, runner)
    scheduler.abort("c1")
    scheduler.pause("c2")
    run_until_idle(scheduler, runner)
    assert scheduler.resume("c2")
    assert len(run_until_idle(scheduler, runner)["c2"]) == 5
    assert scheduler.counts.num_shared_tokens == 0


def test_a_sibling_does_not_pass_who_came_first() -> None:
    scheduler, runner = create_scheduler(max_batch_size=2, chunk_size=16), FakeRunner()
    scheduler.add(create_request("c0", NUM_PROMPT, 20))
    scheduler.add(create_request("x", 4, 3))
    scheduler.add(create_request("y", 4, 3))
    scheduler.add(create_request("c1", NUM_PROMPT, 3, sibling_of="c0"))
    order = []
    while scheduler.has_unfinished:
        run_step(scheduler, runner)
        running = [s.request.request_id for s in scheduler.running.all()]
        order += [name for name in running if name not in order]
    assert order == ["c0", "x", "y", "c1"]
    assert scheduler.counts.num_shared_tokens == NUM_SHARED


def test_more_siblings_than_lanes_begin_at_once_if_one_step_finishes_them() -> None:
    scheduler, runner = (
        create_scheduler(max_batch_size=16, max_tokens_per_step=32, max_partial_prefills=1, chunk_size=16),
        FakeRunner(),
    )
    add_choices(scheduler, 9)
    run_step(scheduler, runner)
    assert len(scheduler.running.lanes) == 8
    run_step(scheduler, runner)
    assert not scheduler.running.lanes
    run_until_idle(scheduler, runner)


def test_no_more_siblings_begin_than_one_step_has_tokens_for() -> None:
    scheduler, runner = (
        create_scheduler(max_batch_size=8, max_tokens_per_step=12, max_partial_prefills=1, chunk_size=4),
        FakeRunner(),
    )
    add_choices(scheduler, 8)
    most = 0
    while scheduler.has_unfinished:
        run_step(scheduler, runner)
        most = max(most, len(scheduler.running.lanes))
    assert most == 6  # the leader's last two tokens and two of each other make a step of 12
    assert scheduler.counts.num_shared_tokens == 7 * NUM_SHARED


def test_scores_of_the_prompt_and_prompts_within_one_block_are_not_shared() -> None:
    scheduler = create_scheduler()
    add_choices(scheduler, 2, prompt_logprobs=0)
    scheduler.add(create_request("s0", BLOCK_SIZE))
    scheduler.add(create_request("s1", BLOCK_SIZE, sibling_of="s0"))
    scheduler.add(create_request("t1", NUM_PROMPT, sibling_of="nobody"))
    scheduler.add(create_request("u", NUM_PROMPT + 1, sibling_of="c0"))
    assert len(scheduler.siblings) == 0
    run_until_idle(scheduler, FakeRunner())


@BOTH
def test_a_full_pool_preempts_and_everything_ends_with_the_right_tokens(chunked: bool) -> None:
    for num_blocks in range(7, 14):
        for num_swap_blocks in (0, 20):
            scheduler = create_scheduler(num_blocks=num_blocks, chunked=chunked, num_swap_blocks=num_swap_blocks)
            roomy = create_scheduler(chunked=chunked)
            for one in (scheduler, roomy):
                add_choices(one, 4, max_tokens=14)
                one.add(create_request("x0", 9, 9))
            assert run_until_idle(scheduler, FakeRunner()) == run_until_idle(roomy, FakeRunner())
            assert scheduler.kv.pool.num_free == num_blocks


def test_who_shares_blocks_is_not_swapped() -> None:
    scheduler, runner = create_scheduler(num_swap_blocks=20), FakeRunner()
    add_choices(scheduler, 2)
    run_until_decoding(scheduler, runner, "c1")
    assert not scheduler.preempt("c0", by="swap")
    assert scheduler.preempt("c1")
    assert scheduler.preempt("c0", by="swap")
    run_until_idle(scheduler, runner)


def test_shared_blocks_count_as_free_once_the_last_holder_is_a_victim() -> None:
    def holder(number: int, num_blocks: int, *, is_needy: bool = False, head: tuple[int, ...] = ()) -> Holder:
        rank = Rank(0, SeqId(number))
        return Holder(rank, is_needy, num_blocks, 10, is_movable=True, shared_head=head)  # type: ignore[arg-type]

    first = holder(0, 3, is_needy=True)
    twins = [holder(1, 0, head=(7, 8)), holder(2, 0, head=(7, 8))]
    assert choose_victims([first, *twins], 0) == (2, 1)
    assert choose_victims([first, *twins, holder(3, 1)], 0) == (3,)


def test_as_many_go_as_the_first_need_when_victims_share_blocks() -> None:
    scheduler, runner = (
        create_scheduler(num_blocks=49, block_size=1, max_tokens_per_step=64, chunk_size=64),
        FakeRunner(),
    )
    for name, num_prompt, leader in (("x0", 20, None), ("x1", 20, None), ("c0", 5, None), ("c1", 5, "c0")):
        scheduler.add(create_request(name, num_prompt, 9, sibling_of=leader))
    run_step(scheduler, runner)
    run_step(scheduler, runner)
    assert scheduler.counts.num_shared_tokens == 4
    assert [s.request.request_id for s in scheduler.running.all()] == ["x0", "x1"]
    assert len(scheduler.step().plan.decode_rows) == 2


FORK_STEPS = [
    (PagedKVCache, "fork_sequence"),
    (PagedKVCache, "commit_sequence_reservation"),
    (PagedKVCache, "free_sequences"),
    (Sequence, "advance_prefill"),
    (RunningSet, "begin"),
]


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(("owner", "name"), FORK_STEPS, ids=[n for _, n in FORK_STEPS])
def test_a_fault_in_a_fork_leaves_the_state_before_the_step(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, number: int
) -> None:
    scheduler, runner = create_scheduler(), FakeRunner()
    add_choices(scheduler, 4, max_tokens=2)
    calls, original, num_faults = 0, getattr(owner, name), 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise OSError("planted fault")
        return original(*args, **kwargs)

    while scheduler.has_unfinished:
        before, calls = scheduler.fingerprint(), 0
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            try:
                run_step(scheduler, runner)
            except OSError:
                num_faults += 1
                assert scheduler.fingerprint() == before
                patch.undo()
                run_step(scheduler, runner)
    assert num_faults or (name == "free_sequences" and number > 1)
    assert scheduler.counts.num_shared_tokens == 3 * NUM_SHARED
