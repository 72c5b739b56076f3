"""CUDA graphs of what lies between the attentions of a step, for steps with prompt chunks.

Attention of a mixed step is launched by its backend, whose plan depends on every length; the rest of a layer depends
on the number of tokens alone. A segment is the end of one layer and the beginning of the next, captured for a few
numbers of tokens; a step takes the next larger one. Padded tokens write to no slot and are routed to no expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moesaic.batch import RaggedBatch
from moesaic.models.base import StepContext
from moesaic.models.native import NativeCausalLM
from moesaic.sched.plan import PagedBatchLengths

if TYPE_CHECKING:
    from moesaic.attention.base import AttentionBackend
    from moesaic.kv.store import LayeredPagedKVStore

Progress = Callable[[str, float], None]

MOST_TOKENS = 4096
"""Larger steps keep the device busy longer than their launches take (Qwen3-30B-A3B, H200, 2026-12-01: about 60 ms of
kernels against 40 ms of launches)."""


def segment_sizes(max_tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens to capture, ascending: ``max_tokens``, which busy steps have, and rough steps below.

    The last is ``max_tokens`` or ``MOST_TOKENS``, whichever is less.
    """
    most = min(max_tokens, MOST_TOKENS)
    sizes = {most}
    size = 32
    while size < most:
        sizes |= {size, size * 3 // 2} if size * 3 // 2 < most else {size}
        size *= 2
    return tuple(sorted(sizes))


@dataclass(slots=True)
class _Captured:
    """One number of tokens: a graph before each attention and one after the last, and what the last leaves."""

    graphs: list[torch.cuda.CUDAGraph]
    hidden: torch.Tensor


class SegmentGraphs:
    """Captured segments over one set of input buffers, the largest size first: the others fit into its memory."""

    def __init__(
        self,
        model: NativeCausalLM,
        attention: AttentionBackend,
        store: LayeredPagedKVStore,
        max_tokens: int,
        progress: Progress | None = None,
    ) -> None:
        """Capture every size; waits for the device."""
        self._model, self._attention, self._store = model, attention, store
        self.sizes = segment_sizes(max_tokens)
        most, device, info = self.sizes[-1], model.device, model.info
        heads = (most, info.num_query_heads, info.kv_shapes[0].key_dim)
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._slots = torch.full((most,), -1, dtype=torch.int64, device=device)
        self._num_valid = torch.zeros(1, dtype=torch.int32, device=device)
        self._query = torch.zeros(heads, dtype=model.dtype, device=device)
        self._mixed = torch.zeros(heads, dtype=model.dtype, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: cuBLAS keeps a workspace for each stream.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        self._captured: dict[int, _Captured] = {}
        for done, size in enumerate(reversed(self.sizes)):
            if progress is not None:
                progress("capture segments", done / len(self.sizes))
            self._captured[size] = self._capture(size)
        if progress is not None:
            progress("capture segments", 1.0)

    def size_for(self, num_tokens: int) -> int | None:
        """Return the size that ``num_tokens`` fit, or None if they are more than any."""
        return next((size for size in self.sizes if size >= num_tokens), None)

    @torch.inference_mode()
    def run(self, batch: RaggedBatch, size: int, attention_plan: Any) -> torch.Tensor:
        """Return hidden states [T, C] after the last layer; they hold until the next call."""
        num_tokens, captured = batch.num_tokens, self._captured[size]
        self._token_ids[:num_tokens].copy_(batch.token_ids)
        self._positions[:num_tokens].copy_(batch.positions)
        self._slots[num_tokens:size].fill_(-1)
        self._slots[:num_tokens].copy_(batch.slot_mapping)
        self._num_valid.fill_(num_tokens)
        query, mixed = self._query[:num_tokens], self._mixed[:num_tokens]
        for index, graph in enumerate(captured.graphs[:-1]):
            graph.replay()
            params = self._model.attention_params(index)
            self._attention.run(attention_plan, query, *self._store.pages(index), params, out=mixed)
        captured.graphs[-1].replay()
        return captured.hidden[:num_tokens]

    @torch.inference_mode()
    def _capture(self, size: int) -> _Captured:
        context = StepContext(
            batch=self._batch(size), store=self._store, attention=self._attention, attention_plan=None
        )
        device = self._model.device
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(device))
        graphs: list[torch.cuda.CUDAGraph] = []
        with torch.cuda.stream(stream):
            for step in self._steps(size, context):  # compiles kernels, which a capture must not
                step()
            stream.synchronize()
            for step in self._steps(size, context):
                graph = torch.cuda.CUDAGraph()
                # Not torch.cuda.graph: it collects garbage each time, and there are some hundreds.
                graph.capture_begin(pool=self._pool)
                hidden = step()
                graph.capture_end()
                graphs.append(graph)
        torch.cuda.current_stream(device).wait_stream(stream)
        return _Captured(graphs, hidden)

    def _steps(self, size: int, context: StepContext) -> list[Callable[[], torch.Tensor]]:
        """Return the segments in order. Each hands its sum to the next, and only until that has been captured.

        So memory is used again by later segments: they always run in this order.
        """
        model, num_layers = self._model, self._model.info.num_layers
        state: dict[str, torch.Tensor] = {}

        def begin() -> torch.Tensor:
            return project(0, model.embed(context.batch.token_ids), None)

        def project(index: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
            query, state["residual"] = model.project(index, hidden, residual, context)
            return self._query[:size].copy_(query)

        def between(index: int) -> torch.Tensor:
            hidden, residual = model.route(index, self._mixed[:size], state["residual"], context)
            return project(index + 1, hidden, residual)

        def end() -> torch.Tensor:
            hidden, residual = model.route(num_layers - 1, self._mixed[:size], state["residual"], context)
            return hidden + residual

        return [begin, *(_bound(between, index) for index in range(num_layers - 1)), end]

    def _batch(self, size: int) -> RaggedBatch:
        """Return the batch that the segments of ``size`` tokens read: views of the input buffers."""
        pages = torch.zeros(1, 1, dtype=torch.int32, device=self._model.device)
        return RaggedBatch(
            lengths=PagedBatchLengths.of([size], [0]),
            num_decode_rows=0,
            block_size=self._store.geometry.block_size,
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slot_mapping=self._slots[:size],
            block_tables=pages,
            page_indices=pages.flatten(),
            logit_indices=pages.flatten()[:0].long(),
            num_sampling_rows=0,
            num_valid_tokens=self._num_valid,
        )


def _bound(step: Callable[[int], torch.Tensor], index: int) -> Callable[[], torch.Tensor]:
    return lambda: step(index)
