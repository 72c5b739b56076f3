"""Figures of hand-computed events."""

from pathlib import Path

import pytest

from moesaic.bench.events import ArmRun, Recording, RequestEvents, StepColumn, percentile, read_events, write_events
from moesaic.bench.figures import Bounds, Distribution, difference, goodput, parity, tokens_per_s, values
from moesaic.errors import ConfigError


def _request(name: str = "a", role: str = "decoder", **changes: object) -> RequestEvents:
    """Arrives at 1 s; tokens at 2 s, 2.5 s, 4 s, 4 s."""
    usual = {"arrival_s": 1.0, "chunks": ((2.0, 1), (2.5, 1), (4.0, 2)), "token_ids": (5, 6, 7, 8)}
    return RequestEvents(request_id=name, role=role, num_prompt_tokens=3, **{**usual, **changes})  # type: ignore[arg-type]


def _run(arm: str, *requests: RequestEvents, pair: int = 0) -> ArmRun:
    return ArmRun(pair=pair, arm=arm, requests=requests, duration_s=4.0)


def _recording(*runs: ArmRun) -> Recording:
    return Recording(settings={}, environment={}, runs=runs)


def test_the_latencies_of_a_request_are_those_computed_by_hand() -> None:
    request = _request()
    assert request.ttft_s == 1.0
    assert request.itl_s == (0.5, 1.5, 0.0)
    assert request.tpot_s == pytest.approx(2 / 3)
    assert request.stall_s == 1.5


def test_a_request_with_one_token_has_no_gap() -> None:
    request = _request(chunks=((2.0, 1),))
    assert (request.itl_s, request.tpot_s, request.stall_s) == ((), None, None)


def test_percentiles_are_by_nearest_rank() -> None:
    assert [percentile(range(1, 11), share) for share in (0.5, 0.9, 0.99, 1.0)] == [5, 9, 10, 10]
    assert Distribution.of([3.0, 1.0]) == Distribution(p50=1.0, p90=3.0, p99=3.0, max=3.0, n=2)
    assert Distribution.of([]) is None


def test_decoders_and_long_prompts_are_apart_and_failed_requests_are_in_neither() -> None:
    run = _run("x", _request(), _request(role="long", arrival_s=0.0), _request(error="500: no"))
    assert values([run], "decoder", "ttft_s") == [1.0]
    assert values([run], "long", "ttft_s") == [2.0]
    assert tokens_per_s(run) == 3.0


def test_goodput_counts_requests_within_both_bounds_per_second() -> None:
    run = _run("x", _request(), _request(arrival_s=0.0), _request(is_cancelled=True), _request(error="x"))
    assert goodput(run, Bounds(ttft_s=1.0, stall_s=1.5)) == 0.25
    assert goodput(run, Bounds(ttft_s=2.0, stall_s=1.5)) == 0.5
    assert goodput(run, Bounds(ttft_s=2.0, stall_s=1.4)) == 0.0


def test_differences_are_candidate_minus_baseline_pair_by_pair() -> None:
    runs = [_run("a", _request()), _run("b", _request(arrival_s=0.5))]
    runs += [_run("a", _request(arrival_s=0.0), pair=1), _run("b", _request(), pair=1)]
    spread = difference(_recording(*runs), "decoder", "ttft_s", "p50")
    assert spread is not None
    assert (spread.low, spread.median, spread.high, spread.n) == (-1.0, -0.25, 0.5, 2)
    assert difference(_recording(*runs), "long", "ttft_s", "p50") is None


@pytest.mark.parametrize(
    ("changes", "is_equal"),
    [
        ({}, True),
        ({"token_ids": (5, 6, 7, 9)}, False),
        ({"token_ids": (5, 6), "is_cancelled": True}, True),
        ({"token_ids": None, "text": "other"}, False),
        ({"error": "500"}, False),
    ],
)
def test_parity_compares_ids_or_texts_and_of_cancelled_ones_what_both_had(
    changes: dict[str, object], is_equal: bool
) -> None:
    assert parity(_recording(_run("a", _request()), _run("b", _request(**changes)))).is_equal is is_equal


def test_events_come_back_from_their_file_as_they_were(tmp_path: Path) -> None:
    timed = StepColumn(decode_rows=2, chunks=(), kv_blocks=3, times_s=(1.0, 0.1, 0.2, 0.1))
    steps = {"x": (StepColumn(decode_rows=2, chunks=(("a", 4),), kv_blocks=3), timed)}
    recording = Recording(settings={"n": 1}, environment={"cpu": "c"}, runs=(_run("x", _request()),), steps=steps)
    write_events(tmp_path / "new" / "e.jsonl", recording)
    assert read_events(tmp_path / "new" / "e.jsonl") == recording


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("{}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"pass the \.jsonl"):
        read_events(tmp_path / "x")
