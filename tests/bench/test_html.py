"""The report in a real browser."""

from pathlib import Path

import pytest

from moesaic.bench.events import ArmRun, Recording, RequestEvents, StepColumn
from moesaic.bench.html import html, write_html
from moesaic.testing.browser import chromium, find_chromium

WIDTH = 1280


def recording() -> Recording:
    """Two arms, one run each: two decoders and a long prompt that arrives among them."""
    runs = []
    for arm, gap_s in (("off", 2.0), ("on", 0.3)):
        streams = [
            RequestEvents(
                request_id=f"s{i}",
                role="decoder",
                arrival_s=0.0,
                chunks=((0.1, 1), (0.2, 1), (0.2 + gap_s, 1), (0.4 + gap_s, 1)),
                token_ids=(1, 2, 3, 4),
                num_prompt_tokens=8,
            )
            for i in range(2)
        ]
        long = RequestEvents(
            request_id="long",
            role="long",
            arrival_s=0.2,
            chunks=((0.3 + gap_s, 1),),
            token_ids=(5,),
            num_prompt_tokens=256,
        )
        runs.append(ArmRun(pair=0, arm=arm, requests=(*streams, long), duration_s=3.0, load_average=(0.5,)))
    steps = (
        StepColumn(decode_rows=0, chunks=(("s0", 8), ("s1", 8)), kv_blocks=2, times_s=(0.0, 0.001, 0.05, 0.002)),
        StepColumn(decode_rows=2, chunks=(("long", 128),), kv_blocks=10, times_s=(0.1, 0.001, 0.2, 0.002)),
    )
    settings = {"model": "tiny", "load": {"workload": "stall", "seed": 0}, "max_ttft_s": 2.0, "max_stall_s": 0.2}
    environment = {"cpu": "c", "num_cpus": 2, "moesaic": "0", "torch": "0", "transformers": "0", "date": "d"}
    told = {**settings, "num_pairs": 1, "prompts": "token ids"}
    return Recording(settings=told, environment=environment, runs=tuple(runs), steps={"off": steps, "on": steps})


def test_each_step_has_its_three_phases_in_milliseconds_and_old_files_none() -> None:
    text = html(recording())
    for name in ("step 0: planning 1.00 ms", "step 0: forward 50.00 ms", "step 1: commit 2.00 ms"):
        assert text.count(name) == 2
    untimed = StepColumn(decode_rows=1, chunks=(), kv_blocks=1)
    old = Recording(settings=recording().settings, environment=recording().environment, runs=recording().runs)
    old.steps["off"] = (untimed,)
    assert "KV blocks after each step" in html(old)
    assert "duration, ms" not in html(old)


def test_the_report_opens_without_a_complaint_fits_its_width_and_labels_its_axes(tmp_path: Path) -> None:
    command = find_chromium()
    if command is None:
        pytest.skip("no Chromium on this machine")
    page = tmp_path / "report.html"
    write_html(page, recording())
    with chromium(command, width=WIDTH) as tab:
        tab.open(page.as_uri())
        assert tab.complaints == []
        assert tab.value("document.documentElement.scrollWidth") <= WIDTH
        charts = tab.value("[...document.querySelectorAll('svg')].map(s => s.textContent)")
        assert len(charts) >= 9
        assert all("ms" in text or " s" in text or "step" in text for text in charts)
        assert tab.value("[...document.querySelectorAll('svg')].every(s => s.getAttribute('aria-label'))")
        tab.call("Emulation.setEmulatedMedia", media="print")
        assert tab.value("document.querySelector('svg').getBoundingClientRect().width") > 500
