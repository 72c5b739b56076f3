"""The model of a step's time finds the law behind the steps it saw, and keeps what they do not tell apart."""

import math

import pytest

from moesaic.engine.step_time import StepCosts, StepSizes, StepTimeModel
from moesaic.sched.plan import DecodeRow, PrefillChunk, StepPlan
from moesaic.sequence import SeqId

LAW = StepCosts(step_s=0.01, decode_row_s=1e-4, decode_kv_token_s=1e-7, chunk_token_s=2e-5, chunk_pair_s=2e-9)


def sizes(rows: int = 8, kv: int = 4000, tokens: int = 256, context: int = 0) -> StepSizes:
    pairs = tokens * (context + tokens / 2)
    return StepSizes(num_decode_rows=rows, num_decode_kv_tokens=kv, num_chunk_tokens=tokens, num_chunk_pairs=pairs)


def varied(count: int) -> list[StepSizes]:
    return [
        sizes(rows=1 + i % 7, kv=500 * (1 + i % 11), tokens=16 * (1 + i % 13), context=1000 * (i % 17))
        for i in range(count)
    ]


def test_the_sizes_of_a_plan_are_those_of_its_rows() -> None:
    plan = StepPlan(
        decode_rows=(DecodeRow(SeqId(0), 7), DecodeRow(SeqId(1), 9)),
        chunks=(
            PrefillChunk(seq_id=SeqId(2), start=100, num_tokens=10, is_terminal=False),
            PrefillChunk(seq_id=SeqId(3), start=0, num_tokens=4, is_terminal=True),
        ),
    )
    assert StepSizes.of(plan) == StepSizes(
        num_decode_rows=2, num_decode_kv_tokens=16, num_chunk_tokens=14, num_chunk_pairs=10 * 105 + 4 * 2
    )


def test_varied_steps_give_the_law_back() -> None:
    model = StepTimeModel()
    for step in varied(200):
        model.observe(step, LAW.seconds(step))
    assert model.costs.as_row() == pytest.approx(LAW.as_row(), rel=0.02)


def test_a_changed_law_is_learnt_within_the_memory() -> None:
    model = StepTimeModel()
    for i, step in enumerate(varied(300)):
        model.observe(step, LAW.seconds(step) * (1 if i < 200 else 3))
    for step in varied(20):
        assert model.costs.seconds(step) == pytest.approx(3 * LAW.seconds(step), rel=0.2)


def test_no_cost_is_negative_though_plain_least_squares_would_make_it_so() -> None:
    model = StepTimeModel()
    for tokens in (16, 64, 256) * 20:
        model.observe(sizes(tokens=tokens), 0.02 - tokens * 2e-5)
        assert min(model.costs.as_row()) >= 0


def test_sizes_that_stay_as_they_are_for_long_do_not_break_the_fit() -> None:
    """Recursive least squares would wind up here: its gain grows as 1 / FORGETTING ** steps."""
    model = StepTimeModel()
    for step in varied(100):
        model.observe(step, LAW.seconds(step))
    for _ in range(5000):
        model.observe(sizes(), LAW.seconds(sizes()))
    other = sizes(rows=3, tokens=64, context=9000)
    assert model.costs.seconds(sizes()) == pytest.approx(LAW.seconds(sizes()), rel=0.001)
    assert model.costs.seconds(other) == pytest.approx(LAW.seconds(other), rel=0.2)


@pytest.mark.parametrize("context", [0, 1, 5000, 100_000])
@pytest.mark.parametrize("spare_s", [1e-5, 0.01, 1.0])
def test_the_most_chunk_tokens_take_exactly_the_time_there_is(context: int, spare_s: float) -> None:
    tokens = LAW.most_chunk_tokens(spare_s, context)
    pairs = tokens * (context + tokens / 2)
    assert LAW.chunk_token_s * tokens + LAW.chunk_pair_s * pairs == pytest.approx(spare_s)


def test_there_are_none_without_time_and_no_limit_where_they_are_free() -> None:
    assert LAW.most_chunk_tokens(0.0, 10) == 0
    assert LAW.most_chunk_tokens(-1.0, 10) == 0
    assert StepCosts(step_s=1.0).most_chunk_tokens(0.1, 10) == math.inf
    assert StepCosts(chunk_token_s=0.5).most_chunk_tokens(2.0, 10) == 4
