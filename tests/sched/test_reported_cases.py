"""Situations in which serving engines were reported to hang, starve, lose or leak; see ``docs/verification.md``."""

from itertools import pairwise

import pytest

from moesaic.errors import CapacityError, RequestTooLargeError
from moesaic.kv.geometry import blocks_for_tokens
from moesaic.request import StepOutput
from moesaic.sched.plan import StepPlan
from moesaic.sched.scheduler import Scheduler
from moesaic.testing.scheduling import (
    FakeRunner,
    chunk_lengths,
    create_request,
    create_scheduler,
    run_step,
    run_until_idle,
)

# Admission and the pool agree


def test_a_request_of_17_blocks_is_refused_by_a_pool_of_16_and_leaves_a_small_one_alone() -> None:
    scheduler = create_scheduler(num_blocks=16)
    with pytest.raises(RequestTooLargeError, match=r"takes 17 KV blocks .* pool has 16"):
        scheduler.add(create_request("big", 65, max_tokens=2))
    scheduler.add(create_request("small", 4, max_tokens=2))
    assert len(run_until_idle(scheduler, FakeRunner())["small"]) == 2


@pytest.mark.parametrize("chunked", [False, True])
def test_a_prompt_of_1000_with_24_to_come_is_refused_by_a_pool_of_1008_tokens(chunked: bool) -> None:
    """It fits when it arrives and would get stuck half-way: 1023 positions in 63 blocks of 16."""
    scheduler = create_scheduler(num_blocks=63, block_size=16, chunked=chunked, chunk_size=512, max_tokens_per_step=600)
    with pytest.raises(RequestTooLargeError, match="1000 tokens and max_tokens is 24: that takes 64 KV blocks"):
        scheduler.add(create_request("r", 1000, max_tokens=24))
    scheduler.add(create_request("r", 1000, max_tokens=9))  # 1008: the last token is never written
    assert len(run_until_idle(scheduler, FakeRunner())["r"]) == 9


# Nobody holds blocks against anybody


@pytest.mark.parametrize("num_swap_blocks", [0, 10])
def test_two_half_loaded_prompts_that_each_need_one_more_block_both_finish(num_swap_blocks: int) -> None:
    scheduler, runner = create_scheduler(num_blocks=6, chunk_size=4, num_swap_blocks=num_swap_blocks), FakeRunner()
    for name in "ab":
        scheduler.add(create_request(name, 20, max_tokens=2))
    for _ in range(3):
        run_step(scheduler, runner)
    # Both hold 3 of the 6 blocks, full; so that one goes on, the younger gave its blocks back with the commit.
    assert sorted((c.seq_id, c.start + c.num_tokens) for c in runner.plans[-1].chunks) == [(0, 12), (1, 12)]
    assert [s.request.request_id for s in scheduler.running.all()] == ["a"]
    tokens = run_until_idle(scheduler, runner, max_steps=50)
    assert {k: len(v) for k, v in tokens.items()} == {"a": 2, "b": 2}
    assert scheduler.counts.num_preemptions == 1


# Nobody starves


def gaps(plans: list[StepPlan], seq_id: int) -> list[int]:
    """Return the distances in steps between the chunks of one sequence."""
    steps = [i for i, p in enumerate(plans) if any(c.seq_id == seq_id for c in p.chunks)]
    return [b - a for a, b in pairwise(steps)]


def test_a_newcomer_is_served_within_the_threshold_under_an_endless_stream_of_decoders() -> None:
    """Four of six rows decode and are replaced at once when they end; two tokens a step are left for prompts."""
    scheduler = create_scheduler(
        num_blocks=1000, block_size=1, max_batch_size=6, max_tokens_per_step=7, threshold=4, max_partial_prefills=4
    )
    runner = FakeRunner()
    for step in range(20):
        refill(scheduler, step, num_running=4)
        run_step(scheduler, runner)
    newcomer, arrival = scheduler.add(create_request("newcomer", 60, max_tokens=1)), len(runner.plans)
    for step in range(20, 200):
        refill(scheduler, step, num_running=5)
        run_step(scheduler, runner)
        assert max(scheduler.running.rotation.wait_steps.values(), default=0) <= 4
    served = [bool([c for c in p.chunks if c.seq_id == newcomer.seq_id]) for p in runner.plans[arrival:]]
    assert served.index(True) <= 4
    assert max(gaps(runner.plans, newcomer.seq_id)) <= 4
    assert newcomer.is_finished


def refill(scheduler: Scheduler, step: int, num_running: int) -> None:
    """Let short requests arrive so that ``num_running`` run or wait."""
    for i in range(num_running - len(scheduler.sequences)):
        scheduler.add(create_request(f"s{step}-{i}", 3, max_tokens=6))


def test_decoders_have_a_token_in_every_step_under_an_endless_stream_of_prompts() -> None:
    scheduler, runner = create_scheduler(num_blocks=1000, max_batch_size=6, max_tokens_per_step=12), FakeRunner()
    decoding = [scheduler.add(create_request(f"d{i}", 2, max_tokens=60)) for i in range(2)]
    while len(scheduler.running.decoding) < 2:
        run_step(scheduler, runner)
    for step in range(50):
        scheduler.add(create_request(f"p{step}", 40, max_tokens=1))
        rows = {o.request_id for o in run_step(scheduler, runner)}
        assert {s.request.request_id for s in decoding} <= rows


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("way", ["preempt", "pause"])
def test_a_preempted_prompt_comes_back_under_an_endless_stream_of_short_prompts(chunked: bool, way: str) -> None:
    """It needs blocks for all of itself; each short one needs few and would take them as they become free."""
    scheduler, runner = create_scheduler(num_blocks=16, chunked=chunked), FakeRunner()
    victim = scheduler.add(create_request("victim", 52, max_tokens=4))
    shorts = (create_request(f"s{i}", 4, max_tokens=8) for i in range(10_000))
    while victim.num_output_tokens == 0:
        run_step(scheduler, runner)
    scheduler.pause("victim")
    for _ in range(5):
        scheduler.add(next(shorts))
        run_step(scheduler, runner)
    scheduler.resume("victim")
    for _ in range(30):
        if way == "preempt" and victim.committed_kv_tokens == 20:
            scheduler.preempt("victim")
        while len(scheduler.waiting) < 4:
            scheduler.add(next(shorts))
        run_step(scheduler, runner)
    assert victim.is_finished


def test_a_swapped_prompt_comes_back_under_an_endless_stream_of_short_prompts() -> None:
    """Newcomers leave what it needs; those that run would else take turns and never leave so much at once."""
    scheduler, runner = create_scheduler(num_blocks=8, block_size=2, num_swap_blocks=16), FakeRunner()
    victim = scheduler.add(create_request("victim", 8, max_tokens=4))
    shorts = (create_request(f"s{i}", 3, max_tokens=6) for i in range(10_000))
    while victim.num_output_tokens == 0:
        run_step(scheduler, runner)
    scheduler.add(next(shorts))
    assert scheduler.preempt("victim", by="swap")
    for _ in range(60):
        while len(scheduler.waiting) < 1:
            scheduler.add(next(shorts))
        run_step(scheduler, runner)
    assert victim.is_finished


def test_a_long_prompt_is_overtaken_only_by_shorter_ones_that_come_soon_after_it() -> None:
    """Shortest first; 40 tokens are worth 50 steps and 4 tokens 5: who comes 45 steps later or more goes behind."""
    scheduler = create_scheduler(
        max_batch_size=1, max_tokens_per_step=8, scheduling_policy="shortest-prefill-first", aging_steps=10
    )
    long = scheduler.add(create_request("long", 40, max_tokens=1))
    overtakers: list[int] = []
    for step in range(100):
        scheduler.add(create_request(f"{step}", 4, max_tokens=1))
        done = [o.request_id for o in run_step(scheduler, FakeRunner())]
        if long.is_finished:
            break
        overtakers += map(int, done)
    assert long.is_finished
    assert overtakers == list(range(45))


# Counters tell the truth


def test_a_forced_prefill_whose_allocation_fails_is_neither_counted_nor_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four lanes and one token a step: some lane waits to the threshold. Its lease fails twice, then it is served."""
    scheduler = create_scheduler(num_blocks=64, block_size=1, max_batch_size=8, max_tokens_per_step=10, threshold=3)
    runner = FakeRunner()
    for i in range(4):
        scheduler.add(create_request(f"r{i}", 20, max_tokens=1))
    run_step(scheduler, runner)
    scheduler.max_tokens_per_step = 1  # as after running out of memory
    waits = scheduler.running.rotation.wait_steps
    while max(waits.values()) < 3:
        run_step(scheduler, runner)
        waits = scheduler.running.rotation.wait_steps
    (forced,) = [member for member, wait in waits.items() if wait == 3]
    before, num_forced = scheduler.fingerprint(), scheduler.counts.num_forced_prefills

    def fail(*args: object) -> None:
        raise CapacityError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.kv, "ensure_sequence_capacity", fail)
        for _ in range(2):
            with pytest.raises(CapacityError, match="planted"):
                scheduler.step()
    assert scheduler.fingerprint() == before
    assert scheduler.running.rotation.wait_steps[forced] == 3
    run_step(scheduler, runner)
    assert [c.seq_id for c in runner.plans[-1].chunks] == [forced]
    assert scheduler.counts.num_forced_prefills == num_forced + 1
    assert scheduler.running.rotation.wait_steps[forced] == 0


# Lengths at edges


def edges(*sizes: int) -> list[int]:
    """Return k times each size, one less and one more, for k of 1 to 3; a remainder of one token is among them."""
    return sorted({k * size + d for size in sizes for k in (1, 2, 3) for d in (-1, 0, 1)} - {0})


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("length", edges(4, 7))
def test_lengths_around_block_and_chunk_edges_take_their_blocks_and_sample_once(length: int, chunked: bool) -> None:
    """Blocks of 4 and chunks of 7, so that no chunk but every 28th token ends with a block."""
    scheduler, runner = create_scheduler(chunked=chunked, chunk_size=7, max_tokens_per_step=20), FakeRunner()
    seq = scheduler.add(create_request(num_prompt_tokens=length, max_tokens=2))
    num_chunks = blocks_for_tokens(length, 7) if chunked else 1
    outputs = [run_step(scheduler, runner) for _ in range(num_chunks)]
    assert [len(o) for o in outputs] == [0] * (num_chunks - 1) + [1]
    assert scheduler.counts.num_progress_only_steps == num_chunks - 1
    assert chunk_lengths(runner.plans, 0) == (
        [7] * (length // 7) + [length % 7] * (length % 7 > 0) if chunked else [length]
    )
    assert (seq.committed_kv_tokens, scheduler.kv.num_blocks(seq)) == (length, blocks_for_tokens(length, 4))
    (last,) = run_step(scheduler, runner)
    assert last.finish_reason == "length"
    assert runner.plans[-1].decode_rows
    assert not runner.plans[-1].chunks


def test_a_remainder_of_one_token_is_a_terminal_chunk_and_no_decode_row() -> None:
    scheduler, runner = create_scheduler(chunk_size=8), FakeRunner()
    scheduler.add(create_request(num_prompt_tokens=9, max_tokens=3))
    assert run_step(scheduler, runner) == []
    assert len(run_step(scheduler, runner)) == 1
    plan = runner.plans[-1]
    assert [(c.start, c.num_tokens, c.is_terminal) for c in plan.chunks] == [(8, 1, True)]
    assert plan.decode_rows == ()


@pytest.mark.parametrize("num_left", range(1, 9))
def test_one_to_eight_tokens_beside_the_decoders_are_all_used_and_lose_nothing(num_left: int) -> None:
    """The step is set as after running out of memory: the decoders and ``num_left`` more."""
    scheduler = create_scheduler(num_blocks=200, block_size=1, max_batch_size=5, max_tokens_per_step=20, threshold=3)
    runner, got = FakeRunner(), dict[str, list[int]]()
    requests = [create_request(f"d{i}", 2, max_tokens=50) for i in range(2)]
    requests += [create_request(f"p{i}", 12 + i, max_tokens=1) for i in range(3)]
    for request in requests:
        scheduler.add(request)
        if request.request_id == "d1":
            note(got, run_step(scheduler, runner))
    scheduler.max_tokens_per_step = 2 + num_left
    while scheduler.waiting or scheduler.running.lanes:
        left = sum(s.num_prefill_tokens_left for s in (*scheduler.waiting, *scheduler.running.lanes.values()))
        note(got, run_step(scheduler, runner))
        assert len(runner.plans[-1].decode_rows) >= 2
        assert sum(c.num_tokens for c in runner.plans[-1].chunks) == min(num_left, left)
    note(got, drain(scheduler, runner))
    roomy = create_scheduler(num_blocks=200, block_size=1)
    for request in requests:
        roomy.add(request)
    assert got == run_until_idle(roomy, FakeRunner())


def note(got: dict[str, list[int]], outputs: list[StepOutput]) -> None:
    for output in outputs:
        got.setdefault(output.request_id, []).extend(output.new_token_ids)


def drain(scheduler: Scheduler, runner: FakeRunner) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    while scheduler.has_unfinished:
        outputs += run_step(scheduler, runner)
    return outputs


@pytest.mark.parametrize("chunked", [False, True])
def test_requests_for_one_token_end_with_their_prompt_beside_rows_of_every_kind(chunked: bool) -> None:
    """One step with decode rows, a chunk that ends its prompt and (chunked) one that does not."""
    scheduler, runner = create_scheduler(chunked=chunked, chunk_size=6), FakeRunner()
    scheduler.add(create_request("decoding", 3, max_tokens=5))
    run_step(scheduler, runner)
    for name, length, max_tokens in (("one", 5, 1), ("long", 15, 1), ("other", 6, 1), ("more", 4, 2)):
        scheduler.add(create_request(name, length, max_tokens=max_tokens))
    outputs = {o.request_id: (len(o.new_token_ids), o.finish_reason) for o in run_step(scheduler, runner)}
    whole = {} if chunked else {"long": (1, "length")}
    assert outputs == {"decoding": (1, None), "one": (1, "length"), "other": (1, "length"), "more": (1, None)} | whole
    assert {s.request.request_id for s in scheduler.running.decoding.values()} == {"decoding", "more"}
    held = sum(scheduler.kv.num_blocks(s) for s in scheduler.sequences)
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks - held
    run_until_idle(scheduler, runner)
    assert all(r.seq_id not in (1, 2, 3) for p in runner.plans for r in p.decode_rows)
