"""The torch backend against a naive oracle: one softmax per row in float64, no pages, no groups."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.attention import reference
from moesaic.attention.base import AttentionParams
from moesaic.attention.reference import TorchAttention
from moesaic.batch import RaggedBatch
from moesaic.errors import InvariantError
from moesaic.kv.geometry import KVGeometry, LayerKVShape
from moesaic.sched.plan import PagedBatchLengths

Rows = Sequence[tuple[int, int]]
"""(query length, context length) of each row."""


class Case:
    """One step over shuffled, non-contiguous block tables; every slot that no row may see holds ``garbage``."""

    def __init__(
        self,
        rows: Rows,
        *,
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (8, 8),
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        garbage: float = math.nan,
        seed: int = 0,
    ) -> None:
        random = np.random.default_rng(seed)
        torch.manual_seed(seed)
        (num_heads, num_kv_heads), (key_dim, value_dim) = heads, dims
        self.rows = rows
        self.lengths = PagedBatchLengths.of([q for q, _ in rows], [c for _, c in rows])
        needed = [-(-n // block_size) for n in self.lengths.kv_seq_lengths]
        ids = random.permutation(2 * sum(needed) + 1)[: sum(needed)].astype(np.int32)
        self.tables = np.split(ids, np.cumsum(needed)[:-1])
        shape = (2 * sum(needed) + 1, block_size, num_kv_heads)
        self.key_pages = torch.full((*shape, key_dim), garbage, dtype=dtype)
        self.value_pages = torch.full((*shape, value_dim), garbage, dtype=dtype)
        self.query = torch.randn(self.lengths.query_offsets[-1], num_heads, key_dim).to(dtype)
        self.keys = [torch.randn(n, num_kv_heads, key_dim).to(dtype) for n in self.lengths.kv_seq_lengths]
        self.values = [torch.randn(n, num_kv_heads, value_dim).to(dtype) for n in self.lengths.kv_seq_lengths]
        for table, key, value in zip(self.tables, self.keys, self.values, strict=True):
            positions = torch.arange(len(key))
            block = torch.from_numpy(table).long()[positions // block_size]
            self.key_pages[block, positions % block_size] = key
            self.value_pages[block, positions % block_size] = value
        self.batch = RaggedBatch.build(
            lengths=self.lengths,
            num_decode_rows=0,
            block_size=block_size,
            token_ids=np.zeros(self.lengths.query_offsets[-1], dtype=np.int64),
            block_tables=self.tables,
            sampling_rows=[],
        )

    def run(self, params: AttentionParams, out: torch.Tensor | None = None) -> torch.Tensor:
        backend = TorchAttention()
        return backend.run(backend.plan(self.batch), self.query, self.key_pages, self.value_pages, params, out)

    def expected(self, params: AttentionParams) -> torch.Tensor:
        offsets = self.lengths.query_offsets
        return torch.cat(
            [
                _oracle(self.query[offsets[r] : offsets[r + 1]], context, self.keys[r], self.values[r], params)
                for r, (_, context) in enumerate(self.rows)
            ]
        )


def _oracle(
    query: torch.Tensor, context: int, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """Attention of one row in float64: every query on its own."""
    group = query.shape[1] // key.shape[1]
    key, value = (t.double().repeat_interleave(group, dim=1) for t in (key, value))
    out = torch.empty(*query.shape[:2], value.shape[2], dtype=torch.float64)
    for i, position in enumerate(range(context, context + len(query))):
        seen = slice(0 if params.sliding_window is None else max(0, position - params.sliding_window + 1), position + 1)
        scores = torch.einsum("hd,lhd->hl", query[i].double(), key[seen]) * params.scale
        if params.logit_softcap is not None:
            scores = params.logit_softcap * torch.tanh(scores / params.logit_softcap)
        if params.sinks is not None:
            scores = torch.cat([params.sinks.double()[:, None], scores], dim=1)
        weights = scores.softmax(dim=1)[:, -len(key[seen]) :]
        out[i] = torch.einsum("hl,lhd->hd", weights, value[seen])
    return out


def _params(
    case: Case, *, window: int | None = None, softcap: float | None = None, sinks: bool = False
) -> AttentionParams:
    return AttentionParams(
        scale=case.query.shape[2] ** -0.5,
        sliding_window=window,
        logit_softcap=softcap,
        sinks=torch.randn(case.query.shape[1]) if sinks else None,
    )


def _assert_equal(case: Case, params: AttentionParams, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(case.run(params).double(), case.expected(params), atol=tolerance, rtol=tolerance)


MIXED: Rows = [(1, 17), (1, 0), (1, 40), (5, 0), (3, 9), (16, 16), (7, 1), (1, 3)]
FEATURES = [
    {},
    {"window": 1},
    {"window": 6},
    {"softcap": 2.0},
    {"sinks": True},
    {"window": 5, "sinks": True, "softcap": 3.0},
]


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("dims", [(8, 8), (12, 8), (4, 6)])
@pytest.mark.parametrize("heads", [(3, 3), (4, 1), (9, 3)])
def test_mixed_batches_equal_the_oracle(heads, dims, features) -> None:
    case = Case(MIXED, heads=heads, dims=dims)
    _assert_equal(case, _params(case, **features))


def test_the_output_lies_where_it_was_asked_for() -> None:
    case = Case(MIXED, heads=(4, 2), dims=(12, 8))
    out = torch.full((*case.query.shape[:2], 8), math.nan)
    assert case.run(_params(case), out).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, case.run(_params(case)), rtol=0, atol=0)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("query_length", [1, 4, 16, 17])
@pytest.mark.parametrize("context", [0, 1, 15, 16, 33])
def test_rows_that_end_at_or_beside_a_page_edge_equal_the_oracle(block_size, query_length, context) -> None:
    case = Case([(query_length, context)], block_size=block_size)
    _assert_equal(case, _params(case))


@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_long_chunks_beside_decode_rows_equal_the_oracle(features) -> None:
    case = Case([(1, 300), (1, 2), (257, 0), (256, 70), (2, 500)], heads=(2, 1), block_size=16)
    _assert_equal(case, _params(case, **features))


@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_tiny_limits_change_the_groups_but_not_the_result(monkeypatch, features) -> None:
    """Queries cut into tiles, one row per group, masks that are not kept: the paths of long contexts."""
    monkeypatch.setattr(reference, "MAX_SCORES", 64)
    monkeypatch.setattr(reference, "MAX_GATHER_BYTES", {"cpu": 1})
    monkeypatch.setattr(reference, "MAX_CACHED_MASK", 20)
    monkeypatch.setattr(reference, "LONG_CHUNK_TOKENS", 4)
    case = Case(MIXED)
    _assert_equal(case, _params(case, **features))


@pytest.mark.parametrize("query_length", [5, 6, 7])
def test_a_fresh_prompt_about_as_long_as_the_window_equals_the_oracle(query_length) -> None:
    """Up to the window it is plain causal attention; one token more and the first position is hidden."""
    case = Case([(query_length, 0)])
    _assert_equal(case, _params(case, window=6))


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 90)), min_size=1, max_size=9),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 1), (9, 3)]),
    dims=st.sampled_from([(8, 8), (8, 4), (4, 8)]),
    block_size=st.sampled_from([1, 3, 4, 16]),
    window=st.none() | st.integers(1, 30),
    softcap=st.none() | st.just(4.0),
    sinks=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_batch_equals_the_oracle(rows, heads, dims, block_size, window, softcap, sinks, seed) -> None:
    case = Case(rows, heads=heads, dims=dims, block_size=block_size, seed=seed)
    _assert_equal(case, _params(case, window=window, softcap=softcap, sinks=sinks))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_garbage_in_stale_pages_never_reaches_the_output(garbage, features) -> None:
    case = Case(MIXED, garbage=garbage)
    out = case.run(_params(case, **features))
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_half_precision_stays_near_the_oracle(dtype, features) -> None:
    case = Case(MIXED, dtype=dtype)
    params = _params(case, **features)
    assert case.run(params).dtype == dtype
    _assert_equal(case, params, tolerance=2e-2)


def test_a_row_depends_on_no_other_row() -> None:
    """A row full of NaN stays alone with it."""
    case = Case(MIXED)
    table = torch.from_numpy(case.tables[4]).long()
    before = case.run(_params(case))
    case.key_pages[table] = math.nan
    after = case.run(_params(case))
    first, last = case.lengths.query_offsets[4:6]
    assert after[first:last].isnan().all()
    assert torch.equal(torch.cat([before[:first], before[last:]]), torch.cat([after[:first], after[last:]]))


def test_later_positions_never_reach_earlier_queries() -> None:
    case = Case([(6, 5)])
    before = case.run(_params(case))
    slot = case.batch.slot_mapping[3]
    case.key_pages.flatten(0, 1)[slot] += 100.0
    case.value_pages.flatten(0, 1)[slot] += 100.0
    after = case.run(_params(case))
    assert torch.equal(before[:3], after[:3])
    assert not torch.isclose(before[3:], after[3:]).all(dim=(1, 2)).any()


def test_one_plan_serves_layers_of_different_kinds() -> None:
    case = Case(MIXED)
    backend = TorchAttention()
    plan = backend.plan(case.batch)
    for features in [*FEATURES, *FEATURES]:
        params = _params(case, **features)
        out = backend.run(plan, case.query, case.key_pages, case.value_pages, params)
        torch.testing.assert_close(out.double(), case.expected(params), atol=1e-5, rtol=1e-5)


def test_decode_rows_of_like_length_share_a_group_and_a_long_chunk_has_its_own() -> None:
    case = Case([*[(1, 100 + i) for i in range(10)], (300, 50)], heads=(2, 1), block_size=16)
    plan = TorchAttention().plan(case.batch)
    kind = reference._LayerKind.of(case.query, case.key_pages, case.value_pages, _params(case))
    assert [(g.num_rows, g.kept is None) for g in plan.groups(kind)] == [(10, True), (1, True)]


def test_window_layers_gather_only_the_positions_in_the_window() -> None:
    case = Case([(1, 400), (4, 400)])
    kind = reference._LayerKind.of(case.query, case.key_pages, case.value_pages, _params(case, window=16))
    assert [g.key_positions.shape[1] for g in TorchAttention().plan(case.batch).groups(kind)] == [16, 19]


def test_query_of_another_step_is_refused_with_both_sizes() -> None:
    case = Case(MIXED)
    with pytest.raises(InvariantError, match=r"\(1, 4, 8\).*35 planned tokens"):
        TorchAttention().run(
            TorchAttention().plan(case.batch), case.query[:1], case.key_pages, case.value_pages, _params(case)
        )


def test_every_geometry_is_supported() -> None:
    shape = LayerKVShape(num_kv_heads=3, key_dim=24, value_dim=16)
    assert TorchAttention().supports(KVGeometry(layers=(shape,), block_size=7, element_bytes=4)) is None
