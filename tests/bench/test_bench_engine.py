"""``bench engine`` on the tiny model, as small as it goes: what it runs and reports, never how fast it is."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moesaic.bench.engine import EngineBench, told_settings, with_budget
from moesaic.bench.engine_load import LEAD_IN_TOKENS, EngineLoads
from moesaic.bench.engine_rows import COLUMNS, num_ended_early, rows_of
from moesaic.bench.events import ArmRun, RequestEvents, read_events
from moesaic.cli import app
from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.errors import ConfigError, RequestTooLargeError

SMALL = EngineConfig(device="cpu", max_batch_size=8, max_tokens_per_step=64, num_kv_blocks=200)
FEW = EngineLoads(
    decode_rows=(2,), num_streams=2, num_long=2, long_gap_s=0.01, num_offline=3, length_divisor=64, loads=("stall",)
)


def events(name: str, role: str, arrival_s: float, *token_s: float, prompt: int = 10) -> RequestEvents:
    return RequestEvents(
        request_id=name,
        role=role,
        arrival_s=arrival_s,
        chunks=tuple((at, 1) for at in token_s),
        num_prompt_tokens=prompt,
    )


def arm(*requests: RequestEvents) -> ArmRun:
    return ArmRun(pair=0, arm="a", requests=requests, duration_s=2.0)


def test_every_load_of_every_budget_is_run_reported_and_kept(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESAIC_CACHE", str(tiny_dir.parents[1]))
    out = tmp_path / "new" / "out.json"
    loads = "--rows 1 --rows 2 --streams 2 --long-prompts 2 --long-gap-s 0.01 --requests 3 --length-divisor 64"
    engine = "--load-format dummy --device cpu --max-batch-size 8 --num-kv-blocks 200 --max-decode-stall-ms 1000"
    arguments = ["tiny", "--budgets", "32,64", "--enable-chunked-prefill", *loads.split(), *engine.split()]
    done = CliRunner().invoke(app, ["bench", "engine", *arguments, "--json", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    reports: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    assert [r["settings"]["max_tokens_per_step"] for r in reports] == [32, 64]
    for report in reports:
        names = [sample["load"] for sample in report["samples"]]
        assert names == ["decode, rows 1", "decode, rows 2", "stall", "offline", "start-up"]
        assert report["samples"][2]["engine"]["num_prefill_chunks"] > 2 + 2
        assert report["samples"][2]["engine"]["decode_stall_bound_seconds"] == 1.0
        assert report["samples"][-1]["first_token_s"] > report["samples"][-1]["ready_s"] > 0
        assert report["environment"]["command"]
    recording = read_events(out.with_suffix(".jsonl"))
    assert len(recording.runs) == 2 * 4
    small, large = recording.runs[:4], recording.runs[4:]
    for a, b in zip(small, large, strict=True):
        assert [len(r.token_s) for r in a.requests] == [len(r.token_ids or ()) for r in a.requests]
        assert [r.token_ids for r in a.requests] == [r.token_ids for r in b.requests]
    assert [r.num_prompt_tokens for r in small[2].requests] == [4, 4, 256, 256]
    assert [len(r.token_s) for r in small[3].requests] == [2, 2, 2]
    with pytest.raises(ConfigError, match="these events are of no comparison"):
        CliRunner().invoke(app, ["bench", "report", str(out.with_suffix(".jsonl"))], catch_exceptions=False)


def test_an_engine_is_gone_when_its_figures_are_there(tiny_dir: Path) -> None:
    """The next one wants its memory: on a GPU there is no room for both."""

    def num_engines() -> int:
        return sum(type(thing) is EngineCore for thing in gc.get_objects())

    gc.collect()
    before = num_engines()
    report = EngineBench(str(tiny_dir), FEW).run(with_budget(SMALL, 32), lambda stage, share: None)
    assert num_engines() == before
    assert [row[0] for row in report.rows] == ["stall: before", "stall: streams", "stall: long"]
    assert {len(row) for row in report.rows} == {len(COLUMNS)}


def test_a_request_that_the_engine_cannot_hold_is_refused_before_anything_is_measured(tiny_dir: Path) -> None:
    stages: list[str] = []
    bench = EngineBench(str(tiny_dir), FEW)
    config = EngineConfig(device="cpu", max_batch_size=8, max_tokens_per_step=64, num_kv_blocks=200, max_model_len=128)
    with pytest.raises(RequestTooLargeError, match="max_model_len"):
        bench.run(config, lambda stage, share: stages.append(stage))
    assert stages[-1] == "warm up"


def test_a_budget_turns_chunking_on_and_is_the_chunk_of_one_prompt() -> None:
    told = told_settings(with_budget(SMALL, 512))
    assert told == {
        "enable_chunked_prefill": True,
        "max_tokens_per_step": 512,
        "prefill_chunk_size": 512,
        "max_batch_size": 8,
        "num_kv_blocks": 200,
        "device": "cpu",
    }
    with pytest.raises(ConfigError, match="max_tokens_per_step is 16"):
        with_budget(SMALL, 16)


def test_decode_gaps_count_once_every_row_has_a_token() -> None:
    run = arm(events("a", "decoder", 0.0, 0.1, 0.2, 0.5, 0.6), events("b", "decoder", 0.0, 0.5, 0.7))
    (row,) = rows_of("decode", "decode", run)
    assert row.gap_ms is not None
    assert (row.gap_ms.n, row.gap_ms.max) == (2, pytest.approx(200))
    assert row.ttft_ms is not None
    assert row.ttft_ms.max == pytest.approx(500)
    assert (row.output_tokens_per_s, row.tokens_per_s) == (3.0, 13.0)
    assert row.cells()[1:4] == ("100.0", "200.0", "200.0")


def test_stalls_are_the_gaps_from_the_first_long_prompt_to_the_first_token_of_the_last() -> None:
    quiet = [0.1 * i for i in range(1, 21)]
    run = arm(
        events("a", "decoder", 0.0, *quiet, 2.5, 2.6, 9.0),
        events("b", "decoder", 0.0, *quiet),
        events("long", "long", 2.0, 2.4, 2.45),
        events("later", "long", 2.1, 2.6),
    )
    before, streams, long = rows_of("stall", "stall", run)
    assert before.gap_ms is not None
    assert (before.gap_ms.n, before.gap_ms.max) == (2 * 9, pytest.approx(100))
    assert streams.gap_ms is not None
    assert (streams.gap_ms.n, streams.gap_ms.max) == (2, pytest.approx(500))
    assert long.ttft_ms is not None
    assert (long.ttft_ms.p50, long.ttft_ms.max) == (pytest.approx(400), pytest.approx(500))
    assert before.cells()[4:] == ("", "", "", "")
    assert num_ended_early(run) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loads": ("decode", "dance")}, "workloads are decode, dance; choose of decode, stall, offline"),
        ({"loads": ()}, "workloads are none"),
        ({"num_streams": 0}, "num_streams is 0; it must be at least 1"),
        ({"decode_rows": (1, 0)}, "there must be rows, each at least 1"),
        ({"long_gap_s": -1.0}, "the gap must not be negative"),
        ({"length_divisor": 200}, f"streams of 7 tokens end before a long prompt arrives, after {LEAD_IN_TOKENS}"),
    ],
)
def test_loads_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineLoads(**settings)
