from moesaic.bench.pressure import OUTPUT_TOKENS, PROMPT_TOKENS, PressureSettings, _arrivals, run_pressure


def test_every_arm_ends_every_request_and_returns_every_block() -> None:
    report = run_pressure(PressureSettings(hours=0.01, requests_per_s=3.0), lambda stage, fraction: None)
    assert len({s["num_requests"] for s in report.samples}) == 1
    assert [s["num_leaked_blocks"] for s in report.samples] == [0, 0, 0]
    recompute, _, swap = report.samples
    assert recompute["num_preemptions"] > 0
    assert recompute["num_recomputed_tokens"] > 0
    assert swap["num_recomputed_tokens"] == 0


def test_lengths_follow_the_trace() -> None:
    drawn = list(_arrivals(PressureSettings(hours=3.0)))
    for index, (p50, p90, largest) in ((2, PROMPT_TOKENS), (3, OUTPUT_TOKENS)):
        lengths = sorted(d[index] for d in drawn)
        assert abs(lengths[len(lengths) // 2] / p50 - 1) < 0.05
        assert abs(lengths[len(lengths) * 9 // 10] / p90 - 1) < 0.1
        assert lengths[-1] <= largest
