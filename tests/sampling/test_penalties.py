"""Bias, minimum length and penalties against transformers' processors and their formulas."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from moesaic.request import SamplingParams
from moesaic.sampling import draw
from moesaic.sampling.penalties import adjusted_logits
from moesaic.sampling.row import SamplingRow

VOCAB = 23
EOS = (2, 5)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=30)


def create_row(prompt: Any = (1,), output: Any = (), **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), prompt, output, 0)


def random_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 4


def test_rows_that_ask_for_nothing_get_their_logits_back_uncopied() -> None:
    logits = random_logits(2)
    assert adjusted_logits(logits, [create_row(), create_row(temperature=0.0, top_p=0.5)], EOS) is logits


@given(st.lists(st.tuples(TOKENS, TOKENS, st.floats(0.25, 4.0)), min_size=1, max_size=4))
def test_repetition_is_penalised_as_in_transformers(cases: list[tuple[list[int], list[int], float]]) -> None:
    logits = random_logits(len(cases))
    rows = [create_row(prompt, np.array(out, np.int64), repetition_penalty=p) for prompt, out, p in cases]
    ours = adjusted_logits(logits, rows, EOS)
    for i, (prompt, output, penalty) in enumerate(cases):
        ids = torch.tensor([prompt + output], dtype=torch.long)
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[i : i + 1].clone())
        assert torch.equal(ours[i], theirs[0])


@given(
    st.lists(st.tuples(TOKENS, TOKENS, st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=4),
    st.sampled_from([1, 2, 100]),
)
def test_presence_and_frequency_count_the_output_only(
    cases: list[tuple[list[int], list[int], float, float]], slab_rows: int
) -> None:
    logits = random_logits(len(cases))
    rows = [create_row(prompt, out, presence_penalty=p, frequency_penalty=f) for prompt, out, p, f in cases]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw, "_SLAB_ELEMENTS", slab_rows * VOCAB)
        ours = adjusted_logits(logits, rows, EOS)
    for i, (_, output, presence, frequency) in enumerate(cases):
        counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=VOCAB)
        want = logits[i] - presence * (counts > 0).float() - frequency * counts
        torch.testing.assert_close(ours[i], want, atol=2e-5, rtol=0)


@pytest.mark.parametrize("num_outputs", [0, 2, 3, 4])
def test_eos_waits_for_min_tokens_as_in_transformers(num_outputs: int) -> None:
    logits = random_logits(1)
    ids = torch.zeros((1, 1 + num_outputs), dtype=torch.long)
    ours = adjusted_logits(logits, [create_row((0,), (0,) * num_outputs, min_tokens=3)], EOS)
    assert torch.equal(ours, MinNewTokensLengthLogitsProcessor(1, 3, list(EOS))(ids, logits))


def test_stop_token_ids_wait_for_min_tokens_too() -> None:
    row = create_row(min_tokens=1, stop_token_ids=[7, 8])
    assert forbidden(row) == [2, 5, 7, 8]


def test_eos_may_come_early_if_the_request_goes_on_after_it() -> None:
    assert forbidden(create_row(min_tokens=1, stop_token_ids=[7], ignore_eos=True)) == [7]


def forbidden(row: SamplingRow) -> list[int]:
    return adjusted_logits(torch.zeros(1, VOCAB), [row], EOS)[0].isinf().nonzero()[:, 0].tolist()


def test_bias_is_added_to_its_tokens_in_its_row_alone() -> None:
    logits = random_logits(3)
    rows = [create_row(), create_row(logit_bias={3: 2.5, 9: -100.0}), create_row(logit_bias={3: -1.0})]
    want = logits.clone()
    want[1, 3] += 2.5
    want[1, 9] -= 100.0
    want[2, 3] -= 1.0
    assert torch.equal(adjusted_logits(logits, rows, EOS), want)


def test_bias_comes_before_the_repetition_penalty() -> None:
    row = create_row((3,), logit_bias={3: 4.0}, repetition_penalty=2.0)
    assert float(adjusted_logits(torch.full((1, VOCAB), -1.0), [row], EOS)[0, 3]) == 1.5


def test_bias_cannot_bring_back_an_early_eos() -> None:
    row = create_row(logit_bias={2: 100.0}, min_tokens=1)
    assert float(adjusted_logits(torch.zeros(1, VOCAB), [row], EOS)[0, 2]) == -torch.inf


def test_tokens_outside_the_vocabulary_are_ignored() -> None:
    logits = random_logits(1)
    row = create_row((VOCAB, 4), (VOCAB + 5,), repetition_penalty=2.0, presence_penalty=1.0, logit_bias={VOCAB: 3.0})
    changed = (adjusted_logits(logits, [row], EOS) != logits)[0].nonzero()[:, 0].tolist()
    assert changed == [4]


def test_an_extreme_repetition_penalty_stays_a_number() -> None:
    logits = torch.tensor([[0.0, 5.0, -5.0, 1.0]])
    row = create_row((0, 1, 2), repetition_penalty=1e-300)
    adjusted = adjusted_logits(logits, [row], ())
    assert adjusted.isfinite().all()
    assert int(adjusted.argmax()) == 1
