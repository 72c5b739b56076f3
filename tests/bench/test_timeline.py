import pytest

from moesaic.bench.timeline import Ask, Scenario, Timeline, TokenTimes, token_strip
from moesaic.errors import MoesaicError


def _times(request_id: str, arrival_s: float, *token_s: float) -> TokenTimes:
    return TokenTimes(request_id=request_id, arrival_s=arrival_s, token_ids=(7,) * len(token_s), token_s=token_s)


def _timeline(*streams: TokenTimes, late: TokenTimes | None = None) -> Timeline:
    return Timeline(
        streams=streams,
        late=late or _times("late", 3.0, 7.0),
        started_s=0.0,
        ended_s=8.0,
        num_steps=8,
        num_late_chunks=1,
    )


def test_ttft_is_the_time_from_arrival_to_the_first_token() -> None:
    assert _times("r", 2.0, 5.5, 6.0).ttft_s == 3.5


def test_a_request_without_tokens_has_no_ttft_and_no_gaps() -> None:
    times = _times("r", 2.0)
    assert times.ttft_s is None
    assert times.itl_s() == ()


def test_gaps_are_between_consecutive_tokens_and_end_after_the_given_time() -> None:
    times = _times("r", 0.0, 1.0, 2.0, 2.5, 7.0)
    assert times.itl_s() == (1.0, 0.5, 4.5)
    assert times.itl_s(since_s=2.0) == (0.5, 4.5)


def test_a_gap_that_began_before_the_late_prompt_but_ended_after_it_counts() -> None:
    timeline = _timeline(_times("a", 0.0, 1.0, 2.0, 7.0, 7.5), _times("b", 0.0, 1.0, 2.0, 6.5))
    assert timeline.itl_s == (5.0, 0.5, 4.5)
    assert timeline.stall_s == 5.0


def test_the_ttft_of_a_timeline_is_the_late_prompts() -> None:
    assert _timeline(_times("a", 0.0, 1.0, 4.0)).ttft_s == 4.0


def test_a_stall_without_running_streams_is_an_error_with_a_remedy() -> None:
    with pytest.raises(MoesaicError, match="raise their max_tokens"):
        _ = _timeline(_times("a", 0.0, 1.0, 2.0)).stall_s


def test_the_ttft_of_a_late_request_without_tokens_is_an_error() -> None:
    with pytest.raises(MoesaicError, match="got no token"):
        _ = _timeline(_times("a", 0.0, 1.0, 4.0), late=_times("late", 3.0)).ttft_s


def test_outputs_are_those_of_the_streams_then_of_the_late_request() -> None:
    timeline = _timeline(_times("a", 0.0, 1.0, 2.0), _times("b", 0.0, 1.0))
    assert timeline.outputs == ((7, 7), (7,), (7,))


def test_a_strip_marks_the_spans_in_which_a_token_came_and_leaves_out_what_came_later() -> None:
    timeline = _timeline(_times("a", 0.0, 0.5, 1.5, 7.5), _times("b", 0.0, 1.6, 9.0))
    assert token_strip(timeline, span_s=8.0, width=8) == "##.....#"


def test_a_scenario_has_blocks_for_all_its_requests_at_once_and_one_to_spare_for_each() -> None:
    asks = [Ask(request_id=str(n), prompt_token_ids=(1,) * n, max_tokens=4) for n in (12, 13)]
    scenario = Scenario(streams=(asks[0],), late=asks[1], lead_in_tokens=1)
    assert scenario.num_kv_blocks(block_size=16) == (1 + 1) + (2 + 1)
