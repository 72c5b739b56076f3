"""Traces of steps made by hand, and of a server."""

import http.client
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moesaic import EngineConfig
from moesaic.bench.events import Recording, StepColumn, write_events
from moesaic.bench.trace import TracedStep, trace_events, trace_of_file, watch_steps
from moesaic.cli import app
from moesaic.errors import ConfigError, MoesaicError
from moesaic.sched.decisions import Header
from moesaic.server.main import load_app
from moesaic.server.settings import ServerConfig
from moesaic.testing.http import running

Event = dict[str, Any]


def check_format(trace: dict[str, Any]) -> list[Event]:
    """The rules of the Trace Event Format for the events that are used here; returns the events."""
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = json.loads(json.dumps(trace))["traceEvents"]
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        match event["ph"]:
            case "X":
                assert set(event) == {"ph", "pid", "tid", "name", "ts", "dur", "args"}
                assert event["ts"] >= 0
                assert event["dur"] >= 0
            case "C":
                assert event["args"]
                assert all(isinstance(value, int | float) for value in event["args"].values())
            case "M":
                assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            case other:
                pytest.fail(f"unknown phase {other!r}")
    for thread in {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}:
        check_nesting([e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == thread])
    return events


def check_nesting(slices: list[Event]) -> None:
    """Slices of one thread lie inside or outside of one another, or a viewer cannot stack them."""
    open_until: list[float] = []
    for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        end = event["ts"] + event["dur"]
        while open_until and open_until[-1] <= event["ts"] + 1e-3:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 2e-3, event
        open_until.append(end)


def step(number: int, start_s: float, **more: Any) -> TracedStep:
    usual: dict[str, Any] = {"phases_s": (0.001, 0.01, 0.002), "decode_rows": 2, "chunks": (), "kv_blocks": 3}
    return TracedStep(number=number, start_s=start_s, **(usual | more))


def test_phases_rows_chunks_and_blocks_have_tracks_of_their_own() -> None:
    steps = [step(7, 100.0, chunks=(("a", 8), ("b", 4))), step(8, 100.5, largest_itl_s=0.5, gauges=(("waiting", 1),))]
    events = check_format(trace_events({"server": steps}))
    phases = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert phases == [
        ("step 7", 0.0, 13000.0),
        ("plan", 0.0, 1000.0),
        ("launch", 1000.0, 10000.0),
        ("commit", 11000.0, 2000.0),
        ("step 8", 500000.0, 13000.0),
        ("plan", 500000.0, 1000.0),
        ("launch", 501000.0, 10000.0),
        ("commit", 511000.0, 2000.0),
    ]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {1: "steps", 2: "prompt of a", 3: "prompt of b"}
    assert [(e["tid"], e["args"]["tokens"]) for e in events if e["ph"] == "X" and e["tid"] > 1] == [(2, 8), (3, 4)]
    counters = [(e["name"], e["args"]) for e in events if e["ph"] == "C"]
    assert ("chunk tokens", {"a": 8, "b": 4}) in counters
    assert ("chunk tokens", {"a": 0, "b": 0}) in counters
    assert ("KV blocks used", {"KV blocks used": 3}) in counters
    assert ("waiting", {"waiting": 1}) in counters
    assert next(e["args"] for e in events if e["name"] == "step 8")["largest gap, ms"] == 500


def test_each_arm_of_a_recording_is_a_process_that_starts_at_zero(tmp_path: Path) -> None:
    columns = (StepColumn(decode_rows=1, chunks=(("long", 9),), kv_blocks=2, times_s=(50.0, 0.1, 0.2, 0.1)),)
    write_events(
        tmp_path / "e.jsonl", Recording(settings={}, environment={}, runs=(), steps={"a": columns, "b": columns})
    )
    events = check_format(trace_of_file(tmp_path / "e.jsonl"))
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["a", "b"]
    assert [e["ts"] for e in events if e["name"] == "step 1"] == [0, 0]


def test_a_recording_without_steps_or_times_is_refused(tmp_path: Path) -> None:
    old = (StepColumn(decode_rows=1, chunks=(), kv_blocks=2),)
    for steps, words in (({}, "no steps"), ({"a": old}, "no times")):
        write_events(tmp_path / "e.jsonl", Recording(settings={}, environment={}, runs=(), steps=steps))
        with pytest.raises(ConfigError, match=words):
            trace_of_file(tmp_path / "e.jsonl")
    with pytest.raises(ConfigError, match="check the path"):
        trace_of_file(tmp_path / "none")


def test_a_decision_log_is_a_trace_too(tmp_path: Path) -> None:
    entries = [
        Header.of(EngineConfig(block_size=4), 8, 64, 0).as_entry(),
        ["add", 0, 4, 3, 0],
        ["step", 1, 8, [], [[0, 0, 4]]],
        ["commit", 1, []],
        ["times", 1, 7.0, 0.5, 2.0, 0.25],
    ]
    log, out = tmp_path / "log", tmp_path / "new" / "trace.json"
    log.write_text("".join(json.dumps(e) + "\n" for e in entries), encoding="ascii")
    done = CliRunner().invoke(app, ["trace", str(log), "--out", str(out)], catch_exceptions=False)
    assert done.output == f"1 steps written to {out}\n"
    events = check_format(json.loads(out.read_text(encoding="utf-8")))
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["steps", "prompt of request 0"]


def test_a_server_is_watched_for_as_long_as_asked(tiny_dir: Path, tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", num_kv_blocks=64)
    settings = ServerConfig(ui=True, api_key=("sk-trace",), served_model_name=("tiny",))
    headers = {"Authorization": "Bearer sk-trace", "Content-Type": "application/json"}
    with running(load_app(str(tiny_dir), config, settings)[0]) as url:
        with pytest.raises(MoesaicError, match="401; pass a key"):
            watch_steps(url, 5, None)

        is_over = threading.Event()

        def complete() -> None:
            """Requests without a pause: the watch begins whenever it does."""
            body = json.dumps({"prompt": "Hello", "max_tokens": 20, "ignore_eos": True})
            asked = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
            while not is_over.is_set():
                asked.request("POST", "/v1/completions", body, headers)
                asked.getresponse().read()
            asked.close()

        thread = threading.Thread(target=complete)
        out = tmp_path / "t.json"
        thread.start()
        command = ["trace", f"{url}/v1", "--seconds", "1", "--out", str(out), "--api-key", "sk-trace"]
        try:
            done = CliRunner().invoke(app, command, catch_exceptions=False)
        finally:
            is_over.set()
            thread.join()
    assert done.output.endswith(f"written to {out}, 0 lost\n"), done.output
    steps = [e for e in check_format(json.loads(out.read_text())) if e["name"].startswith("step ")]
    assert len(steps) > 5


def test_where_there_is_no_feed_the_remedy_is_named(tiny_dir: Path) -> None:
    with (
        running(load_app(str(tiny_dir), EngineConfig(device="cpu", num_kv_blocks=16))[0]) as url,
        pytest.raises(MoesaicError, match="404; start the server with --ui"),
    ):
        watch_steps(url, 5, None)
    with pytest.raises(MoesaicError, match="is a server there"):
        watch_steps("http://127.0.0.1:1", 5, None)
    with pytest.raises(ConfigError, match="no address"):
        watch_steps("ftp://x", 5, None)
