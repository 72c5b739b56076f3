"""The whole demonstration on ``tiny``, through the command line."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from moesaic.bench.timeline import Ask, Scenario, Timeline, TokenTimes
from moesaic.cli import app
from moesaic.demo.show import reading, seconds


def test_the_demonstration_shows_answers_and_both_timelines_in_80_columns(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOESAIC_CACHE", str(tiny_dir.parents[1]))
    done = CliRunner().invoke(
        app,
        ["demo", "--model", "tiny", "--streams", "2", "--max-tokens", "8", "--chunk-size", "512"],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert max(map(len, done.output.splitlines())) <= 80
    words = " ".join(done.output.split())
    assert "run 1 of 2: chunking off" in words
    assert "A: " in words
    assert "| tokens equal | yes |" in words
    assert "they ran in 5 steps" in words
    assert words.endswith("to open in a browser: moesaic-demo.html")
    assert "first pair" in (tmp_path / "moesaic-demo.html").read_text(encoding="utf-8")


def _timeline(stall_s: float, ttft_s: float, num_late_chunks: int) -> Timeline:
    stream = TokenTimes(request_id="s", arrival_s=0.0, token_ids=(1, 2), token_s=(1.0, 1.0 + stall_s))
    late = TokenTimes(request_id="late", arrival_s=1.0, token_ids=(3,), token_s=(1.0 + ttft_s,))
    return Timeline(
        streams=(stream,), late=late, started_s=0.0, ended_s=9.0, num_steps=3, num_late_chunks=num_late_chunks
    )


def test_the_sentence_reads_the_numbers_of_both_runs() -> None:
    late = Ask(request_id="late", prompt_token_ids=(1,) * 1000, max_tokens=4)
    text = reading(Scenario(streams=(late,), late=late, lead_in_tokens=1), _timeline(4, 4, 1), _timeline(0.5, 5, 8))
    assert text == (
        "Chunking off, the document's 1000 tokens ran in 1 step and a stream waited up to 4.00 s for its next token; "
        "chunking on, they ran in 8 steps and it waited up to 500 ms, while the document's first token came after "
        "5.00 s instead of 4.00 s."
    )


@pytest.mark.parametrize(("value", "text"), [(12.345, "12.35 s"), (0.4567, "457 ms"), (0.00456, "4.6 ms")])
def test_seconds_are_shown_with_about_three_digits(value: float, text: str) -> None:
    assert seconds(value) == text
