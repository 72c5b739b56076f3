"""Priorities, deadlines and the queue limit as a client sees them."""

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from moesaic.config import EngineConfig
from moesaic.server.main import load_app
from moesaic.server.settings import ServerConfig


def post(tiny_dir: Path, body: dict[str, object], **settings: object) -> tuple[int, dict[str, object], dict[str, str]]:
    config = EngineConfig(num_kv_blocks=64, **settings)  # type: ignore[arg-type]  # of several types
    app, _ = load_app(str(tiny_dir), config, ServerConfig(served_model_name=("tiny",)))
    with TestClient(app, raise_server_exceptions=False) as http:
        reply = http.post("/v1/completions", json={"model": "tiny", "prompt": "hi", "ignore_eos": True, **body})
    return reply.status_code, reply.json(), dict(reply.headers)


def test_priority_is_refused_by_name_unless_it_counts(tiny_dir: Path) -> None:
    status, body, _ = post(tiny_dir, {"priority": 3})
    assert status == 400
    assert body["error"]["param"] == "priority"  # type: ignore[index]
    status, _, _ = post(tiny_dir, {"priority": 3}, scheduling_policy="priority")
    assert status == 200


def test_a_full_queue_is_429_with_a_time_to_retry(tiny_dir: Path) -> None:
    status, body, headers = post(tiny_dir, {"prompt": ["a", "b", "c"]}, max_waiting_requests=2)
    assert status == 429
    assert body["error"]["type"] == "RateLimitError"  # type: ignore[index]
    assert headers["retry-after"] == "1"


def test_a_request_out_of_time_ends_with_an_error_that_says_so(tiny_dir: Path) -> None:
    status, body, _ = post(tiny_dir, {"max_tokens": 900, "timeout_s": 0.01})
    assert status == 500
    assert "timeout_s" in body["error"]["message"]  # type: ignore[index]


@pytest.mark.parametrize("timeout_s", [0, -1])
def test_bad_deadlines_are_400(tiny_dir: Path, timeout_s: float) -> None:
    status, body, _ = post(tiny_dir, {"timeout_s": timeout_s})
    assert (status, body["error"]["param"]) == (400, "timeout_s")  # type: ignore[index]
