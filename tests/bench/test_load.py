"""Loads: who asks when, and that no two prompts share a prefix."""

import pytest

from moesaic.bench.load import BURST_SIZE, LoadSettings, arrival_times, id_prompts, make_calls, read_trace, text_prompts
from moesaic.errors import ConfigError


def test_the_long_prompt_of_stall_waits_for_the_decoders() -> None:
    *decoders, long = make_calls(LoadSettings(num_streams=3, prompt_tokens=99))
    assert [c.role for c in decoders] == ["decoder"] * 3
    assert (long.role, long.num_prompt_tokens, long.lead_in_tokens) == ("long", 99, 4)


def test_the_long_prompt_is_at_the_head_of_the_line() -> None:
    long, *short = make_calls(LoadSettings(workload="head-of-line", num_streams=20))
    assert long.role == "long"
    assert len(short) == 20
    assert all(c.arrival_s > long.arrival_s for c in short)


@pytest.mark.parametrize("name", ["conversation", "code", "agent"])
def test_traces_come_with_the_package_in_order_of_time(name: str) -> None:
    rows = read_trace(name)
    assert len(rows) == 3000
    assert [at for at, _, _ in rows] == sorted(at for at, _, _ in rows)
    calls = make_calls(LoadSettings(workload=name, num_requests=20))  # type: ignore[arg-type]
    assert {c.role for c in calls} == {"decoder", "long"}
    assert calls[0].num_prompt_tokens == rows[0][1] // 16


def test_traced_gaps_are_stretched_to_the_rate() -> None:
    settings = LoadSettings(arrivals="trace", rate_per_s=2.0)
    assert arrival_times([5.0, 6.0, 9.0], settings) == (0.0, 0.25, 1.0)


def test_bursts_arrive_together_and_poisson_arrivals_do_not() -> None:
    bursts = arrival_times([0.0] * 2 * BURST_SIZE, LoadSettings(arrivals="bursty"))
    assert len(set(bursts)) == 2
    assert len(set(arrival_times([0.0] * 9, LoadSettings()))) == 9


def test_the_clients_of_churn_go_away_in_the_middle() -> None:
    calls = make_calls(LoadSettings(workload="churn", num_requests=20))
    assert sum(c.cancel_after_tokens is not None for c in calls) == 6


def test_prompts_have_their_lengths_and_share_no_prefix() -> None:
    calls = make_calls(LoadSettings(workload="conversation", num_requests=300))
    ids = id_prompts(calls, 260, 0)
    assert [len(p) for p in ids] == [c.num_prompt_tokens for c in calls]
    assert len({p[:2] for p in ids}) == 300
    texts = text_prompts(calls, "one two three", lambda text: len(text.split()), 0)
    assert len({t.split()[0] for t in texts}) == 300
    assert [len(t.split()) for t in texts] == [c.num_prompt_tokens for c in calls]


def test_an_unknown_workload_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="head-of-line"):
        LoadSettings(workload="stal")  # type: ignore[arg-type]


def test_under_pressure_all_arrive_at_once() -> None:
    assert {c.arrival_s for c in make_calls(LoadSettings(workload="pressure"))} == {0.0}
