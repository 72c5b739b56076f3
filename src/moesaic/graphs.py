"""CUDA graphs of decode steps: one launch where a step of the native model has some hundreds.

A graph holds a fixed number of rows; a step takes the next larger one. Padded rows write to no slot, are routed to no
expert and read one token of page 0; what they compute is never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from moesaic.attention.base import AttentionBackend
from moesaic.batch import RaggedBatch
from moesaic.errors import Refused
from moesaic.experts.triton import TritonExperts
from moesaic.models.base import StepContext
from moesaic.models.native import NativeCausalLM
from moesaic.sched.plan import PagedBatchLengths

if TYPE_CHECKING:
    from moesaic.kv.store import LayeredPagedKVStore

Progress = Callable[[str, float], None]


class DecodeGraphAttention(AttentionBackend, Protocol):
    """Attention whose launches a graph may hold: what changes from step to step is in buffers that stay."""

    def update(self, kv_seq_lengths: Sequence[int], page_indices: torch.Tensor) -> None:
        """Plan the next replay: lengths of up to as many rows as the graph has, and their pages (int32)."""
        ...


class GraphableAttention(AttentionBackend, Protocol):
    """A backend that graphs can use."""

    def decode_graph(self, num_rows: int) -> DecodeGraphAttention:
        """Return attention for graphs of exactly ``num_rows`` decode rows; allocates."""
        ...


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Return the numbers of rows to capture, ascending: the powers of two below ``max_rows``, and that.

    Padding is cheap where experts dominate: a padded row touches none (H200, 2026-12-01, docs/benchmarks).
    """
    return (*(1 << i for i in range((max_rows - 1).bit_length())), max_rows)


def graph_refusal(model: object, attention: object, device: torch.device) -> Refused | None:
    """Return why decode steps of these cannot be captured, or None if they can."""
    if device.type != "cuda":
        return Refused(f"graphs need a CUDA device, this is {device.type}")
    if not isinstance(model, NativeCausalLM):
        return Refused("transformers' layers cannot be captured, only the native definition")
    if not isinstance(model.experts, TritonExperts) or model.experts.refusals:
        return Refused("grouped products of experts cannot be captured, only the fused kernels")
    if not hasattr(attention, "decode_graph"):
        return Refused("this attention backend plans on the host in a way that graphs cannot hold")
    return None


@dataclass(slots=True)
class _Graph:
    """One captured size."""

    attention: DecodeGraphAttention
    graph: torch.cuda.CUDAGraph


class DecodeGraphs:
    """Captured decode steps of up to ``max_rows`` rows, over one set of input buffers and one of logits."""

    def __init__(
        self,
        model: NativeCausalLM,
        attention: GraphableAttention,
        store: LayeredPagedKVStore,
        max_rows: int,
        progress: Progress | None = None,
    ) -> None:
        """Capture every size, the largest first so that the others fit into its memory; waits for the device."""
        self._model = model
        self._store = store
        self.sizes = graph_sizes(max_rows)
        most, device = self.sizes[-1], model.device
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._slots = torch.full((most,), -1, dtype=torch.int64, device=device)
        self._num_valid = torch.zeros(1, dtype=torch.int32, device=device)
        self._rows = torch.arange(most, device=device)
        self._logits = torch.zeros(most, model.info.vocab_size, dtype=torch.float32, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: cuBLAS keeps a workspace for each stream.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        self._graphs: dict[int, _Graph] = {}
        for done, size in enumerate(reversed(self.sizes)):
            if progress is not None:
                progress("capture decode steps", done / len(self.sizes))
            self._graphs[size] = self._capture(size, attention.decode_graph(size))
        if progress is not None:
            progress("capture decode steps", 1.0)

    def size_for(self, batch: RaggedBatch) -> int | None:
        """Return the graph that ``batch`` fits, or None if it has chunks or more rows than any."""
        if batch.num_decode_rows != batch.num_rows or batch.num_rows > self.sizes[-1]:
            return None
        return next(size for size in self.sizes if size >= batch.num_rows)

    @torch.inference_mode()
    def run(self, batch: RaggedBatch, size: int) -> torch.Tensor:
        """Return float32 logits [R, V] of a step of decode rows; they hold until the next call."""
        num_rows, captured = batch.num_rows, self._graphs[size]
        self._token_ids[:num_rows].copy_(batch.token_ids)
        self._positions[:num_rows].copy_(batch.positions)
        self._slots[num_rows:size].fill_(-1)
        self._slots[:num_rows].copy_(batch.slot_mapping)
        self._num_valid.fill_(num_rows)
        captured.attention.update(batch.lengths.kv_seq_lengths, batch.page_indices)
        captured.graph.replay()
        return self._logits[:num_rows]

    @torch.inference_mode()
    def _capture(self, size: int, attention: DecodeGraphAttention) -> _Graph:
        context = StepContext(batch=self._batch(size), store=self._store, attention=attention, attention_plan=None)
        attention.update((1,) * size, torch.zeros(size, dtype=torch.int32, device=self._model.device))
        device = self._model.device
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._forward(size, context)  # compiles kernels and sets up libraries, which a capture must not
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool)
            self._forward(size, context)
            graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        return _Graph(attention, graph)

    def _forward(self, size: int, context: StepContext) -> None:
        hidden = self._model.embed(context.batch.token_ids)
        hidden = self._model.layers(hidden, 0, self._model.info.num_layers, context)
        self._logits[:size].copy_(self._model.head(hidden))

    def _batch(self, size: int) -> RaggedBatch:
        """Return the batch that the graph of ``size`` rows reads: views of the input buffers."""
        pages = torch.zeros(size, 1, dtype=torch.int32, device=self._model.device)
        return RaggedBatch(
            lengths=PagedBatchLengths.of([1] * size, [0] * size),
            num_decode_rows=size,
            block_size=self._store.geometry.block_size,
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slot_mapping=self._slots[:size],
            block_tables=pages,
            page_indices=pages.flatten(),
            logit_indices=self._rows[:size],
            num_sampling_rows=size,
            num_valid_tokens=self._num_valid,
        )
