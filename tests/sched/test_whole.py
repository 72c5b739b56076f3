"""The default policy: whole prompts, and a long one never blocks the queue."""

from itertools import pairwise

from moesaic.testing.scheduling import (
    FakeRunner,
    chunk_lengths,
    create_request,
    create_scheduler,
    run_step,
    run_until_idle,
)


def test_prompts_run_whole_beside_decode_rows() -> None:
    scheduler, runner = create_scheduler(chunked=False), FakeRunner()
    scheduler.add(create_request("a", 5))
    run_step(scheduler, runner)
    scheduler.add(create_request("b", 20))
    run_step(scheduler, runner)
    plan = runner.plans[-1]
    assert [r.seq_id for r in plan.decode_rows] == [0]
    assert [(c.seq_id, c.num_tokens, c.is_terminal) for c in plan.chunks] == [(1, 20, True)]


def test_a_prompt_longer_than_a_step_runs_alone() -> None:
    scheduler, runner = create_scheduler(chunked=False, num_blocks=100), FakeRunner()
    scheduler.add(create_request("a", 4, max_tokens=6))
    run_step(scheduler, runner)
    scheduler.add(create_request("long", 100, max_tokens=2))
    run_step(scheduler, runner)
    plan = runner.plans[-1]
    assert (plan.num_rows, plan.num_tokens) == (1, 100)
    run_step(scheduler, runner)
    assert len(runner.plans[-1].decode_rows) == 2


def test_a_long_prompt_never_blocks_the_queue_behind_it() -> None:
    scheduler, runner = create_scheduler(chunked=False, num_blocks=100), FakeRunner()
    scheduler.add(create_request("first", 4, max_tokens=30))
    run_step(scheduler, runner)
    scheduler.add(create_request("long", 100, max_tokens=2))
    scheduler.add(create_request("behind", 4, max_tokens=2))
    first_outputs = [o.request_id for _ in range(2) for o in run_step(scheduler, runner)]
    assert {"long", "behind", "first"} <= set(first_outputs)


def test_decode_rows_wait_at_most_one_step_for_long_prompts() -> None:
    scheduler, runner = create_scheduler(chunked=False, num_blocks=500), FakeRunner()
    scheduler.add(create_request("stream", 4, max_tokens=30))
    run_step(scheduler, runner)
    for i in range(5):
        scheduler.add(create_request(f"long{i}", 60, max_tokens=1))
    got = [any(o.request_id == "stream" for o in run_step(scheduler, runner)) for _ in range(10)]
    assert all(a or b for a, b in pairwise(got))


def test_younger_prompts_pass_one_without_blocks_only_for_a_while() -> None:
    scheduler, runner = create_scheduler(chunked=False, num_blocks=10, threshold=3), FakeRunner()
    scheduler.add(create_request("holder", 16, max_tokens=20))
    run_step(scheduler, runner)
    scheduler.add(create_request("big", 28, max_tokens=1))
    for i in range(40):
        scheduler.add(create_request(f"small{i}", 4, max_tokens=1))
    order = []
    while scheduler.has_unfinished:
        order += [o.request_id for o in run_step(scheduler, runner) if o.finish_reason]
    assert "small0" in order[:1]
    assert order.index("big") < order.index("small39")


def test_tokens_do_not_depend_on_the_policy() -> None:
    lengths = [3, 50, 1, 17, 64, 9]
    tokens = []
    for chunked in (False, True):
        scheduler = create_scheduler(chunked=chunked, num_blocks=40)
        for i, length in enumerate(lengths):
            scheduler.add(create_request(f"r{i}", length, max_tokens=1 + i))
        tokens.append(run_until_idle(scheduler, FakeRunner()))
    assert tokens[0] == tokens[1]


def test_whole_means_one_chunk_per_prompt() -> None:
    scheduler, runner = create_scheduler(chunked=False, num_blocks=100), FakeRunner()
    for i, length in enumerate([3, 50, 33, 100]):
        scheduler.add(create_request(f"r{i}", length, max_tokens=2))
    run_until_idle(scheduler, runner)
    assert [chunk_lengths(runner.plans, i) for i in range(4)] == [[3], [50], [33], [100]]
