"""Logs: one record for each request, in text or JSON, and nothing of what was asked or answered."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from moesaic.config import EngineConfig
from moesaic.log import FIELDS, JsonFormatter, LogSettings, configure_logging
from moesaic.server.main import load_app
from moesaic.server.settings import ServerConfig

SECRET = "the treasure lies under the oak"  # a prompt


@pytest.fixture
def client(tiny_dir: Path) -> Any:
    settings = ServerConfig(served_model_name=("tiny",))
    with TestClient(load_app(str(tiny_dir), EngineConfig(num_kv_blocks=64), settings)[0]) as client:
        yield client


def fields_of(caplog: pytest.LogCaptureFixture, what: str) -> list[dict[str, Any]]:
    return [getattr(r, FIELDS) for r in caplog.records if r.getMessage().startswith(what)]


def test_each_request_is_logged_with_its_label_and_numbers(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"model": "tiny", "prompt": SECRET, "max_tokens": 3, "ignore_eos": True, "n": 2}
    with caplog.at_level(logging.INFO):
        reply = client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
        client.post("/v1/completions", json={**body, "max_tokens": 10**6})
    assert reply.status_code == 200
    over = fields_of(caplog, "request over")
    assert [(f["request"], f["finish_reason"], f["output_tokens"]) for f in over] == [("mine", "length", 3)] * 2
    assert over[0]["prompt_tokens"] == reply.json()["usage"]["prompt_tokens"]
    assert 0 <= over[0]["ttft_s"] <= over[0]["total_s"]
    (refused,) = fields_of(caplog, "request refused")
    assert refused["error"] == "RequestTooLargeError"
    assert SECRET not in caplog.text
    assert reply.json()["choices"][0]["text"] not in caplog.text


def test_below_info_nothing_is_kept(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 2}).status_code == 200
    assert fields_of(caplog, "request") == []


def test_json_records_hold_their_fields_and_exceptions() -> None:
    logger = logging.getLogger("moesaic.test")
    record = logger.makeRecord(
        "moesaic.test", logging.ERROR, __file__, 1, "lost %d\nlines", (2,), None, extra={FIELDS: {"request": "é"}}
    )
    try:
        raise OSError("bad sector")
    except OSError as error:
        record.exc_info = (OSError, error, error.__traceback__)
    line = JsonFormatter("engine").format(record)
    assert "\n" not in line
    entry = json.loads(line)
    assert entry.pop("time").endswith("+00:00")
    assert "bad sector" in entry.pop("exception")
    assert entry == {
        "level": "error",
        "process": "engine",
        "logger": "moesaic.test",
        "message": "lost 2\nlines",
        "request": "é",
    }


@pytest.mark.parametrize("form", ["text", "json"])
def test_every_logger_writes_in_the_form_asked_for(form: Any, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        configure_logging(LogSettings("info", form), "server")
        logging.getLogger("uvicorn.error").warning("hello %s", "world")
        logging.getLogger("moesaic").debug("too little")
    finally:
        root.handlers[:], root.level = handlers, level
    line = capsys.readouterr().err.strip()
    assert (json.loads(line)["message"] if form == "json" else line.removeprefix("WARNING ")) == "hello world"
