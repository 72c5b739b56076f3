"""What of the FlashInfer backend needs no GPU: when it is refused, how rows are split, how large the workspace is."""

import numpy as np
import pytest
import torch

from moesaic.attention.base import AttentionLimits
from moesaic.attention.flashinfer import FlashInferAttention, _split_rows, flashinfer_backend, workspace_bytes
from moesaic.attention.select import select_attention
from moesaic.batch import RaggedBatch
from moesaic.errors import ConfigError, Refused
from moesaic.kv.geometry import KVGeometry, LayerKVShape
from moesaic.sched.plan import PagedBatchLengths

H200_SMS = 132
MIB = 1 << 20


def create_geometry(num_kv_heads: int = 4, key_dim: int = 128, value_dim: int = 128, bytes_: int = 2) -> KVGeometry:
    shape = LayerKVShape(num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=value_dim)
    return KVGeometry(layers=(shape,), block_size=16, element_bytes=bytes_)


def create_limits(num_query_heads: int = 32, max_rows: int = 32, max_tokens: int = 2048) -> AttentionLimits:
    return AttentionLimits(
        geometry=create_geometry(),
        num_query_heads=num_query_heads,
        dtype=torch.bfloat16,
        max_rows=max_rows,
        max_tokens=max_tokens,
        max_pages=4096,
    )


def create_batch(query: list[int], context: list[int], num_decode_rows: int) -> RaggedBatch:
    lengths = PagedBatchLengths.of(query, context)
    tables, first = [], 0
    for num_tokens in lengths.kv_seq_lengths:
        tables.append(np.arange(first, first + -(-num_tokens // 16), dtype=np.int32))
        first += len(tables[-1])
    return RaggedBatch.build(
        lengths=lengths,
        num_decode_rows=num_decode_rows,
        block_size=16,
        token_ids=np.zeros(sum(query), dtype=np.int64),
        block_tables=tables,
        sampling_rows=[],
    )


def test_a_cpu_is_refused_and_torch_serves_instead() -> None:
    assert isinstance(flashinfer_backend(torch.device("cpu")), Refused)
    selection = select_attention("flashinfer", create_geometry(), "cpu")
    assert (selection.requested, selection.active) == ("flashinfer", "torch")
    assert "needs a CUDA device" in selection.reason
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        select_attention("flashinfer", create_geometry(), "cpu", strict=True)


@pytest.mark.parametrize(
    ("geometry", "reason"),
    [
        (create_geometry(bytes_=4), "4 bytes a number"),
        (create_geometry(key_dim=192), "keys of 192, values 128"),
        (create_geometry(key_dim=16, value_dim=16), "keys of 16"),
    ],
)
def test_layers_without_kernels_are_refused_by_their_shape(geometry: KVGeometry, reason: str) -> None:
    backend = FlashInferAttention.__new__(FlashInferAttention)  # its constructor asks a GPU for its size
    assert reason in str(backend.supports(geometry))
    assert backend.supports(create_geometry()) is None


def test_page_metadata_comes_from_kv_lengths_and_query_offsets_from_the_chunk_rows() -> None:
    decode, chunks = _split_rows(create_batch([1, 1, 5, 16], [15, 16, 0, 20], num_decode_rows=2))
    assert (decode.is_decode, decode.first_token, decode.last_token) == (True, 0, 2)
    assert decode.page_offsets.tolist() == [0, 1, 3]
    assert decode.last_page_lengths.tolist() == [16, 1]
    assert decode.page_indices.tolist() == [0, 1, 2]
    assert (chunks.is_decode, chunks.first_token, chunks.last_token) == (False, 2, 23)
    assert chunks.query_offsets.tolist() == [0, 5, 21]
    assert chunks.page_offsets.tolist() == [0, 1, 4]
    assert chunks.last_page_lengths.tolist() == [5, 4]
    assert chunks.page_indices.tolist() == [3, 4, 5, 6]
    assert {t.dtype for t in (chunks.query_offsets, chunks.page_offsets, chunks.last_page_lengths)} == {torch.int32}


def test_decode_rows_of_several_tokens_go_with_the_chunks() -> None:
    (rows,) = _split_rows(create_batch([1, 3], [15, 16], num_decode_rows=2))
    assert (rows.is_decode, rows.query_offsets.tolist()) == (False, [0, 1, 4])


def test_the_workspace_holds_the_step_that_overflowed_in_the_field() -> None:
    """Chunk 2 of 512 tokens of Qwen3-30B-A3B: 64 pieces take 128 MiB, and their scores one more."""
    num_bytes = workspace_bytes(create_limits(), num_kv_heads=4, head_dim=128, num_sms=H200_SMS)
    assert num_bytes >= 128 * MIB + MIB
    assert num_bytes < 140 * MIB


def test_the_workspace_of_captured_steps_grows_with_their_rows() -> None:
    """256 rows of 8 packed heads in tiles of 16: 383 pieces of 16 * 32 * 128 * 4 bytes. 200 rows run as 256."""
    for max_rows in (200, 256):
        limits = create_limits(max_rows=max_rows, max_tokens=272)
        many = workspace_bytes(limits, num_kv_heads=4, head_dim=128, num_sms=8)
        assert many >= 383 * 16 * 32 * 128 * 4
