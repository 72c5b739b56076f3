"""Compiling the native model's kernels for the steps to come, so that no request waits for a compiler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from moesaic.batch import RaggedBatch
from moesaic.kernels.launch import compiled_only
from moesaic.models.base import StepContext
from moesaic.sched.plan import PagedBatchLengths

if TYPE_CHECKING:
    from moesaic.attention.base import AttentionBackend
    from moesaic.kv.store import LayeredPagedKVStore
    from moesaic.models.native import NativeCausalLM


def step_sizes(max_tokens: int) -> tuple[int, ...]:
    """Return numbers of tokens that between them need all the variants of kernels of steps up to ``max_tokens``.

    Tiles, and the sizes within kernels that are powers of two, change with a doubling at most; ``max_tokens`` itself
    may lie between.
    """
    return (*(1 << i for i in range(max_tokens.bit_length()) if 1 << i < max_tokens), max_tokens)


@torch.inference_mode()
def compile_kernels(
    model: NativeCausalLM, attention: AttentionBackend, store: LayeredPagedKVStore, sizes: Iterable[int]
) -> None:
    """Compile the Triton kernels of one layer and the head for steps of these numbers of tokens.

    Runs no kernel of ours and writes to no page. All layers of a native model are of one shape.
    """
    with compiled_only():
        for size in sizes:
            for context in _contexts(size, model, attention, store):
                _touch(model, context)


def _touch(model: NativeCausalLM, context: StepContext) -> None:
    """Call each of a layer's kernels as a step does; what they return holds anything."""
    hidden = torch.zeros_like(model.embed(context.batch.token_ids))
    query, residual = model.project(0, hidden, None, context)
    hidden, residual = model.route(0, torch.zeros_like(query), residual, context)
    model.project(0, torch.zeros_like(hidden), residual, context)
    model.head(hidden[:1])


def _contexts(
    size: int, model: NativeCausalLM, attention: AttentionBackend, store: LayeredPagedKVStore
) -> Iterator[StepContext]:
    """Yield a step of ``size`` tokens as it is, and one with padding as captured steps have."""
    zeros = torch.zeros(size, dtype=torch.int64, device=model.device)
    pages = torch.zeros(1, 1, dtype=torch.int32, device=model.device)
    for num_valid in (None, torch.zeros(1, dtype=torch.int32, device=model.device)):
        batch = RaggedBatch(
            lengths=PagedBatchLengths.of([size], [0]),
            num_decode_rows=0,
            block_size=store.geometry.block_size,
            token_ids=zeros,
            positions=zeros,
            slot_mapping=zeros - 1,
            block_tables=pages,
            page_indices=pages.flatten(),
            logit_indices=zeros[:0],
            num_sampling_rows=0,
            num_valid_tokens=num_valid,
        )
        yield StepContext(batch=batch, store=store, attention=attention, attention_plan=None)
