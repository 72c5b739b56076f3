"""One forward of the model over one ragged batch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moesaic.attention.base import AttentionBackend
from moesaic.batch import RaggedBatch
from moesaic.errors import InvariantError
from moesaic.experts.traced import TracedExperts
from moesaic.graphs import DecodeGraphs
from moesaic.kv.store import LayeredPagedKVStore
from moesaic.models.base import CausalLM, StepContext
from moesaic.segments import SegmentGraphs


class ModelRunner:
    """Runs batches: writes their KV to the store and returns the logits that are wanted."""

    def __init__(self, model: CausalLM, attention: AttentionBackend, store: LayeredPagedKVStore) -> None:
        self.model = model
        self.attention = attention
        self.store = store
        self.graphs: DecodeGraphs | None = None
        """Captured decode steps, if there are any."""
        self.segments: SegmentGraphs | None = None
        """Captured segments of other steps, if there are any."""

    @torch.inference_mode()
    def run(self, batch: RaggedBatch) -> torch.Tensor:
        """Return float32 logits [S, V] for ``batch.logit_indices``; attention is planned once, here.

        The logits of a captured step hold until the next call.
        """
        if self.graphs is not None and (size := self.graphs.size_for(batch)) is not None:
            return self.graphs.run(batch, size)
        model = self.model
        if model.experts is not None:
            model.experts.begin_step(batch)
        hidden = self._hidden(batch)
        if not len(batch.logit_indices):
            return hidden.new_empty(0, model.info.vocab_size, dtype=torch.float32)
        return model.head(hidden.index_select(0, batch.logit_indices))

    @contextmanager
    def traced(self) -> Iterator[TracedExperts]:
        """Note the routing of all that is run in the block; captured steps are not used in it.

        Raises: ``InvariantError`` if the model's experts cannot be seen.
        """
        model, graphs, segments = self.model, self.graphs, self.segments
        if model.experts is None:
            raise InvariantError("the model has no expert backend, so its routing cannot be traced")
        experts, trace = model.experts, TracedExperts(model.experts)
        model.experts, self.graphs, self.segments = trace, None, None
        try:
            yield trace
        finally:
            model.experts, self.graphs, self.segments = experts, graphs, segments

    def _hidden(self, batch: RaggedBatch) -> torch.Tensor:
        """Return hidden states [T, C] after the last layer."""
        plan = self.attention.plan(batch)
        if self.segments is not None and (size := self.segments.size_for(batch.num_tokens)) is not None:
            return self.segments.run(batch, size, plan)
        model = self.model
        context = StepContext(batch=batch, store=self.store, attention=self.attention, attention_plan=plan)
        return model.layers(model.embed(batch.token_ids), 0, model.info.num_layers, context)
