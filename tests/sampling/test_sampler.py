"""The sampler against transformers' processors, exact frequencies and its own independence of the batch."""

import math
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from moesaic.errors import InvariantError, RequestError, SamplingError
from moesaic.request import SamplingParams
from moesaic.sampling import draw
from moesaic.sampling.draw import draw_tokens, uniforms
from moesaic.sampling.filters import keep_min_p, keep_top_k, keep_top_p
from moesaic.sampling.sampler import Sampler, SamplingRow

VOCAB = 97
NO_IDS = torch.zeros((1, 1), dtype=torch.long)


def create_row(
    *, prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), seed: int = 0, **params: Any
) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), prompt, output, seed)


def create_sampler(vocab_size: int = VOCAB) -> Sampler:
    return Sampler(vocab_size=vocab_size, eos_token_ids=(0,))


def random_logits(num_rows: int, vocab_size: int = VOCAB, *, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * scale


def relative(scores: torch.Tensor) -> torch.Tensor:
    return scores - scores.amax(-1, keepdim=True)


def drawn(logits: torch.Tensor, num: int, **params: Any) -> Counter[int]:
    """Counts of tokens over ``num`` positions of one request with this single row of logits."""
    rows = [create_row(output=(5,) * i, **params) for i in range(num)]
    return Counter(create_sampler(logits.shape[-1]).sample(logits.expand(num, -1), rows).token_ids)


def assert_frequencies_agree(counts: Counter[int], probabilities: torch.Tensor) -> None:
    """Chi-square below its 99.99 % point; the seeds are fixed, so this passes always or never."""
    num = counts.total()
    expected = {i: num * p for i, p in enumerate(probabilities.tolist()) if p > 0}
    assert counts.keys() <= expected.keys()
    statistic = sum((counts[i] - e) ** 2 / e for i, e in expected.items())
    degrees = len(expected) - 1
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3


def test_greedy_rows_take_the_likeliest_token_and_the_first_of_ties() -> None:
    logits = random_logits(4)
    logits[2] = 1.0
    result = create_sampler().sample(logits, [create_row(temperature=0.0)] * 4)
    assert result.token_ids == (*logits[:2].argmax(-1).tolist(), 0, int(logits[3].argmax()))
    assert result.logprobs == (None,) * 4


def test_no_rows_give_no_tokens() -> None:
    assert create_sampler().sample(torch.zeros(0, VOCAB), []).token_ids == ()


@pytest.mark.parametrize("k", [1, 2, 20, VOCAB])
def test_top_k_keeps_what_transformers_keeps_ties_included(k: int) -> None:
    logits = random_logits(8).to(torch.bfloat16).float()
    ours = keep_top_k(logits, torch.full((8,), k), k)
    assert torch.equal(ours, TopKLogitsWarper(k)(NO_IDS, logits))


def test_top_k_of_zero_keeps_all_beside_rows_that_filter() -> None:
    logits = random_logits(2)
    ours = keep_top_k(logits, torch.tensor([0, 3]), 3)
    assert torch.equal(ours[0], logits[0])
    assert int(ours[1].isfinite().sum()) == 3


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_what_transformers_keeps(p: float) -> None:
    logits = random_logits(32)
    ours = keep_top_p(relative(logits), torch.full((32,), p, dtype=torch.float64))
    assert torch.equal(ours.isfinite(), TopPLogitsWarper(p)(NO_IDS, logits).isfinite())


def test_top_p_keeps_what_transformers_keeps_of_ties() -> None:
    logits = torch.zeros(1, 10)
    ours = keep_top_p(logits, torch.tensor([0.55], dtype=torch.float64))
    assert torch.equal(ours.isfinite(), TopPLogitsWarper(0.55)(NO_IDS, logits).isfinite())


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 1.0])
def test_min_p_keeps_what_transformers_keeps(p: float) -> None:
    logits = random_logits(32)
    ours = keep_min_p(relative(logits), torch.full((32,), p))
    assert torch.equal(ours.isfinite(), MinPLogitsWarper(p)(NO_IDS, logits).isfinite())


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.8, "top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_tokens_come_as_often_as_their_probability_says(params: dict[str, Any]) -> None:
    logits = random_logits(1, 12, scale=1.0)
    expected = logits
    if k := params.get("top_k"):
        expected = TopKLogitsWarper(k)(NO_IDS, expected)
    expected = expected / params.get("temperature", 1.0)
    if p := params.get("min_p"):
        expected = MinPLogitsWarper(p)(NO_IDS, expected)
    if p := params.get("top_p"):
        expected = TopPLogitsWarper(p)(NO_IDS, expected)
    assert_frequencies_agree(drawn(logits, 4000, seed=11, **params), expected.softmax(-1)[0])


def test_different_seeds_draw_independently_at_one_position() -> None:
    logits = random_logits(1, 12, scale=1.0)
    rows = [create_row(seed=seed) for seed in range(4000)]
    counts = Counter(create_sampler(12).sample(logits.expand(4000, -1), rows).token_ids)
    assert_frequencies_agree(counts, logits.softmax(-1)[0])


def mixed_rows() -> list[SamplingRow]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 7},
        {"top_p": 0.7, "temperature": 0.6},
        {"min_p": 0.1, "logprobs": 3},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 1.7},
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5, "logprobs": 0},
        {"logit_bias": {4: 5.0}, "temperature": 0.0},
        {"min_tokens": 6, "stop_token_ids": [3]},
    ]
    return [create_row(output=(3, 4, 3, 8)[: i % 5], seed=i * 7919, **kind) for i, kind in enumerate(kinds)]


@pytest.mark.parametrize("slab_rows", [1, 3, 1000])
def test_a_choice_depends_on_its_own_row_alone(slab_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in any order and cut into slabs, each row gives the same token: a batch is no source of randomness."""
    rows = mixed_rows() * 3
    logits = random_logits(len(rows))
    sampler = create_sampler()
    alone = [sampler.sample(logits[i : i + 1], [row]) for i, row in enumerate(rows)]
    monkeypatch.setattr(draw, "_SLAB_ELEMENTS", slab_rows * VOCAB)
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    together = sampler.sample(logits[order], [rows[i] for i in order])
    assert together.token_ids == tuple(alone[i].token_ids[0] for i in order)
    for got, i in zip(together.logprobs, order, strict=True):
        want = alone[i].logprobs[0]
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            assert (got.token_id, got.rank) == (want.token_id, want.rank)
            assert got.logprob == pytest.approx(want.logprob, abs=1e-5)


def test_the_callers_logits_are_left_as_they_are() -> None:
    rows = mixed_rows()
    logits = random_logits(len(rows))
    before = logits.clone()
    create_sampler().sample(logits, rows)
    assert torch.equal(logits, before)


def test_a_seed_fixes_the_choice_and_the_position_changes_it() -> None:
    logits = torch.zeros(1, VOCAB)
    sampler = create_sampler()
    tokens = [sampler.sample(logits, [create_row(output=(1,) * n, seed=3)]).token_ids for n in range(20)]
    assert tokens == [sampler.sample(logits, [create_row(output=(2,) * n, seed=3)]).token_ids for n in range(20)]
    assert len(set(tokens)) > 10


def test_uniforms_follow_the_published_sequence() -> None:
    """With the hashed seed as its state, output number n is SplitMix64's own; computed here with plain integers."""

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    assert mix(golden) == 0xE220A8397B1DCDAF, "first output of SplitMix64 from state 0"
    for seed in (0, 1, 2**63, 2**64 - 1, -5):
        state = mix((seed + golden) % 2**64)
        want = [(mix((state + (n + 1) * golden) % 2**64) >> 11) / 2**53 for n in range(5)]
        assert uniforms([seed] * 5, range(5)).tolist() == want


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-53])
def test_a_token_without_probability_is_never_drawn(uniform: float) -> None:
    scores = torch.full((1, 9), -torch.inf)
    scores[0, 2], scores[0, 5] = -20.0, 0.0
    token = int(draw_tokens(scores, torch.tensor([uniform], dtype=torch.float64)))
    assert token == (2 if uniform == 0.0 else 5)


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature: float) -> None:
    logits = random_logits(3)
    rows = [create_row(temperature=temperature, seed=i) for i in range(3)]
    assert create_sampler().sample(logits, rows).token_ids == tuple(logits.argmax(-1).tolist())


def test_a_huge_temperature_draws_uniformly() -> None:
    counts = drawn(random_logits(1, 8), 2000, temperature=1e30, seed=5)
    assert_frequencies_agree(counts, torch.full((8,), 1 / 8))


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(2)
    rows = [
        create_row(temperature=0.0, logprobs=4, logit_bias={9: 100.0}, repetition_penalty=2.0),
        create_row(temperature=0.3, top_k=2, logprobs=0, seed=4),
    ]
    result = create_sampler().sample(logits, rows)
    raw = logits.log_softmax(-1)
    for i, entry in enumerate(result.logprobs):
        assert entry is not None
        assert entry.token_id == result.token_ids[i]
        assert entry.logprob == pytest.approx(float(raw[i, entry.token_id]), abs=1e-5)
        assert entry.rank == 1 + int((raw[i] > raw[i, entry.token_id]).sum())
        top = raw[i].topk(rows[i].params.logprobs or 0)
        assert [t for t, _ in entry.top] == top.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(top.values.tolist(), abs=1e-5)
    assert result.token_ids[0] == 9


def test_the_rank_counts_strictly_likelier_tokens() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    ranks = [create_sampler(5).prompt_logprobs(logits, [t], 2)[0].rank for t in range(5)]
    assert ranks == [1, 2, 2, 2, 5]


def test_likeliest_tokens_that_tie_come_in_order_of_their_ids() -> None:
    (entry,) = create_sampler(6).prompt_logprobs(torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0, 0.0]]), [0], 4)
    assert [t for t, _ in entry.top] == [1, 3, 4, 2]


def test_more_logprobs_than_tokens_give_all_tokens() -> None:
    (entry,) = create_sampler(3).sample(torch.zeros(1, 3), [create_row(logprobs=5)]).logprobs
    assert entry is not None
    assert len(entry.top) == 3


def test_prompt_logprobs_score_the_given_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "_SLAB_ELEMENTS", 2 * VOCAB)
    logits = random_logits(5)
    raw = logits.log_softmax(-1)
    targets = [3, 0, 96, 50, 3]
    result = create_sampler().prompt_logprobs(logits, targets, 2)
    assert [e.token_id for e in result] == targets
    assert [e.logprob for e in result] == pytest.approx([float(raw[i, t]) for i, t in enumerate(targets)], abs=1e-5)
    assert [e.top[0][0] for e in result] == logits.argmax(-1).tolist()
    assert create_sampler().prompt_logprobs(torch.zeros(0, VOCAB), [], 2) == ()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"top_p": 0.5}, {"logprobs": 2}, {"logit_bias": {1: 1.0}}], ids=str
)
def test_broken_logits_name_their_rows(value: float, params: dict[str, Any]) -> None:
    logits = random_logits(5)
    logits[1, 40], logits[4] = value, -math.inf
    with pytest.raises(
        SamplingError, match=r"2 of 5 rows: row 1 at output 0 has NaN or infinite logits; row 4"
    ) as error:
        create_sampler().sample(logits, [create_row(**params)] * 5)
    assert (error.value.rows, error.value.own_fault_rows) == ((1, 4), ())
    with pytest.raises(SamplingError, match=r"positions \[1, 4\]") as error:
        create_sampler().prompt_logprobs(logits, [0] * 5, 1)
    assert error.value.rows == (1, 4)


def test_a_single_token_of_minus_infinity_is_just_impossible() -> None:
    logits = torch.zeros(1, 3)
    logits[0, 1] = -math.inf
    assert drawn(logits, 300).keys() == {0, 2}


def test_a_request_that_forbids_every_token_is_told_so() -> None:
    row = create_row(min_tokens=2, stop_token_ids=list(range(1, 4)))
    with pytest.raises(SamplingError, match="has no token left") as error:
        create_sampler(4).sample(torch.zeros(2, 4), [create_row(), row])
    assert (error.value.rows, error.value.own_fault_rows) == ((1,), (1,))


def test_logits_of_another_shape_or_type_are_our_own_bug() -> None:
    with pytest.raises(InvariantError, match="not float32"):
        create_sampler().sample(torch.zeros(2, VOCAB), [create_row()])
    with pytest.raises(InvariantError, match="float16"):
        create_sampler().sample(torch.zeros(1, VOCAB, dtype=torch.float16), [create_row()])


@pytest.mark.parametrize("params", [{"logit_bias": {VOCAB: 1.0}}, {"stop_token_ids": [-1]}], ids=str)
def test_unknown_token_ids_are_refused_at_admission_and_harmless_later(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="ids from 0 to 96"):
        create_sampler().check_params(SamplingParams(**params))
    row = create_row(temperature=0.0, min_tokens=1, **params)
    logits = random_logits(1)
    assert create_sampler().sample(logits, [row]).token_ids == (int(logits.argmax()),)


def test_known_token_ids_are_accepted() -> None:
    create_sampler().check_params(SamplingParams(logit_bias={0: 1.0, VOCAB - 1: 1.0}, stop_token_ids=[5]))


@pytest.mark.gpu
def test_a_gpu_gives_the_same_tokens_and_is_waited_for_once_per_copy() -> None:
    rows = mixed_rows()
    logits = random_logits(len(rows))
    want = create_sampler().sample(logits, rows)
    on_device = logits.cuda()
    with warnings.catch_warnings(record=True, action="always") as warned:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            got = create_sampler().sample(on_device, rows)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert got.token_ids == want.token_ids
    waits = [w for w in warned if "called a synchronizing" in str(w.message)]
    assert len(waits) == 2, "one copy of token ids, one of log probabilities"
