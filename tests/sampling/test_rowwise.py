"""Row by row, beside the sampler of whole steps."""

import pytest
import torch

from moesaic.errors import SamplingError
from moesaic.request import SamplingParams
from moesaic.sampling.row import SamplingRow
from moesaic.sampling.rowwise import RowwiseSampler
from moesaic.sampling.sampler import Sampler

VOCAB_SIZE = 50
PARAMS = (
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=0.7, top_k=9, seed=1),
    SamplingParams(temperature=1.1, top_p=0.8, min_p=0.02, seed=2, logprobs=0),
)
ROWS = [SamplingRow(params, (3, 4), (), seed) for seed, params in enumerate(PARAMS)]


def create(kind: type[Sampler], vocab_size: int = VOCAB_SIZE) -> Sampler:
    return kind(vocab_size=vocab_size, eos_token_ids=(0,))


def test_tokens_and_log_probabilities_are_those_of_the_whole_step() -> None:
    logits = torch.randn(3, VOCAB_SIZE)
    assert create(RowwiseSampler).sample(logits, ROWS) == create(Sampler).sample(logits, ROWS)
    assert create(RowwiseSampler).sample(logits[:0], []) == create(Sampler).sample(logits[:0], [])
    scores = create(RowwiseSampler).prompt_logprobs(logits, [5, 6, 7], 2)
    assert scores == create(Sampler).prompt_logprobs(logits, [5, 6, 7], 2)
    assert create(RowwiseSampler).prompt_logprobs(logits[:0], [], 2) == ()


def test_a_row_alone_is_scored_as_in_company_in_a_large_vocabulary() -> None:
    """With several threads torch splits the sum of one row of this length, but not of three."""
    vocab_size = 151_936
    sampler = create(RowwiseSampler, vocab_size)
    logits = torch.randn(3, vocab_size) * 3
    rows = [SamplingRow(SamplingParams(temperature=0.0, logprobs=1), (3,), (), 0)] * 3
    together = sampler.sample(logits, rows).logprobs
    assert together == tuple(sampler.sample(logits[i : i + 1], rows[:1]).logprobs[0] for i in range(3))


def test_bad_rows_are_numbered_as_in_the_whole_step() -> None:
    logits = torch.randn(3, VOCAB_SIZE)
    logits[1, 4] = torch.nan
    with pytest.raises(SamplingError) as caught:
        create(RowwiseSampler).sample(logits, ROWS)
    assert caught.value.rows == (1,)
    with pytest.raises(SamplingError) as caught:
        create(RowwiseSampler).prompt_logprobs(logits, [5, 6, 7], 0)
    assert caught.value.rows == (1,)
