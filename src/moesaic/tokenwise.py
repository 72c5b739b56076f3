"""A runner whose every output bit depends on a row's own tokens only, whatever else is in the step.

Library kernels choose their order of summation by shape: a matrix product by its number of rows, an activation by
where an element lies in its tensor, attention by the lengths it is called with (``docs/determinism.md`` has the
measurements). Here each query token has a forward of its own, so all shapes follow from the token's position.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from moesaic.batch import RaggedBatch
from moesaic.errors import ConfigError
from moesaic.kv.geometry import blocks_for_tokens
from moesaic.runner import ModelRunner
from moesaic.sched.plan import PagedBatchLengths


class TokenwiseRunner(ModelRunner):
    """Runs the query tokens of a batch one by one: the reference for equality bit for bit, at the price of batching.

    Holds for any model, attention and expert backend that give the same bits for the same call: nothing else enters.
    The tokens of a row are run in order, so each finds the keys and values of those before it in the pages.
    """

    @torch.inference_mode()
    def run(self, batch: RaggedBatch) -> torch.Tensor:
        """Return float32 logits [S, V] for ``batch.logit_indices``; waits for the device once to read them."""
        wanted = batch.logit_indices.tolist()
        logits = {token: super(TokenwiseRunner, self).run(one) for token, one in _tokens(batch, set(wanted))}
        if not wanted:
            return batch.token_ids.new_empty(0, self.model.info.vocab_size, dtype=torch.float32)
        return torch.cat([logits[token] for token in wanted])


def check_tokenwise(device: torch.device) -> None:
    """Return if equality bit for bit is proven on ``device``.

    Raises: ``ConfigError`` for all but CPUs: libraries of other devices may give other bits for the same call.
    """
    if device.type != "cpu":
        raise ConfigError(
            f"batch_invariant is on but the model is on {device.type}, where it is not proven; "
            "use --device cpu or leave out --batch-invariant"
        )


def _tokens(batch: RaggedBatch, wanted: Collection[int]) -> Iterator[tuple[int, RaggedBatch]]:
    """Yield each flat token with a batch of its own, which samples if it is ``wanted``."""
    lengths = batch.lengths
    for row, (num_queries, context) in enumerate(zip(lengths.query_lengths, lengths.context_lengths, strict=True)):
        for index in range(num_queries):
            token = lengths.query_offsets[row] + index
            yield token, _token(batch, row, token, context + index, token in wanted)


def _token(batch: RaggedBatch, row: int, token: int, position: int, is_wanted: bool) -> RaggedBatch:
    only = slice(token, token + 1)
    num_blocks = blocks_for_tokens(position + 1, batch.block_size)
    return RaggedBatch(
        lengths=PagedBatchLengths.of([1], [position]),
        num_decode_rows=1,
        block_size=batch.block_size,
        # Copies: a kernel may choose by the address of its input, and those of fresh tensors are aligned alike.
        token_ids=batch.token_ids[only].clone(),
        positions=batch.positions[only].clone(),
        slot_mapping=batch.slot_mapping[only].clone(),
        block_tables=batch.block_tables[row : row + 1, :num_blocks].clone(),
        page_indices=batch.block_tables[row, :num_blocks].clone(),
        logit_indices=torch.arange(int(is_wanted), device=batch.token_ids.device),
        num_sampling_rows=int(is_wanted),
    )
