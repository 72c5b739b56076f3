import pytest

from moesaic.errors import InvariantError
from moesaic.sched.plan import DecodeRow, PagedBatchLengths, PrefillChunk, StepPlan
from moesaic.sequence import SeqId


def chunk(seq_id: int, start: int, num_tokens: int, is_terminal: bool = False) -> PrefillChunk:
    return PrefillChunk(seq_id=SeqId(seq_id), start=start, num_tokens=num_tokens, is_terminal=is_terminal)


def test_query_and_kv_metadata_of_the_worked_example() -> None:
    lengths = PagedBatchLengths.of(query_lengths=[2, 3], context_lengths=[4, 6])
    assert lengths.query_offsets == (0, 2, 5)
    assert lengths.kv_seq_lengths == (6, 9)


def test_plan_lengths_put_decode_rows_first() -> None:
    plan = StepPlan(decode_rows=(DecodeRow(SeqId(1), 9),), chunks=(chunk(2, 4, 3),))
    lengths = plan.lengths()
    assert lengths.query_lengths == (1, 3)
    assert lengths.context_lengths == (9, 4)
    assert plan.num_tokens == 4
    assert plan.num_rows == 2


def test_only_decode_rows_and_terminal_chunks_sample() -> None:
    plan = StepPlan(decode_rows=(DecodeRow(SeqId(1), 9),), chunks=(chunk(2, 4, 3), chunk(3, 0, 2, is_terminal=True)))
    assert plan.sampling_row_ids == (1, 3)
    assert not plan.is_progress_only
    assert StepPlan(decode_rows=(), chunks=(chunk(2, 4, 3),)).is_progress_only
    assert not StepPlan(decode_rows=(), chunks=()).is_progress_only


@pytest.mark.parametrize(
    "fields",
    [
        {"query_offsets": (0, 2, 6)},
        {"kv_seq_lengths": (6, 8)},
        {"query_lengths": (0, 5), "query_offsets": (0, 0, 5), "kv_seq_lengths": (4, 11)},
        {"context_lengths": (-1, 6), "kv_seq_lengths": (1, 9)},
        {"context_lengths": (4,)},
    ],
)
def test_contradicting_lengths_are_refused(fields: dict[str, tuple[int, ...]]) -> None:
    good = {
        "query_lengths": (2, 3),
        "query_offsets": (0, 2, 5),
        "context_lengths": (4, 6),
        "kv_seq_lengths": (6, 9),
    }
    PagedBatchLengths(**good)
    with pytest.raises(InvariantError):
        PagedBatchLengths(**(good | fields))


def test_lengths_of_different_counts_are_refused() -> None:
    with pytest.raises(InvariantError, match="2 query lengths but 1 contexts"):
        PagedBatchLengths.of([1, 2], [0])


@pytest.mark.parametrize(("start", "num_tokens"), [(-1, 2), (0, 0), (3, -1)])
def test_empty_chunks_are_refused(start: int, num_tokens: int) -> None:
    with pytest.raises(InvariantError):
        chunk(0, start, num_tokens)
