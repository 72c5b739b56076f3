"""The chunked policy: decode first, bounded waits, lanes, admissions."""

from moesaic.sched.chunked import ChunkedPrefill
from moesaic.sched.plan import DecodeRow
from moesaic.sched.policy import LaneView, Proposal, StepView
from moesaic.sched.queues import ARRIVALS, PrefillRotation, WaitingQueue
from moesaic.sequence import Rank, SeqId
from moesaic.testing.scheduling import (
    FakeRunner,
    chunk_lengths,
    create_request,
    create_scheduler,
    create_sequences,
    run_step,
    run_until_idle,
)


def propose(
    *,
    max_tokens: int = 32,
    chunk_size: int = 8,
    threshold: int = 8,
    max_lanes: int = 4,
    free_blocks: int = 1000,
    free_rows: int = 100,
    decode: int = 0,
    decode_needs_block: int = 0,
    lanes: tuple[LaneView, ...] = (),
    waiting: tuple[int, ...] = (),
    preempted: tuple[int, ...] = (),
    waits: dict[int, int] | None = None,
    deficits: dict[int, int] | None = None,
) -> Proposal:
    """Propose a step; decode rows have ids from 100, waiting prompts of the given lengths from 200, preempted first."""
    queue = WaitingQueue(chunk_size)
    for i, length in enumerate(preempted + waiting):
        seq = create_sequences(1, num_prompt_tokens=length)[0]
        seq.seq_id, seq.rank = SeqId(200 + i), Rank(0, SeqId(200 + i))
        seq.num_preemptions = int(i < len(preempted))
        queue.push(seq)
    view = StepView(
        max_tokens=max_tokens,
        num_free_rows=free_rows,
        block_size=4,
        num_free_blocks=free_blocks,
        num_headroom_blocks=0,
        decode_rows=tuple(DecodeRow(SeqId(100 + i), 8) for i in range(decode)),
        decode_needs_block={SeqId(100 + i): Rank(0, SeqId(100 + i)) for i in range(decode_needs_block)},
        lanes=lanes,
        waiting=queue,
        rotation=PrefillRotation((*(lane.seq_id for lane in lanes), ARRIVALS), waits or {}, deficits or {}),  # type: ignore[arg-type]
        num_decode_gap_steps=0,
    )
    policy = ChunkedPrefill(chunk_size=chunk_size, starvation_threshold_steps=threshold, max_partial_prefills=max_lanes)
    return policy.propose(view)


def lane(seq_id: int, num_left: int = 1000, start: int = 0, spare: int = 0, *, back: bool = False) -> LaneView:
    return LaneView(SeqId(seq_id), start, num_left, spare, Rank(0, SeqId(seq_id)), was_preempted=back)


def tokens(proposal: Proposal) -> dict[int, int]:
    return {int(c.seq_id): c.num_tokens for c in proposal.chunks}


def test_decode_rows_run_before_any_chunk() -> None:
    proposal = propose(max_tokens=10, decode=7, lanes=(lane(0),))
    assert len(proposal.decode_rows) == 7
    assert tokens(proposal) == {0: 3}


def test_lanes_share_the_step_evenly_and_no_chunk_exceeds_its_size() -> None:
    assert tokens(propose(max_tokens=12, lanes=(lane(0), lane(1), lane(2)))) == {0: 4, 1: 4, 2: 4}
    assert tokens(propose(max_tokens=100, lanes=(lane(0), lane(1)))) == {0: 8, 1: 8}


def test_tokens_that_a_lane_cannot_use_go_to_the_others() -> None:
    assert tokens(propose(max_tokens=12, lanes=(lane(0, num_left=1), lane(1)))) == {0: 1, 1: 8}


def test_a_newcomer_has_its_share_at_once() -> None:
    proposal = propose(max_tokens=12, lanes=(lane(0), lane(1)), waiting=(50,))
    assert tokens(proposal) == {0: 4, 1: 4, 200: 4}


def test_a_short_prompt_passes_full_lanes_but_a_long_one_waits_for_a_lane() -> None:
    lanes = (lane(0), lane(1))
    assert tokens(propose(max_tokens=16, max_lanes=2, lanes=lanes, waiting=(50, 3))) == {0: 8, 1: 5, 201: 3}
    assert tokens(propose(max_tokens=16, max_lanes=2, lanes=lanes, waiting=(50,))) == {0: 8, 1: 8}


def test_lanes_never_exceed_max_partial_prefills() -> None:
    proposal = propose(max_tokens=30, max_lanes=3, waiting=(50, 50, 50, 50, 50))
    assert sum(not c.is_terminal for c in proposal.chunks) == 3


def test_admissions_follow_arrival_order() -> None:
    assert list(tokens(propose(max_tokens=10, waiting=(4, 3, 2, 5)))) == [200, 201, 202, 203]


def test_a_newcomer_grows_into_tokens_nobody_wants() -> None:
    assert tokens(propose(max_tokens=64, waiting=(8, 8))) == {200: 8, 201: 8}


def test_chunks_stop_where_blocks_end() -> None:
    proposal = propose(free_blocks=2, lanes=(lane(0, spare=3), lane(1, spare=0)))
    assert sum(tokens(proposal).values()) == 3 + 2 * 4 - 0
    assert tokens(proposal)[1] >= 4


def test_without_blocks_the_oldest_gets_the_last_one() -> None:
    proposal = propose(free_blocks=1, decode=2, decode_needs_block=1, lanes=(lane(0),))
    assert [r.seq_id for r in proposal.decode_rows] == [101]
    assert tokens(proposal) == {0: 4}


def test_newcomers_leave_the_blocks_that_lanes_still_need() -> None:
    """Those of its chunks in this step and the next: 16 of its 20 tokens, in 4 blocks."""
    assert 200 not in tokens(propose(free_blocks=4, lanes=(lane(0, num_left=20),), waiting=(4,)))
    assert 200 in tokens(propose(free_blocks=5, lanes=(lane(0, num_left=20),), waiting=(4,)))


def test_a_preempted_prompt_starts_again_only_with_room_for_all_of_it() -> None:
    assert tokens(propose(free_blocks=10, waiting=(41,))) == {200: 8}
    assert tokens(propose(free_blocks=10, preempted=(41,))) == {}
    assert tokens(propose(free_blocks=11, preempted=(41,))) == {200: 8}


def test_newcomers_leave_a_prompt_that_came_back_the_room_for_all_of_it() -> None:
    """Its 40 tokens take 10 blocks, of which it is granted the next."""
    back = lane(0, num_left=40, back=True)
    assert 200 not in tokens(propose(free_blocks=10, lanes=(back,), waiting=(4,)))
    assert 200 in tokens(propose(free_blocks=11, lanes=(back,), waiting=(4,)))


def test_short_prompts_pass_a_preempted_one_only_if_its_blocks_remain() -> None:
    assert tokens(propose(free_blocks=10, preempted=(44,), waiting=(4,))) == {}
    lanes = tuple(lane(i, num_left=8, spare=8) for i in range(4))
    assert 201 not in tokens(propose(free_blocks=11, preempted=(44,), waiting=(4,), lanes=lanes, max_tokens=64))
    assert 201 in tokens(propose(free_blocks=12, preempted=(44,), waiting=(4,), lanes=lanes, max_tokens=64))


def test_who_waited_to_the_threshold_goes_first() -> None:
    proposal = propose(max_tokens=1, threshold=3, lanes=(lane(0), lane(1)), waits={1: 3})
    assert tokens(proposal) == {1: 1}
    assert proposal.num_forced_prefills == 1


def test_a_wait_grows_when_passed_over_and_resets_only_on_service() -> None:
    proposal = propose(max_tokens=1, lanes=(lane(0), lane(1)), waits={0: 2, 1: 5})
    after = PrefillRotation((SeqId(0), SeqId(1)), {SeqId(0): 2, SeqId(1): 5}).after(proposal.services)
    assert (after.wait_steps[SeqId(0)], after.wait_steps[SeqId(1)]) == (0, 6)
    assert after.order == (1, 0)


def test_a_prefill_without_blocks_is_neither_served_nor_counted_as_waiting() -> None:
    """Its counter must not reset because it was tried, nor grow while it cannot run."""
    proposal = propose(free_blocks=0, lanes=(lane(0), lane(1, spare=2)), waits={0: 7})
    assert [s.member for s in proposal.services] == [1]
    assert PrefillRotation(wait_steps={SeqId(0): 7}).after(proposal.services).wait_steps[SeqId(0)] == 7


def test_a_share_that_could_not_be_used_is_kept_as_deficit() -> None:
    proposal = propose(max_tokens=16, free_blocks=1, lanes=(lane(0, spare=0), lane(1, spare=100)))
    assert tokens(proposal) == {0: 4, 1: 8}
    deficits = {s.member: s.deficit for s in proposal.services}
    assert deficits == {0: 4, 1: 0}
    assert tokens(propose(max_tokens=10, lanes=(lane(0), lane(1)), deficits={0: 3})) == {0: 8, 1: 2}


def test_no_rows_left_means_no_admission() -> None:
    assert tokens(propose(free_rows=0, waiting=(4,))) == {}


def test_chunks_partition_the_prompt() -> None:
    scheduler, runner = create_scheduler(chunk_size=8), FakeRunner()
    seq = scheduler.add(create_request(num_prompt_tokens=29))
    run_until_idle(scheduler, runner)
    assert chunk_lengths(runner.plans, seq.seq_id) == [8, 8, 8, 5]


def test_short_prompts_finish_while_long_ones_fill_every_lane() -> None:
    scheduler, runner = create_scheduler(num_blocks=4000, max_tokens_per_step=32), FakeRunner()
    for i in range(4):
        scheduler.add(create_request(f"long{i}", 2000, max_tokens=1))
    run_step(scheduler, runner)
    scheduler.add(create_request("short", 6, max_tokens=1))
    outputs = [o.request_id for _ in range(2) for o in run_step(scheduler, runner)]
    assert outputs == ["short"]
