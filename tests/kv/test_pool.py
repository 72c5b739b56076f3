import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import CapacityError, InvariantError
from moesaic.kv.pool import BlockPool


def test_reserve_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    pool.reserve(3)
    before = pool.fingerprint()
    with pytest.raises(CapacityError, match=r"2 KV blocks are needed but 1 of 4 are free"):
        pool.reserve(2)
    assert pool.fingerprint() == before


def test_release_of_the_last_reservation_restores_the_exact_state() -> None:
    pool = BlockPool(6)
    pool.reserve(2)
    before = pool.fingerprint()
    pool.release(pool.reserve(3))
    assert pool.fingerprint() == before


def test_shared_blocks_are_free_only_after_the_last_release() -> None:
    pool = BlockPool(3)
    blocks = pool.reserve(2)
    pool.share(blocks)
    assert pool.is_shared(blocks[0])
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 3
    pool.check()


def test_fenced_blocks_are_free_only_after_the_lift() -> None:
    pool = BlockPool(3)
    pool.fence(pool.reserve(2), fence_id=7)
    assert (pool.num_free, pool.num_fenced, pool.num_behind(7)) == (1, 2, 2)
    pool.check()
    pool.lift(8)
    assert pool.num_free == 1
    pool.lift(7)
    assert (pool.num_free, pool.num_fenced) == (3, 0)
    pool.check()


def test_releasing_a_block_that_is_not_owned_changes_nothing() -> None:
    pool = BlockPool(3)
    blocks = pool.reserve(1)
    before = pool.fingerprint()
    with pytest.raises(InvariantError):
        pool.release([*blocks, 2])  # type: ignore[list-item]  # a bug in the caller
    with pytest.raises(InvariantError):
        pool.release([*blocks, *blocks])
    assert pool.fingerprint() == before


def test_check_sees_a_lost_block() -> None:
    pool = BlockPool(3)
    pool._free.pop()
    with pytest.raises(InvariantError, match="2 free"):
        pool.check()


@given(st.lists(st.tuples(st.sampled_from(["reserve", "release", "share", "fence", "lift"]), st.integers(0, 4))))
def test_free_referenced_and_fenced_always_sum_to_the_total(operations: list[tuple[str, int]]) -> None:
    pool = BlockPool(8)
    held: list[list[int]] = []
    for name, number in operations:
        if name == "reserve" and number <= pool.num_free:
            held.append(pool.reserve(number))  # type: ignore[arg-type]  # block ids are ints
        elif name == "lift":
            pool.lift(number)
        elif held and name == "share":
            blocks = held[number % len(held)]
            pool.share(blocks)  # type: ignore[arg-type]  # block ids are ints
            held.append(blocks)
        elif held and name == "release":
            pool.release(held.pop(number % len(held)))  # type: ignore[arg-type]  # block ids are ints
        elif held and name == "fence":
            pool.fence(held.pop(number % len(held)), number)  # type: ignore[arg-type]  # block ids are ints
        pool.check()
    for blocks in held:
        pool.release(blocks)  # type: ignore[arg-type]  # block ids are ints
    for fence in range(5):
        pool.lift(fence)
    assert pool.num_free == 8
