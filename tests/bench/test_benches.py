"""Each benchmark once, as small as it goes: that it runs and what it reports, never how fast it is."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moesaic.bench.client import Target
from moesaic.bench.overhead import OverheadSettings, check_stream, report, run_alone, run_served
from moesaic.bench.paced import load_paced
from moesaic.bench.paced_server import paced_config
from moesaic.bench.paired import Pair
from moesaic.cli import app
from moesaic.engine.thread_client import ThreadEngineClient
from moesaic.errors import MoesaicError
from moesaic.models.files import load_tokenizer
from moesaic.server.app import create_app
from moesaic.server.served_model import ServedModel
from moesaic.testing.http import running


@pytest.fixture(autouse=True)
def _cache(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command line find the session's ``tiny`` and not the user's."""
    monkeypatch.setenv("MOESAIC_CACHE", str(tiny_dir.parents[1]))


def _reports(*arguments: str, file: Path) -> list[dict[str, object]]:
    done = CliRunner().invoke(app, ["bench", *arguments, "--json", str(file)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert max(map(len, done.output.splitlines())) <= 80
    reports: list[dict[str, object]] = json.loads(file.read_text(encoding="utf-8"))
    return reports


def test_offline_throughput_of_both_arms_gives_equal_outputs(tmp_path: Path) -> None:
    arguments = ("--model", "tiny", "--num-prompts", "3", "--max-tokens", "4", "--pairs", "1")
    (report,) = _reports("offline", *arguments, file=tmp_path / "o.json")
    ours, theirs = report["samples"]
    assert (ours["arm"], theirs["arm"]) == ("moesaic", "transformers")
    assert ours["token_ids"] == theirs["token_ids"]
    assert [len(ids) for ids in ours["token_ids"]] == [4, 4, 4]


def test_the_stall_benchmark_gives_equal_tokens_and_more_chunks_when_on(tmp_path: Path) -> None:
    arguments = ("--model", "tiny", "--prompt-tokens", "64", "--chunk-size", "16", "--streams", "2", "--pairs", "1")
    (report,) = _reports("stall", *arguments, file=tmp_path / "s.json")
    off, on = report["samples"]
    assert (off["num_late_chunks"], on["num_late_chunks"]) == (1, 4)
    assert off["late"]["token_ids"] == on["late"]["token_ids"]


def test_the_planner_benchmark_times_every_step(tmp_path: Path) -> None:
    (report,) = _reports("planner", "--rows", "2", "--rows", "3", "--steps", "5", file=tmp_path / "p.json")
    assert [(s["num_decode_rows"], len(s["plan_s"]), len(s["commit_s"])) for s in report["samples"]] == [
        (2, 5, 5),
        (3, 5, 5),
    ]


@pytest.mark.parametrize("chat", [False, True])
def test_the_server_benchmark_reads_whole_streams_of_a_real_server(tiny_dir: Path, chat: bool) -> None:
    """In one process: the command starts two, which takes longer than all else here."""
    settings = OverheadSettings(num_streams=2, max_tokens=5, step_ms=1.0, chat=chat, num_pairs=1)
    config = paced_config(settings.num_streams, settings.num_kv_blocks)
    alone = run_alone(load_paced(tiny_dir, config, lambda what, share: None, step_s=0.001), settings)
    engine = ThreadEngineClient(
        load_paced(tiny_dir, config, lambda what, share: None, step_s=0.001), load_tokenizer(tiny_dir)
    )
    served = ServedModel(names=("tiny",), root="tiny", max_model_len=8192, tokenizer=load_tokenizer(tiny_dir))
    with running(create_app(engine, served, config)) as url:
        through = run_served(Target(url=url, model="tiny"), settings)
    assert alone.num_tokens == through.num_tokens == 10
    assert 2 <= through.num_events <= 14
    shown = report(settings, [Pair(first=alone, second=through)])
    assert [sample["arm"] for sample in shown.samples] == ["alone", "served"]
    assert len({len(row) for row in shown.rows} | {len(shown.columns)}) == 1


@pytest.mark.parametrize(
    "change",
    [
        (b"200 OK", b"503 Gone"),
        (b'"text":"b"', b'"text":""'),
        (b'"completion_tokens":3', b'"completion_tokens":2'),
        (b"[DONE]", b""),
    ],
)
def test_a_stream_that_is_not_whole_is_no_sample(change: tuple[bytes, bytes]) -> None:
    events = [b'{"choices":[{"text":"%c"}]}' % letter for letter in b"abc"]
    events += [b'{"choices":[],"usage":{"completion_tokens":3}}', b"[DONE]"]
    parts = [b"data: %b\n\n" % event for event in events]
    stream = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts)
    assert check_stream(stream, 3) == 3
    with pytest.raises(MoesaicError, match="a stream"):
        check_stream(stream.replace(*change), 3)
