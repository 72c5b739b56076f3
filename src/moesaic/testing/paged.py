"""A model driven by hand over paged KV, without scheduler or engine."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic.attention.reference import TorchAttention
from moesaic.batch import RaggedBatch
from moesaic.kv.geometry import KVGeometry, blocks_for_tokens
from moesaic.kv.store import LayeredPagedKVStore
from moesaic.models.base import StepContext
from moesaic.sched.plan import PagedBatchLengths

if TYPE_CHECKING:
    from moesaic.models.base import CausalLM

Row = tuple[int, SequenceOf[int]]
"""A sequence and its next tokens; a row of one token counts as a decode row, and those come first."""


class PagedModel:
    """Feeds ragged steps to one model; each sequence's blocks are scattered over the pool at random.

    It remembers how far each sequence has come: a row names the tokens that follow.
    """

    def __init__(
        self, model: CausalLM, *, num_sequences: int, max_tokens: int, block_size: int = 4, seed: int = 0
    ) -> None:
        blocks_each = blocks_for_tokens(max_tokens, block_size)
        shuffled = np.random.default_rng(seed).permutation(num_sequences * blocks_each).astype(np.int32)
        geometry = KVGeometry(layers=model.info.kv_shapes, block_size=block_size, element_bytes=model.dtype.itemsize)
        self.model = model
        self.store = LayeredPagedKVStore(geometry, len(shuffled), model.dtype, model.device)
        self.attention = TorchAttention()
        self.lengths = [0] * num_sequences
        self._tables: list[NDArray[np.int32]] = list(shuffled.reshape(num_sequences, blocks_each))

    def step(self, rows: SequenceOf[Row], *, split_at: int = 0) -> list[torch.Tensor]:
        """Return each row's logits [tokens, V] and move its sequence on.

        Layers run as ``[0, split_at)`` and then the rest.
        """
        batch = self._batch(rows)
        context = StepContext(
            batch=batch, store=self.store, attention=self.attention, attention_plan=self.attention.plan(batch)
        )
        if self.model.experts is not None:
            self.model.experts.begin_step(batch)
        hidden = self.model.layers(self.model.embed(batch.token_ids), 0, split_at, context)
        hidden = self.model.layers(hidden, split_at, self.model.info.num_layers, context)
        for seq, tokens in rows:
            self.lengths[seq] += len(tokens)
        return list(torch.split(self.model.head(hidden[batch.logit_indices]), list(batch.lengths.query_lengths)))

    def _batch(self, rows: SequenceOf[Row]) -> RaggedBatch:
        counts = [len(tokens) for _, tokens in rows]
        return RaggedBatch.build(
            lengths=PagedBatchLengths.of(counts, [self.lengths[seq] for seq, _ in rows]),
            num_decode_rows=counts.count(1),
            block_size=self.store.geometry.block_size,
            token_ids=np.concatenate([np.asarray(tokens, dtype=np.int64) for _, tokens in rows]),
            block_tables=[self._tables[seq] for seq, _ in rows],
            sampling_rows=[],
            extra_logit_indices=range(sum(counts)),
            device=self.model.device,
        )
