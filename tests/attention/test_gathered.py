"""What is copied into one piece, and where; the copy itself is tried on a GPU."""

import numpy as np
import pytest
import torch

from moesaic.attention.base import AttentionLimits
from moesaic.attention.gathered import GatheredKV, GatheredLayout
from moesaic.kernels import reference
from moesaic.kv.geometry import KVGeometry, LayerKVShape


def create_gathered(max_pages: int = 4096) -> GatheredKV:
    shapes = (
        LayerKVShape(num_kv_heads=2, key_dim=8, value_dim=8),
        LayerKVShape(num_kv_heads=1, key_dim=4, value_dim=4),
    )
    geometry = KVGeometry(layers=shapes, block_size=4, element_bytes=4)
    limits = AttentionLimits(
        geometry=geometry, num_query_heads=16, dtype=torch.float32, max_rows=8, max_tokens=64, max_pages=max_pages
    )
    return GatheredKV(limits, torch.device("cpu"))


def test_memory_is_that_of_the_pool_or_65536_tokens_of_the_widest_layer() -> None:
    assert create_gathered(10).num_bytes == 2 * 10 * 4 * 2 * 8 * 4
    assert create_gathered(10**6).num_bytes == 2 * 65536 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("queries", "kv", "expected"),
    [
        ([512], [8192], True),  # 512 queries times 8 heads of a group on each token of context
        ([255], [8192], False),
        ([256], [8192], True),
        ([512], [4095], False),  # a copy costs more than it saves
        ([512], [16385], False),  # more than the pool of this test holds
        ([512, 3], [4096, 4096], True),
        ([400, 3, 3], [4096, 4096, 4096], False),  # most of the copy would be for rows of three queries
    ],
)
def test_rows_are_copied_where_it_is_worth_it(queries: list[int], kv: list[int], expected: bool) -> None:
    assert create_gathered().is_worth_it(queries, kv, group=8) == expected


def test_the_layout_packs_rows_without_gaps() -> None:
    layout = GatheredLayout.of(np.array([5, 4, 1]), torch.tensor([7, 2, 9, 4], dtype=torch.int32), block_size=4)
    assert layout.page_starts.tolist() == [0, 4, 5, 9, 10]
    assert layout.num_tokens == 10
    pages = torch.arange(10 * 4).view(10, 4, 1, 1).float()
    keys, values = torch.empty(10, 1, 1), torch.empty(10, 1, 1)
    reference.gather_pages(pages, -pages, layout.page_indices, layout.page_starts, keys, values)
    assert keys.flatten().tolist() == [28, 29, 30, 31, 8, 36, 37, 38, 39, 16]
    assert torch.equal(values, -keys)
