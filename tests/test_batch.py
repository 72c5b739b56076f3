import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.batch import RaggedBatch, packed_copy
from moesaic.errors import InvariantError
from moesaic.kv.table import BlockTable, slot_mapping
from moesaic.sched.plan import PagedBatchLengths
from moesaic.testing.scheduling import FakeRunner, create_request, create_scheduler, run_step


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=6),
    st.sampled_from([1, 2, 4, 16]),
    st.randoms(use_true_random=False),
)
def test_positions_and_slots_equal_the_loop_over_tokens(rows, block_size, rng) -> None:  # type: ignore[no-untyped-def]
    lengths = PagedBatchLengths.of([q for q, _ in rows], [c for _, c in rows])
    ids = list(range(200))
    rng.shuffle(ids)
    tables = [
        np.array([ids.pop() for _ in range(-(-n // block_size) + 1)], dtype=np.int32) for n in lengths.kv_seq_lengths
    ]
    batch = RaggedBatch.build(
        lengths=lengths,
        num_decode_rows=0,
        block_size=block_size,
        token_ids=np.arange(lengths.query_offsets[-1]),
        block_tables=tables,
        sampling_rows=range(len(rows)),
    )
    positions, slots = [], []
    for (query, context), table in zip(rows, tables, strict=True):
        positions += range(context, context + query)
        slots += slot_mapping(BlockTable(table.tolist()), context, query, block_size)
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert batch.logit_indices.tolist() == [end - 1 for end in lengths.query_offsets[1:]]


def test_a_table_too_short_for_its_row_is_refused() -> None:
    with pytest.raises(InvariantError, match="do not cover"):
        RaggedBatch.build(
            lengths=PagedBatchLengths.of([5], [0]),
            num_decode_rows=0,
            block_size=4,
            token_ids=np.arange(5),
            block_tables=[np.array([0], dtype=np.int32)],
            sampling_rows=[0],
        )


def test_logits_are_wanted_for_decode_rows_and_terminal_chunks_only() -> None:
    scheduler, runner = create_scheduler(chunk_size=8), FakeRunner()
    scheduler.add(create_request("decoding", 4, max_tokens=9))
    run_step(scheduler, runner)
    scheduler.add(create_request("long", 30))
    scheduler.add(create_request("short", 3))
    with scheduler.step() as tx:
        batch = RaggedBatch.of(tx.plan, tx.sequences, scheduler.kv, extra_logit_indices=[2])
    assert batch.lengths.query_lengths == (1, 8, 3)
    assert batch.logit_indices.tolist() == [0, 11, 2]
    assert (batch.num_decode_rows, batch.num_sampling_rows) == (1, 2)
    long = create_request("long", 30).prompt_token_ids
    assert batch.token_ids[1:9].tolist() == list(long[:8])
    assert batch.token_ids.dtype == torch.int64
    assert batch.block_tables.dtype == torch.int32


def test_a_packed_copy_holds_what_went_in_each_part_aligned() -> None:
    """What a GPU gets in one copy; here to another buffer of the CPU."""
    parts = {
        "odd": torch.arange(3, dtype=torch.int64),
        "none": torch.empty(0, dtype=torch.int64),
        "table": torch.arange(10, dtype=torch.int32).view(5, 2),
        "empty_table": torch.empty(4, 0, dtype=torch.int32),
        "last": torch.arange(200, dtype=torch.int32),
    }
    copies = packed_copy(parts, torch.device("cpu"))
    assert list(copies) == list(parts)
    for name, part in parts.items():
        torch.testing.assert_close(copies[name], part, rtol=0, atol=0)
        assert copies[name].storage_offset() * part.element_size() % 512 == 0
    assert len({copy.untyped_storage().data_ptr() for copy in copies.values()}) == 1
