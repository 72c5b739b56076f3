"""Tables from hand-computed measurements."""

import io
import json
from pathlib import Path

from rich.console import Console

from moesaic.bench import offline, planner, stall
from moesaic.bench.paired import Pair
from moesaic.bench.peer import Batch, Budget
from moesaic.bench.report import Report, show, write_json
from moesaic.bench.timeline import Timeline, TokenTimes

BUDGET = Budget(max_tokens_per_step=64, max_batch_size=2, block_size=16, num_kv_blocks=8)


def _timeline(stall_s: float, ttft_s: float, token_id: int = 1) -> Timeline:
    stream = TokenTimes(request_id="s", arrival_s=0.0, token_ids=(token_id, 2), token_s=(1.0, 1.0 + stall_s))
    late = TokenTimes(request_id="late", arrival_s=1.0, token_ids=(3,), token_s=(1.0 + ttft_s,))
    return Timeline(streams=(stream,), late=late, started_s=0.0, ended_s=9.0, num_steps=3, num_late_chunks=2)


def _printed(report: Report) -> str:
    out = io.StringIO()
    show(report, Console(file=out, width=80))
    return out.getvalue()


def test_the_stall_report_has_both_ratios_pair_by_pair_and_counts_equal_outputs() -> None:
    pairs = [
        Pair(first=_timeline(4.0, 4.0), second=_timeline(0.5, 5.0)),
        Pair(first=_timeline(8.0, 8.0), second=_timeline(2.0, 12.0, token_id=9)),
    ]
    report = stall.report(stall.StallSettings(num_pairs=2), pairs)
    assert report.rows[0][1:] == ("6000 (4000 to 8000)", "6000 (4000 to 8000)", "2")
    assert report.rows[2][1:3] == ("6.00 (4.00 to 8.00)", "1.38 (1.25 to 1.50)")
    assert report.remarks[-1] == "The tokens of both arms are equal in 1 of the pairs."
    assert [s["chunking"] for s in report.samples] == ["off", "on", "off", "on"]


def test_the_offline_report_has_tokens_per_second_and_counts_equal_outputs() -> None:
    settings = offline.OfflineSettings(model="tiny", num_prompts=2, num_pairs=1)
    pair = Pair(
        first=Batch(token_ids=((1, 2), (3, 4)), seconds=0.5), second=Batch(token_ids=((1, 2), (3, 5)), seconds=2.0)
    )
    report = offline.report(settings, BUDGET, 10, [pair])
    assert [row[1] for row in report.rows] == ["8.0", "2.0", "4.00"]
    assert report.remarks == ("n = 1 pairs; 1 of 2 outputs are equal.",)


def test_the_planner_report_has_medians_the_least_and_the_cost_per_row() -> None:
    times = planner.StepTimes(num_decode_rows=100, plan_s=(0.001, 0.002, 0.003), commit_s=(0.001, 0.001, 0.004))
    report = planner.report(planner.PlannerSettings(num_decode_rows=(100,)), [times])
    assert report.rows == (("100", "2.000", "1.000", "3.000", "2.000", "30.00"),)


def test_a_report_fits_80_columns_and_has_no_escape_codes_in_a_file() -> None:
    text = _printed(stall.report(stall.StallSettings(), [Pair(first=_timeline(40, 40), second=_timeline(5, 50))]))
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


def test_the_file_has_every_sample_and_the_environment(tmp_path: Path) -> None:
    times = planner.StepTimes(num_decode_rows=2, plan_s=(0.1, 0.2), commit_s=(0.3, 0.4))
    write_json(tmp_path / "new" / "out.json", [planner.report(planner.PlannerSettings(), [times])])
    (data,) = json.loads((tmp_path / "new" / "out.json").read_text(encoding="utf-8"))
    assert data["samples"] == [{"num_decode_rows": 2, "plan_s": [0.1, 0.2], "commit_s": [0.3, 0.4]}]
    assert {"cpu", "num_threads", "torch", "transformers", "date"} <= data["environment"].keys()
