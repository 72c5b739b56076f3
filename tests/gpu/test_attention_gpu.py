"""The torch backend on a GPU against itself on a CPU in float32, over pages of a real store."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from moesaic.attention.base import AttentionParams
from moesaic.attention.reference import TorchAttention
from moesaic.batch import RaggedBatch
from moesaic.kv.geometry import KVGeometry, LayerKVShape
from moesaic.kv.store import LayeredPagedKVStore
from moesaic.sched.plan import PagedBatchLengths

pytestmark = pytest.mark.gpu

BLOCK_SIZE = 16
MIXED = [(1, 700), (1, 0), (1, 90), (1, 1500), (5, 0), (33, 100), (600, 0), (512, 300)]
"""(query length, context length) of each row."""
FEATURES: list[dict[str, Any]] = [
    {},
    {"sliding_window": 64},
    {"logit_softcap": 3.0},
    {"sinks": True},
    {"sliding_window": 100, "sinks": True},
]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("heads", "dims"), [((16, 4), (64, 64)), ((32, 4), (128, 128)), ((9, 3), (64, 64)), ((8, 8), (192, 128))]
)
def test_output_equals_the_cpu_in_float32(heads, dims, dtype, features) -> None:
    lengths = PagedBatchLengths.of([q for q, _ in MIXED], [c for _, c in MIXED])
    params = {"sinks": torch.randn(heads[0])} if features.get("sinks") else {}
    params = {**features, **params, "scale": dims[0] ** -0.5}
    store, tables = _filled_store(lengths, heads[1], dims, dtype)
    query = torch.randn(lengths.query_offsets[-1], heads[0], dims[0]).to(dtype)

    on_gpu = _run(lengths, tables, query.cuda(), store.pages(0), params)
    copy = store.checkpoint(range(store.num_blocks))
    on_cpu = _run(lengths, tables, query.float(), (copy.keys[0].float(), copy.values[0].float()), params)

    assert on_gpu.dtype == dtype
    torch.testing.assert_close(on_gpu.float().cpu(), on_cpu, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def _filled_store(
    lengths: PagedBatchLengths, num_kv_heads: int, dims: tuple[int, int], dtype: torch.dtype
) -> tuple[LayeredPagedKVStore, list[np.ndarray]]:
    """Return a store on the GPU with random keys and values in shuffled blocks, NaN in all other slots."""
    needed = [-(-n // BLOCK_SIZE) for n in lengths.kv_seq_lengths]
    shape = LayerKVShape(num_kv_heads=num_kv_heads, key_dim=dims[0], value_dim=dims[1])
    geometry = KVGeometry(layers=(shape,), block_size=BLOCK_SIZE, element_bytes=dtype.itemsize)
    store = LayeredPagedKVStore(geometry, sum(needed) + 9, dtype, "cuda")
    ids = np.random.default_rng(0).permutation(store.num_blocks)[: sum(needed)].astype(np.int32)
    tables = np.split(ids, np.cumsum(needed)[:-1])
    for pages in store.pages(0):
        pages.fill_(math.nan)
    for table, num_tokens in zip(tables, lengths.kv_seq_lengths, strict=True):
        positions = np.arange(num_tokens)
        slots = torch.from_numpy(table[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE)
        key, value = (torch.randn(num_tokens, num_kv_heads, dim, device="cuda", dtype=dtype) for dim in dims)
        store.write(0, slots.cuda(), key, value)
    return store, tables


def _run(
    lengths: PagedBatchLengths,
    tables: list[np.ndarray],
    query: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    params: dict[str, Any],
) -> torch.Tensor:
    batch = RaggedBatch.build(
        lengths=lengths,
        num_decode_rows=4,
        block_size=BLOCK_SIZE,
        token_ids=np.zeros(lengths.query_offsets[-1], dtype=np.int64),
        block_tables=tables,
        sampling_rows=[],
        device=query.device,
    )
    if "sinks" in params:
        params = {**params, "sinks": params["sinks"].to(query.device)}
    backend = TorchAttention()
    return backend.run(backend.plan(batch), query, *pages, AttentionParams(**params))
