"""OpenTelemetry spans of requests: when they waited, read their prompt and answered; nothing of what they said.

Needs the extra ``otel``. Names are those of OpenTelemetry's conventions for generative AI where there are any.
"""

import os
import time
from dataclasses import dataclass
from typing import Any, Literal

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from moesaic import __version__
from moesaic.engine.client import Submission
from moesaic.engine.outputs import TextDelta
from moesaic.errors import EngineDeadError, EngineDrainingError, RequestError
from moesaic.request import RequestMetrics
from moesaic.server.labels import current_label

_PARENTS = TraceContextTextMapPropagator()


class TraceParents:
    """ASGI middleware that makes the ``traceparent`` of a request the parent of its spans (W3C Trace Context)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        token = context.attach(_PARENTS.extract(Headers(scope=scope)))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)


@dataclass(slots=True)
class _Open:
    """A request that is not over."""

    parent: context.Context
    begun_s: float
    attributes: dict[str, Any]
    num_output_tokens: int = 0


class RequestTracer:
    """A ``RequestObserver`` that sends a span ``llm_request`` for each request, with ``prefill`` and ``decode`` below.

    Spans are made when a request is over, and sent by a thread of the SDK's; what a collector does not take is dropped.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        """``endpoint`` takes OTLP over HTTP (protobuf), as ``http://127.0.0.1:4318/v1/traces`` does of a collector."""
        resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "moesaic")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("moesaic", __version__)
        self._model_name = model_name
        self._open: dict[str, _Open] = {}

    def close(self) -> None:
        """Send what is left; blocks, some seconds at most if nobody takes it."""
        self._provider.shutdown()

    def admit(self, request_id: str, submission: Submission) -> None:
        """Begin a request below the span that its HTTP request named."""
        params = submission.sampling_params
        attributes: dict[str, Any] = {
            "gen_ai.request.model": self._model_name,
            "gen_ai.request.id": current_label.get() or request_id,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.input_tokens": len(submission.prompt_token_ids),
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        self._open[request_id] = _Open(context.get_current(), time.monotonic(), attributes)

    def refuse(self, error: RequestError | EngineDeadError | EngineDrainingError) -> None:
        """Send a span without a length; the message of ``error`` may quote what was sent, so only its kind."""
        span = self._tracer.start_span("llm_request", kind=trace.SpanKind.SERVER)
        self._fail(span, type(error).__name__)
        span.end()

    def observe(self, delta: TextDelta) -> None:
        """Count a delta, and send the spans of the request with its last."""
        entry = self._open.get(delta.request_id)
        if entry is None:
            return
        entry.num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            metrics = None if delta.output is None else delta.output.metrics
            self._end(delta.request_id, delta.finish_reason, metrics)

    def lose(self, request_ids: tuple[str, ...], reason: Literal["abort", "error"]) -> None:
        """Send the spans of requests that get no last delta: of these no times are known but the length."""
        for request_id in request_ids:
            if request_id in self._open:
                self._end(request_id, reason, None)

    def _end(self, request_id: str, reason: str, metrics: RequestMetrics | None) -> None:
        entry = self._open.pop(request_id)
        begun_s, end_s = (
            (entry.begun_s, time.monotonic()) if metrics is None else (metrics.arrival_s, metrics.finished_s)
        )
        attributes = {
            **entry.attributes,
            "gen_ai.usage.output_tokens": entry.num_output_tokens,
            "gen_ai.response.finish_reasons": (reason,),
            **_times(metrics),
        }
        span = self._tracer.start_span(
            "llm_request", entry.parent, trace.SpanKind.SERVER, attributes, start_time=_wall_ns(begun_s)
        )
        if reason == "error":
            self._fail(span, "error")
        if metrics is not None and metrics.first_token_s is not None:
            below = trace.set_span_in_context(span, entry.parent)
            self._part("prefill", below, begun_s, metrics.first_token_s)
            self._part("decode", below, metrics.first_token_s, end_s)
        span.end(_wall_ns(end_s))

    def _part(self, name: str, parent: context.Context, begun_s: float, end_s: float) -> None:
        self._tracer.start_span(name, parent, start_time=_wall_ns(begun_s)).end(_wall_ns(end_s))

    @staticmethod
    def _fail(span: trace.Span, kind: str) -> None:
        span.set_attribute("error.type", kind)
        span.set_status(trace.StatusCode.ERROR)


def _times(metrics: RequestMetrics | None) -> dict[str, float]:
    """Return what is known of the waits, in seconds."""
    if metrics is None:
        return {}
    known = {"gen_ai.response.time_to_first_chunk": metrics.ttft_s, "moesaic.largest_gap": metrics.largest_itl_s}
    return {name: value for name, value in known.items() if value is not None}


def _wall_ns(monotonic_s: float) -> int:
    """Return a time of the monotonic clock in nanoseconds since the epoch."""
    return time.time_ns() - round((time.monotonic() - monotonic_s) * 1e9)
