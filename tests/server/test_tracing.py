"""Spans of requests as a collector gets them: parents, times, numbers, and nothing of what was said."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from starlette.testclient import TestClient

from moesaic import EngineConfig
from moesaic.engine.client import Submission
from moesaic.engine.core import EngineCore
from moesaic.engine.thread_client import ThreadEngineClient
from moesaic.errors import ConfigError
from moesaic.models.files import load_tokenizer
from moesaic.models.loader import load_model
from moesaic.request import SamplingParams
from moesaic.server import settings as settings_module
from moesaic.server.app import create_app
from moesaic.server.served_model import ServedModel
from moesaic.server.settings import ServerConfig
from moesaic.server.tracing import RequestTracer

CONFIG = EngineConfig(device="cpu", num_kv_blocks=64, max_model_len=256)
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
BODY = {"prompt": "Hello secret", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


class Collector:
    """Takes OTLP over HTTP on a port of its own."""

    def __init__(self) -> None:
        bodies: list[bytes] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None: ...

        self.bodies = bodies
        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def spans(self) -> list[Span]:
        """Return all spans so far; services are checked on the way."""
        found: list[Span] = []
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                assert "moesaic" in [
                    a.value.string_value for a in resource.resource.attributes if a.key == "service.name"
                ]
                found += [span for scope in resource.scope_spans for span in scope.spans]
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    one = Collector()
    yield one
    one.close()


def serve(tiny_dir: Path, url: str) -> TestClient:
    model = ServedModel(names=("tiny",), root="tiny", max_model_len=256, tokenizer=load_tokenizer(tiny_dir))
    client = ThreadEngineClient(EngineCore(load_model(tiny_dir), CONFIG), load_tokenizer(tiny_dir))
    return TestClient(create_app(client, model, CONFIG, ServerConfig(otlp_traces_endpoint=url)))


def attributes(span: Span) -> dict[str, Any]:  # Any: of several types
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}


def test_a_request_is_a_span_below_its_caller_with_what_it_took(tiny_dir: Path, collector: Collector) -> None:
    with serve(tiny_dir, collector.url) as client:
        headers = {**HEADERS, "X-Request-Id": "label-1"}
        assert client.post("/v1/completions", json={**BODY, "n": 2}, headers=headers).status_code == 200
        assert client.post("/v1/completions", json={**BODY, "stream": True}).status_code == 200
    spans = collector.spans()
    requests = [s for s in spans if s.name == "llm_request"]
    assert [s.parent_span_id.hex() for s in requests] == [PARENT, PARENT, ""]
    assert {s.trace_id.hex() for s in requests[:2]} == {TRACE}
    for request in requests:
        below = {s.name: s for s in spans if s.parent_span_id == request.span_id}
        assert below.keys() == {"prefill", "decode"}
        times = [request.start_time_unix_nano, below["prefill"].end_time_unix_nano, request.end_time_unix_nano]
        assert times == sorted(times)
        values = attributes(request)
        assert (values["gen_ai.request.model"], values["gen_ai.request.max_tokens"]) == ("tiny", 4)
        assert (values["gen_ai.usage.input_tokens"], values["gen_ai.usage.output_tokens"]) == (len(BODY["prompt"]), 4)  # type: ignore[arg-type]  # a text
        assert 0 < values["gen_ai.response.time_to_first_chunk"] < 60
        assert values["moesaic.largest_gap"] >= 0
        assert request.status.code == Status.STATUS_CODE_UNSET
    assert attributes(requests[0])["gen_ai.request.id"] == "label-1"
    assert not any(b"secret" in body for body in collector.bodies)


def test_refusals_are_spans_too_and_say_only_their_kind(tiny_dir: Path, collector: Collector) -> None:
    with serve(tiny_dir, collector.url) as client:
        assert client.post("/v1/completions", json={**BODY, "max_tokens": 9999}, headers=HEADERS).status_code == 400
    (span,) = collector.spans()
    assert span.parent_span_id.hex() == PARENT
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert attributes(span)["error.type"] == "RequestTooLargeError"


@pytest.mark.parametrize(
    ("reason", "status"), [("abort", Status.STATUS_CODE_UNSET), ("error", Status.STATUS_CODE_ERROR)]
)
def test_a_request_without_a_last_delta_is_sent_with_its_reason(collector: Collector, reason: Any, status: int) -> None:
    tracer = RequestTracer(collector.url, "tiny")
    tracer.admit("r", Submission(prompt_token_ids=(1, 2), sampling_params=SamplingParams(max_tokens=None)))
    tracer.lose(("r", "unknown"), reason)
    tracer.close()
    (span,) = collector.spans()
    assert span.status.code == status
    assert attributes(span)["gen_ai.usage.input_tokens"] == 2
    assert span.end_time_unix_nano >= span.start_time_unix_nano


@pytest.mark.slow
def test_a_collector_that_is_gone_holds_nothing_up(tiny_dir: Path, collector: Collector) -> None:
    with serve(tiny_dir, "http://127.0.0.1:9/v1/traces") as client:
        assert client.post("/v1/completions", json=BODY).status_code == 200


def test_a_bad_endpoint_and_a_missing_package_are_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="must be an http or https URL"):
        ServerConfig(otlp_traces_endpoint="localhost:4318")
    monkeypatch.setattr(settings_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'moesaic\[otel\]'"):
        ServerConfig(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces")
