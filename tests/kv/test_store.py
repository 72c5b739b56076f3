"""The KV store: what is written is read back, copied and swapped exactly, and nothing else changes."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import ConfigError, InvariantError
from moesaic.kv.geometry import KVGeometry, LayerKVShape
from moesaic.kv.store import BlockTensors, LayeredPagedKVStore

LAYERS = (
    LayerKVShape(num_kv_heads=2, key_dim=6, value_dim=4),
    LayerKVShape(num_kv_heads=1, key_dim=3, value_dim=5),
)


def _store(*, num_blocks: int = 6, block_size: int = 4, dtype: torch.dtype = torch.float32) -> LayeredPagedKVStore:
    """A store full of random numbers, all different."""
    geometry = KVGeometry(layers=LAYERS, block_size=block_size, element_bytes=dtype.itemsize)
    store = LayeredPagedKVStore(geometry, num_blocks, dtype)
    for pages in _all_pages(store):
        pages.normal_()
    return store


def _all_pages(store: LayeredPagedKVStore) -> list[torch.Tensor]:
    return [pages for layer in range(len(LAYERS)) for pages in store.pages(layer)]


def _snapshot(store: LayeredPagedKVStore) -> list[torch.Tensor]:
    return [pages.clone() for pages in _all_pages(store)]


def _new_tokens(layer: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = LAYERS[layer]
    return (
        torch.randn(num_tokens, shape.num_kv_heads, shape.key_dim),
        torch.randn(num_tokens, shape.num_kv_heads, shape.value_dim),
    )


def test_bytes_are_those_of_the_geometry_and_of_the_tensors() -> None:
    store = _store(dtype=torch.bfloat16)
    assert store.num_bytes == 6 * store.geometry.bytes_per_block == sum(p.nbytes for p in _all_pages(store))


def test_keys_and_values_have_their_own_dims_per_layer() -> None:
    store = _store()
    assert [tuple(p.shape) for p in _all_pages(store)] == [(6, 4, 2, 6), (6, 4, 2, 4), (6, 4, 1, 3), (6, 4, 1, 5)]


@given(
    slots=st.lists(st.integers(0, 23), unique=True, max_size=24),
    layer=st.integers(0, 1),
    block_size=st.sampled_from([1, 2, 4, 8]),
)
def test_a_write_changes_its_slots_of_its_layer_and_nothing_else(slots, layer, block_size) -> None:
    store = _store(num_blocks=24 // block_size, block_size=block_size)
    before = _snapshot(store)
    key, value = _new_tokens(layer, len(slots))
    store.write(layer, torch.tensor(slots, dtype=torch.int64), key, value)
    new = dict(enumerate((key, value), start=2 * layer))
    for i, (pages, old) in enumerate(zip(_all_pages(store), before, strict=True)):
        expected = old.flatten(0, 1)
        for token, slot in enumerate(slots if i in new else []):
            expected[slot] = new[i][token]
        assert torch.equal(pages.flatten(0, 1), expected)


def test_pages_are_the_storage_and_no_copy() -> None:
    store = _store()
    key, value = _new_tokens(0, 1)
    keys, values = store.pages(0)
    store.write(0, torch.tensor([9]), key, value)
    assert torch.equal(keys[2, 1], key[0])
    assert torch.equal(values[2, 1], value[0])


def test_a_write_takes_strided_keys() -> None:
    """Attention hands over transposed views."""
    store = _store()
    key, value = _new_tokens(0, 3)
    strided = key.transpose(0, 1).contiguous().transpose(0, 1)
    store.write(0, torch.tensor([1, 5, 7]), strided, value)
    assert torch.equal(store.pages(0)[0].flatten(0, 1)[[1, 5, 7]], key)


@pytest.mark.parametrize("slot", [24, -1])
def test_a_slot_out_of_range_is_refused_with_the_limit(slot) -> None:
    store = _store()
    before = _snapshot(store)
    with pytest.raises(InvariantError, match=r"leaves \[0, 24\)"):
        store.write(0, torch.tensor([slot]), *_new_tokens(0, 1))
    assert all(map(torch.equal, before, _all_pages(store)))


def test_keys_of_another_layers_shape_are_refused_with_both_shapes() -> None:
    with pytest.raises(InvariantError, match=r"layer 1 takes \(2, 1, 3\) .* got \(2, 2, 6\)"):
        _store().write(1, torch.tensor([0, 1]), *_new_tokens(0, 2))


def test_more_slots_than_keys_are_refused() -> None:
    with pytest.raises(InvariantError, match="for its 3 slots"):
        _store().write(0, torch.tensor([0, 1, 2]), *_new_tokens(0, 2))


@pytest.mark.parametrize("layer", [-1, 2])
def test_an_unknown_layer_is_refused(layer) -> None:
    with pytest.raises(InvariantError, match=f"layer {layer} is not one of the 2"):
        _store().pages(layer)


@given(sources=st.lists(st.integers(0, 5), max_size=6), targets=st.permutations(range(6)))
def test_copies_read_all_sources_before_they_write(sources, targets) -> None:
    store = _store()
    before = _snapshot(store)
    pairs = list(zip(sources, targets, strict=False))
    store.copy_blocks(pairs)
    from_block = list(range(6))
    for source, target in pairs:
        from_block[target] = source
    assert all(torch.equal(pages, old[from_block]) for pages, old in zip(_all_pages(store), before, strict=True))


@pytest.mark.parametrize(
    ("take", "put"),
    [
        (LayeredPagedKVStore.export_blocks, LayeredPagedKVStore.import_blocks),
        (LayeredPagedKVStore.checkpoint, LayeredPagedKVStore.restore),
    ],
    ids=["device", "host"],
)
@given(blocks=st.lists(st.integers(0, 5), unique=True, max_size=6), others=st.permutations(range(6)))
def test_blocks_come_back_exactly_even_under_other_ids(
    take: Callable[[LayeredPagedKVStore, Sequence[int]], BlockTensors],
    put: Callable[[LayeredPagedKVStore, Sequence[int], BlockTensors], None],
    blocks: list[int],
    others: Sequence[int],
) -> None:
    store = _store()
    before = _snapshot(store)
    copy = take(store, blocks)
    assert copy.num_bytes == len(blocks) * store.geometry.bytes_per_block
    for pages in _all_pages(store):
        pages.zero_()
    targets = list(others[: len(blocks)])
    put(store, targets, copy)
    untouched = [b for b in range(6) if b not in targets]
    for pages, old in zip(_all_pages(store), before, strict=True):
        assert torch.equal(pages[targets], old[blocks])
        assert not pages[untouched].any()


def test_a_copy_does_not_follow_later_writes() -> None:
    store = _store()
    copy = store.checkpoint([2])
    kept = copy.keys[0].clone()
    store.write(0, torch.tensor([8]), *_new_tokens(0, 1))
    assert torch.equal(copy.keys[0], kept)


@pytest.mark.parametrize("ids", [[0, 6], [-1]])
def test_block_ids_out_of_range_are_refused_with_the_limit(ids) -> None:
    store = _store()
    with pytest.raises(InvariantError, match=r"leave \[0, 6\)"):
        store.export_blocks(ids)
    with pytest.raises(InvariantError, match=r"leave \[0, 6\)"):
        store.import_blocks(ids, _store().export_blocks(range(len(ids))))
    with pytest.raises(InvariantError, match=r"leave \[0, 6\)"):
        store.copy_blocks([(0, i) for i in ids])


def test_a_block_is_not_overwritten_twice_at_once() -> None:
    with pytest.raises(InvariantError, match="twice"):
        _store().copy_blocks([(0, 2), (1, 2)])


def test_blocks_of_another_number_or_shape_are_refused() -> None:
    store = _store()
    with pytest.raises(InvariantError, match="2 exported blocks"):
        store.import_blocks([0], store.export_blocks([1, 2]))
    with pytest.raises(InvariantError, match="1 exported blocks"):
        store.restore([0], _store(block_size=2).checkpoint([1]))
    with pytest.raises(InvariantError, match="1 exported blocks"):
        store.import_blocks([0], _store(dtype=torch.bfloat16).export_blocks([1]))


def test_a_dtype_the_geometry_did_not_count_is_refused() -> None:
    geometry = KVGeometry(layers=LAYERS, block_size=4, element_bytes=2)
    with pytest.raises(InvariantError, match=r"float32 takes 4 bytes but the geometry has 2"):
        LayeredPagedKVStore(geometry, 6, torch.float32)


def test_a_store_without_blocks_is_refused() -> None:
    geometry = KVGeometry(layers=LAYERS, block_size=4, element_bytes=4)
    with pytest.raises(ConfigError, match="num-kv-blocks"):
        LayeredPagedKVStore(geometry, 0, torch.float32)
