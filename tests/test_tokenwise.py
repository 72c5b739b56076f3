"""Token by token, beside the batched runner. Equality bit for bit is in ``tests/engine/test_metamorphic.py``."""

import numpy as np
import pytest
import torch

from moesaic.attention.reference import TorchAttention
from moesaic.batch import RaggedBatch
from moesaic.errors import ConfigError
from moesaic.kv.geometry import KVGeometry
from moesaic.kv.store import LayeredPagedKVStore
from moesaic.runner import ModelRunner
from moesaic.sched.plan import PagedBatchLengths
from moesaic.testing.models import tiny_causal_lm, tiny_model
from moesaic.tokenwise import TokenwiseRunner, check_tokenwise

BLOCK_SIZE = 2


def create_runner(kind: type[ModelRunner]) -> ModelRunner:
    model = tiny_causal_lm(tiny_model("qwen3_moe"))
    geometry = KVGeometry(layers=model.info.kv_shapes, block_size=BLOCK_SIZE, element_bytes=4)
    return kind(model, TorchAttention(), LayeredPagedKVStore(geometry, 8, model.dtype))


def batch(sampling_rows: list[int], extra: tuple[int, ...] = ()) -> RaggedBatch:
    """Three fresh rows of 1, 5 and 2 tokens; blocks of different numbers, so that tables are padded."""
    return RaggedBatch.build(
        lengths=PagedBatchLengths.of([1, 5, 2], [0, 0, 0]),
        num_decode_rows=1,
        block_size=BLOCK_SIZE,
        token_ids=np.array([7, 3, 9, 4, 8, 5, 11, 6], dtype=np.int64),
        block_tables=[np.array(ids, dtype=np.int32) for ids in ([4], [6, 0, 3], [5])],
        sampling_rows=sampling_rows,
        extra_logit_indices=extra,
    )


def test_logits_come_in_the_order_they_are_wanted_in() -> None:
    one_by_one, batched = create_runner(TokenwiseRunner), create_runner(ModelRunner)
    step = batch([0, 2], extra=(4, 1, 7))
    torch.testing.assert_close(one_by_one.run(step), batched.run(step), atol=1e-4, rtol=0)
    for ours, theirs in zip(one_by_one.store.pages(0), batched.store.pages(0), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_a_step_that_samples_nothing_gives_no_logits() -> None:
    logits = create_runner(TokenwiseRunner).run(batch([]))
    assert logits.shape == (0, 160)
    assert logits.dtype == torch.float32


def test_devices_that_are_not_proven_are_refused() -> None:
    check_tokenwise(torch.device("cpu"))
    with pytest.raises(ConfigError, match="on cuda, where it is not proven; use --device cpu"):
        check_tokenwise(torch.device("cuda"))
