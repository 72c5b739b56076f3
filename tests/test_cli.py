"""The command line: each command is thin, and an error is one readable block."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moesaic.cli import app, main

SMALL = ["--device", "cpu", "--num-kv-blocks", "64", "--block-size", "4", "--max-batch-size", "4"]


def test_generate_prints_an_answer_for_each_prompt(tiny_dir: Path) -> None:
    result = CliRunner().invoke(app, ["generate", str(tiny_dir), "hello", "world", "--max-tokens", "3", *SMALL])
    assert result.exit_code == 0
    assert "hello\n  -> " in result.output
    assert result.output.count("tokens]") == 2


def test_plan_prints_the_plan(tiny_dir: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(tiny_dir), *SMALL, "--max-model-len", "128"])
    assert result.exit_code == 0
    assert "64 blocks of 4 tokens = 256 tokens" in result.output
    assert "2 requests of 128 tokens" in result.output


def test_a_recorded_run_is_replayed_and_a_changed_one_found(tiny_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    recorded = CliRunner().invoke(
        app, ["generate", str(tiny_dir), "a", "b", "--max-tokens", "5", "--decision-log", str(log), *SMALL]
    )
    assert recorded.exit_code == 0
    result = CliRunner().invoke(app, ["replay", str(log)])
    assert (result.exit_code, result.output) == (0, "5 steps and 2 commands replayed\nno difference\n")

    lines = log.read_text().splitlines()
    index = next(i for i, line in enumerate(lines) if line.startswith('["step"') and i > 5)
    entry = json.loads(lines[index])
    entry[3] = [0]
    log.write_text("\n".join([*lines[:index], json.dumps(entry), *lines[index + 1 :]])[:-2])
    result = CliRunner().invoke(app, ["replay", str(log)])
    assert result.exit_code == 1
    assert f"first difference: line {index + 1}, step {entry[1]}: expected decode [0]" in result.output


def test_replay_says_that_a_last_line_was_cut_off(tmp_path: Path, tiny_dir: Path) -> None:
    log = tmp_path / "log"
    CliRunner().invoke(app, ["generate", str(tiny_dir), "a", "--max-tokens", "2", "--decision-log", str(log), *SMALL])
    log.write_text(log.read_text()[:-3])
    result = CliRunner().invoke(app, ["replay", str(log)])
    assert result.exit_code == 0
    assert "the last line is cut off" in result.output


def test_an_impossible_setting_is_one_readable_block(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["moesaic", "plan", str(tiny_dir), "--max-tokens-per-step", "100"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("ConfigError: max_tokens_per_step is 100 but max_batch_size + block_size is 272")
    assert "--max-tokens-per-step to 272" in shown.err
    assert shown.err.count("\n") == 1
