"""A sampler whose every output bit depends on a row's own logits and history only."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from moesaic.errors import SamplingError
from moesaic.request import TokenLogprobs
from moesaic.sampling.pending import KnownTokens, SampledTokens
from moesaic.sampling.row import SamplingRow
from moesaic.sampling.sampler import Sampler


class RowwiseSampler(Sampler):
    """Samples and scores row by row: torch may split the sum of a lone long row over threads, but not of several.

    So reported log probabilities could differ in their last bit with the number of rows (``docs/determinism.md``).
    """

    def begin(self, logits: torch.Tensor, rows: SequenceOf[SamplingRow]) -> KnownTokens:
        """Return what ``sample`` does, which has waited for the device."""
        return KnownTokens(self.sample(logits, rows))

    def sample(self, logits: torch.Tensor, rows: SequenceOf[SamplingRow]) -> SampledTokens:
        """Return what ``Sampler.sample`` does; synchronises the device once or twice per row."""
        self._check_shape(logits, len(rows))
        try:
            each = [super(RowwiseSampler, self).sample(_one(logits, i), [row]) for i, row in enumerate(rows)]
        except SamplingError:
            return super().sample(logits, rows)  # raises again, with every bad row, numbered as the caller does
        return SampledTokens(
            tuple(token_id for sampled in each for token_id in sampled.token_ids),
            tuple(entry for sampled in each for entry in sampled.logprobs),
        )

    def prompt_logprobs(
        self, logits: torch.Tensor, target_token_ids: SequenceOf[int], num_top: int
    ) -> tuple[TokenLogprobs, ...]:
        """Return what ``Sampler.prompt_logprobs`` does; synchronises the device once per position."""
        self._check_shape(logits, len(target_token_ids))
        try:
            each = [
                super(RowwiseSampler, self).prompt_logprobs(_one(logits, i), [target], num_top)
                for i, target in enumerate(target_token_ids)
            ]
        except SamplingError:
            return super().prompt_logprobs(logits, target_token_ids, num_top)  # as above
        return tuple(entry for entries in each for entry in entries)


def _one(logits: torch.Tensor, row: int) -> torch.Tensor:
    return logits[row : row + 1].clone()  # a copy: all fresh tensors are aligned alike, slices are not
