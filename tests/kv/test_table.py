import numpy as np
import pytest

from moesaic.errors import CapacityError, InvariantError
from moesaic.kv.pool import BlockPool
from moesaic.kv.table import BlockTable, PagedKVCache, slot_mapping
from moesaic.sequence import SeqId
from moesaic.testing.scheduling import create_sequences


def create_cache(num_blocks: int = 8, block_size: int = 4) -> PagedKVCache:
    return PagedKVCache(BlockPool(num_blocks), block_size)


def test_capacity_grows_in_whole_blocks_and_never_shrinks() -> None:
    cache, (seq,) = create_cache(), create_sequences(1)
    assert cache.num_reserved_tokens(seq) == 0
    cache.ensure_sequence_capacity(seq, 5)
    assert cache.num_reserved_tokens(seq) == 8
    cache.ensure_sequence_capacity(seq, 5)
    cache.ensure_sequence_capacity(seq, 1)
    assert cache.num_reserved_tokens(seq) == 8
    assert cache.pool.num_free == 6


def test_rollback_returns_exactly_the_lease() -> None:
    cache, (seq,) = create_cache(), create_sequences(1)
    cache.ensure_sequence_capacity(seq, 4)
    cache.commit_sequence_reservation(seq)
    before = cache.fingerprint()
    cache.ensure_sequence_capacity(seq, 13)
    cache.rollback_sequence_reservation(seq)
    assert cache.fingerprint() == before
    cache.rollback_sequence_reservation(seq)
    assert cache.fingerprint() == before


def test_rollback_of_the_first_lease_leaves_no_table() -> None:
    cache, (seq,) = create_cache(), create_sequences(1)
    before = cache.fingerprint()
    cache.ensure_sequence_capacity(seq, 9)
    cache.rollback_sequence_reservation(seq)
    assert cache.fingerprint() == before
    with pytest.raises(InvariantError, match="no block table"):
        cache.block_table(seq)


def test_failed_reservation_changes_nothing() -> None:
    cache, (seq,) = create_cache(num_blocks=2), create_sequences(1)
    before = cache.fingerprint()
    with pytest.raises(CapacityError):
        cache.ensure_sequence_capacity(seq, 9)
    assert cache.fingerprint() == before


def test_block_table_follows_growth() -> None:
    cache, (seq,) = create_cache(), create_sequences(1)
    cache.ensure_sequence_capacity(seq, 4)
    first = cache.block_table(seq)
    cache.ensure_sequence_capacity(seq, 12)
    table = cache.block_table(seq)
    assert table.dtype == np.int32
    assert len(table) == 3
    assert table[0] == first[0]


def test_freeing_returns_every_block_and_fencing_holds_them_back() -> None:
    cache, (a, b) = create_cache(), create_sequences(2)
    cache.ensure_sequence_capacity(a, 8)
    cache.ensure_sequence_capacity(b, 8)
    cache.free_sequences([a])
    cache.fence_sequence(b, fence_id=3)
    assert (cache.pool.num_free, cache.pool.num_fenced) == (6, 2)
    cache.pool.lift(3)
    cache.check()
    assert cache.pool.num_free == 8


def test_check_sees_a_block_with_two_owners() -> None:
    cache, (a, b) = create_cache(), create_sequences(2)
    cache.ensure_sequence_capacity(a, 4)
    cache.ensure_sequence_capacity(b, 4)
    cache._tables[SeqId(1)].blocks[0] = cache._tables[SeqId(0)].blocks[0]
    with pytest.raises(InvariantError, match="belongs to sequences 0 and 1"):
        cache.check()


def test_slot_mapping_walks_the_table() -> None:
    table = BlockTable([5, 2])  # type: ignore[list-item]  # block ids are ints
    assert slot_mapping(table, 2, 4, block_size=4) == [22, 23, 8, 9]
    with pytest.raises(CapacityError, match="position 8"):
        slot_mapping(table, 6, 3, block_size=4)
