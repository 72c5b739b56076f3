"""One forward of the model over one ragged batch."""

import torch

from moesaic.attention.base import AttentionBackend
from moesaic.batch import RaggedBatch
from moesaic.graphs import DecodeGraphs
from moesaic.kv.store import LayeredPagedKVStore
from moesaic.models.base import CausalLM, StepContext


class ModelRunner:
    """Runs batches: writes their KV to the store and returns the logits that are wanted."""

    def __init__(self, model: CausalLM, attention: AttentionBackend, store: LayeredPagedKVStore) -> None:
        self.model = model
        self.attention = attention
        self.store = store
        self.graphs: DecodeGraphs | None = None
        """Captured decode steps, if there are any."""

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
        context = StepContext(
            batch=batch, store=self.store, attention=self.attention, attention_plan=self.attention.plan(batch)
        )
        hidden = model.layers(model.embed(batch.token_ids), 0, model.info.num_layers, context)
        if not len(batch.logit_indices):
            return hidden.new_empty(0, model.info.vocab_size, dtype=torch.float32)
        return model.head(hidden.index_select(0, batch.logit_indices))
