"""FlashInfer against the torch backend in float32, over shuffled pages full of NaN where nobody may read.

bf16 inputs, softmax in float32: outputs differ by their own rounding, 2e-2 of values of unit size at most.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch

from moesaic.attention.base import AttentionLimits, AttentionParams
from moesaic.attention.flashinfer import FlashInferAttention, flashinfer_backend
from moesaic.attention.reference import TorchAttention
from moesaic.batch import RaggedBatch
from moesaic.errors import InvariantError
from moesaic.kv.geometry import KVGeometry, LayerKVShape
from moesaic.kv.store import LayeredPagedKVStore
from moesaic.sched.plan import PagedBatchLengths

pytestmark = pytest.mark.gpu

BLOCK_SIZE = 16
TOLERANCE = 2e-2
Rows = list[tuple[int, int]]
"""(query length, context length) of each row, decode rows first."""
DECODE: Rows = [(1, 0), (1, 14), (1, 15), (1, 16), (1, 700), (1, 4095)]
CHUNKS: Rows = [(15, 0), (16, 0), (17, 0), (5, 11), (33, 100), (600, 0), (512, 300), (512, 4096)]


def create_backend(heads: tuple[int, int] = (32, 4), head_dim: int = 128, **limits: int) -> FlashInferAttention:
    backend = flashinfer_backend(torch.device("cuda"))
    assert isinstance(backend, FlashInferAttention), f"this suite was asked for, but: {backend}"
    shape = LayerKVShape(num_kv_heads=heads[1], key_dim=head_dim, value_dim=head_dim)
    backend.prepare(
        AttentionLimits(
            geometry=KVGeometry(layers=(shape,), block_size=BLOCK_SIZE, element_bytes=2),
            num_query_heads=heads[0],
            dtype=torch.bfloat16,
            **({"max_rows": 64, "max_tokens": 4096, "max_pages": 8192} | limits),
        )
    )
    return backend


class Step:
    """A batch with its pages and queries, and what the torch backend makes of it in float32 on the GPU."""

    def __init__(self, rows: Rows, heads: tuple[int, int] = (32, 4), head_dim: int = 128, seed: int = 0) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        lengths = PagedBatchLengths.of([q for q, _ in rows], [c for _, c in rows])
        needed = [-(-n // BLOCK_SIZE) for n in lengths.kv_seq_lengths]
        shape = LayerKVShape(num_kv_heads=heads[1], key_dim=head_dim, value_dim=head_dim)
        geometry = KVGeometry(layers=(shape,), block_size=BLOCK_SIZE, element_bytes=2)
        store = LayeredPagedKVStore(geometry, sum(needed) + 9, torch.bfloat16, "cuda")
        ids = np.random.default_rng(seed).permutation(store.num_blocks)[: sum(needed)].astype(np.int32)
        self.tables = np.split(ids, np.cumsum(needed)[:-1])
        self.pages = store.pages(0)
        for pages in self.pages:
            pages.fill_(math.nan)
        for table, num_tokens in zip(self.tables, lengths.kv_seq_lengths, strict=True):
            at = np.arange(num_tokens)
            slots = torch.from_numpy(table[at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE).cuda()
            new = (
                torch.randn(num_tokens, heads[1], head_dim, device="cuda", generator=generator).bfloat16()
                for _ in range(2)
            )
            store.write(0, slots, *new)
        self.batch = RaggedBatch.build(
            lengths=lengths,
            num_decode_rows=sum(q == 1 for q, _ in rows),
            block_size=BLOCK_SIZE,
            token_ids=np.zeros(lengths.query_offsets[-1], dtype=np.int64),
            block_tables=self.tables,
            sampling_rows=[],
            device="cuda",
        )
        shape_of_query = (lengths.query_offsets[-1], heads[0], head_dim)
        self.query = torch.randn(shape_of_query, device="cuda", generator=generator).bfloat16()

    def expected(self, params: AttentionParams) -> torch.Tensor:
        oracle = TorchAttention()
        return oracle.run(oracle.plan(self.batch), self.query.float(), *(p.float() for p in self.pages), params)

    def check(self, backend: FlashInferAttention, params: AttentionParams) -> None:
        if backend._workspace is not None:
            backend._workspace.fill_(0xFF)  # NaN as float32: parts that nobody wrote would show
        out = backend.run(backend.plan(self.batch), self.query, *self.pages, params)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), self.expected(params), atol=TOLERANCE, rtol=TOLERANCE)


PLAIN = AttentionParams(scale=128**-0.5)


@pytest.mark.parametrize("rows", [DECODE, CHUNKS, DECODE + CHUNKS], ids=["decode", "chunks", "mixed"])
@pytest.mark.parametrize("heads", [(32, 4), (8, 8), (40, 8), (64, 4)], ids=str)
def test_output_equals_torch_in_float32(heads: tuple[int, int], rows: Rows) -> None:
    Step(rows, heads).check(create_backend(heads), PLAIN)


def test_the_output_lies_where_it_was_asked_for(backend: FlashInferAttention) -> None:
    step = Step(DECODE + CHUNKS)
    out = torch.full((len(step.query) + 3, 32, 128), math.nan, device="cuda").bfloat16()[: len(step.query)]
    returned = backend.run(backend.plan(step.batch), step.query, *step.pages, PLAIN, out=out)
    assert returned.data_ptr() == out.data_ptr()
    torch.testing.assert_close(out.float(), step.expected(PLAIN), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 1000])
@pytest.mark.parametrize("query", [1, 2, 15, 16, 17, 127, 128, 129])
def test_page_and_tile_edges(backend: FlashInferAttention, query: int, context: int) -> None:
    Step([(1, context), (query + 1, context)]).check(backend, PLAIN)


def test_a_long_chunk_after_the_first_finds_room_for_split_kv(backend: FlashInferAttention) -> None:
    """Reported from the field as "0 bytes available": the second chunk of 512 tokens splits its KV, the first not."""
    for context in (0, 512, 16384):
        Step([(512, context)]).check(backend, PLAIN)
        Step([(1, 100)] * 32 + [(512, context)]).check(backend, PLAIN)


GATHERED: list[Rows] = [
    [(600, 4000)],
    [(1, 300), (2016, 5000)],
    [(512, 4096), (511, 4095), (700, 0), (513, 1)],
    [(1000, 15), (1000, 8001), (3, 9)],
]


@pytest.mark.parametrize("heads", [(32, 4), (64, 4)], ids=str)
@pytest.mark.parametrize("rows", GATHERED, ids=str)
def test_chunks_on_long_contexts_are_copied_into_one_piece(heads: tuple[int, int], rows: Rows) -> None:
    """The scratch memory is full of NaN behind the rows: nobody may read it."""
    backend, step = create_backend(heads), Step(rows, heads)
    gathered = backend._gathered
    assert gathered is not None
    gathered._keys.fill_(math.nan)
    gathered._values.fill_(math.nan)
    step.check(backend, PLAIN)
    num_written = int((~gathered._keys.isnan()).sum()) // (heads[1] * 128)
    assert num_written == sum(q + c for q, c in rows if q > 1)


def test_two_gathered_steps_and_layers_do_not_mix(backend: FlashInferAttention) -> None:
    steps = [Step([(1000, 6000)], seed=1), Step([(900, 3300), (800, 4100)], seed=2)]
    for step in steps:
        plan = backend.plan(step.batch)
        for scale in (0.05, 0.2):
            params = AttentionParams(scale=scale)
            out = backend.run(plan, step.query, *step.pages, params)
            torch.testing.assert_close(out.float(), step.expected(params), atol=TOLERANCE, rtol=TOLERANCE)


def test_a_prepared_backend_plans_any_step_within_its_limits() -> None:
    """Both kernels of chunks, however many rows: the workspace was sized for it."""
    backend = create_backend(max_rows=32, max_tokens=2048)
    for rows in ([(1, 4000)] * 32, [(2048, 8192)], [(64, 2000)] * 32, [(3, 30000)] * 32, [(1, 8)] * 31 + [(700, 9000)]):
        Step(rows).check(backend, PLAIN)


def test_layers_of_different_scales_share_a_step(backend: FlashInferAttention) -> None:
    step = Step(DECODE + CHUNKS)
    plan = backend.plan(step.batch)
    for scale in (0.05, 0.2, 0.05):
        params = AttentionParams(scale=scale)
        out = backend.run(plan, step.query, *step.pages, params)
        torch.testing.assert_close(out.float(), step.expected(params), atol=TOLERANCE, rtol=TOLERANCE)


def test_sinks_take_their_share_of_the_softmax(backend: FlashInferAttention) -> None:
    sinks = torch.linspace(-4, 8, 32, device="cuda")
    Step(DECODE + CHUNKS).check(backend, AttentionParams(scale=128**-0.5, sinks=sinks))


@pytest.mark.parametrize("window", [1, 64, 100])
def test_sliding_windows(backend: FlashInferAttention, window: int) -> None:
    Step(DECODE + CHUNKS).check(backend, AttentionParams(scale=128**-0.5, sliding_window=window))


@pytest.mark.parametrize("features", [{}, {"sliding_window": 128}], ids=str)
def test_heads_of_64_with_sinks_as_gpt_oss_has(features: dict[str, Any]) -> None:
    sinks = torch.linspace(-4, 8, 64, device="cuda")
    backend = create_backend((64, 8), 64)
    Step(DECODE + CHUNKS, (64, 8), 64).check(backend, AttentionParams(scale=0.125, sinks=sinks, **features))


@pytest.mark.parametrize("num_rows", [1, 2, 8, 64])
def test_a_captured_step_is_replayed_for_other_lengths_and_fewer_rows(
    backend: FlashInferAttention, num_rows: int
) -> None:
    """Graph against eager at the captured size and one row less; the padded row is whatever it is."""
    graph_backend = backend.decode_graph(num_rows)
    first = Step([(1, 40)] * num_rows)
    longest = [(1, 37 * i % 3000) for i in range(num_rows)]
    steps = [Step(longest, seed=1), Step([(1, 0)] * num_rows, seed=2), Step(longest[1:] or [(1, 5000)], seed=3)]
    num_blocks = max(len(step.pages[0]) for step in (first, *steps))
    pages = tuple(torch.zeros(num_blocks, *first.pages[0].shape[1:], device="cuda").bfloat16() for _ in range(2))
    query = torch.zeros_like(first.query)

    def load(step: Step) -> int:
        graph_backend.update(step.batch.lengths.kv_seq_lengths, step.batch.page_indices)
        for mine, new in zip(pages, step.pages, strict=True):
            mine[: len(new)].copy_(new)
        query.zero_()[: len(step.query)].copy_(step.query)
        return len(step.query)

    load(first)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph_backend.run(None, query, *pages, PLAIN)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = graph_backend.run(None, query, *pages, PLAIN)
    for step in steps:
        num_real = load(step)
        backend.workspace.fill_(0xFF)
        graph.replay()
        torch.testing.assert_close(out[:num_real].float(), step.expected(PLAIN), atol=TOLERANCE, rtol=TOLERANCE)


def test_updates_in_a_row_do_not_overwrite_each_other(backend: FlashInferAttention) -> None:
    """Each writes pinned memory whose copy to the device may be on its way: nothing waits between these steps."""
    steps = [Step([(1, 50 * i + 7 * row) for row in range(8)], seed=i) for i in range(6)]
    graph_backend = backend.decode_graph(8)
    outs = []
    for step in steps:
        graph_backend.update(step.batch.lengths.kv_seq_lengths, step.batch.page_indices)
        outs.append(graph_backend.run(None, step.query, *step.pages, PLAIN))
    for step, out in zip(steps, outs, strict=True):
        torch.testing.assert_close(out.float(), step.expected(PLAIN), atol=TOLERANCE, rtol=TOLERANCE)


def test_a_captured_step_takes_no_more_than_it_has_room_for(backend: FlashInferAttention) -> None:
    graph_backend = backend.decode_graph(2)
    indices = torch.zeros(3, dtype=torch.int32, device="cuda")
    with pytest.raises(InvariantError, match="3 rows with 3 blocks do not fit a captured step of 2 rows"):
        graph_backend.update([1, 1, 1], indices)


@pytest.fixture(scope="module")
def backend() -> FlashInferAttention:
    return create_backend()
