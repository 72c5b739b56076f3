"""``/metrics``: what the engine counted and what clients waited for, in Prometheus' formats.

Why families made at each scrape and not prometheus-client's own counters: most numbers are the engine's and come as
plain values, and the rest are observed once a token, where a list and a bisection cost less than a locked metric.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from moesaic import __version__
from moesaic.engine.client import EngineClient, Submission
from moesaic.engine.outputs import TextDelta
from moesaic.errors import EngineDeadError, EngineDrainingError, RequestError
from moesaic.histogram import SECONDS, TOKENS, Histogram

STATS_TIMEOUT_S = 5.0
"""How long a scrape waits for the engine, which answers between steps; after that it gets the numbers of the last."""

FINISHED_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric: the page about metrics and the exposition are made from it."""

    name: str
    """Without the prefix ``moesaic_``."""
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    vllm: str | None = None
    """vLLM's name for the same, without its prefix ``vllm:``."""
    stat: str | None = None
    """Key of the engine's ``stats()`` for a plain number."""
    labels: tuple[str, ...] = ()
    """Beside ``model_name``, which all have."""

    @property
    def full_name(self) -> str:
        return f"moesaic_{self.name}"


def _gauge(name: str, help_text: str, stat: str | None = None, **more: Any) -> MetricSpec:
    return MetricSpec(name=name, kind="gauge", help=help_text, stat=stat, **more)


def _counter(name: str, help_text: str, stat: str | None = None, **more: Any) -> MetricSpec:
    return MetricSpec(name=f"{name}_total", kind="counter", help=help_text, stat=stat, **more)


def _histogram(name: str, help_text: str, **more: Any) -> MetricSpec:
    return MetricSpec(name=name, kind="histogram", help=help_text, **more)


METRICS: tuple[MetricSpec, ...] = (
    _gauge("num_requests_running", "Requests with KV on the device.", "num_running", vllm="num_requests_running"),
    _gauge("num_requests_waiting", "Requests that wait for admission.", "num_waiting", vllm="num_requests_waiting"),
    _gauge("num_requests_swapped", "Requests whose KV is in host memory.", "num_swapped"),
    _gauge("kv_cache_usage_perc", "Share of the KV blocks that is in use, in [0, 1].", vllm="kv_cache_usage_perc"),
    _gauge("kv_blocks", "KV blocks in all.", "kv_blocks_total"),
    _gauge("kv_blocks_free", "KV blocks that are free.", "kv_blocks_free"),
    _counter("num_preemptions", "Requests that gave their KV back.", "num_preemptions", vllm="num_preemptions_total"),
    _counter(
        "prompt_tokens", "Prompt tokens computed, again included.", "num_prompt_tokens", vllm="prompt_tokens_total"
    ),
    _counter("generation_tokens", "Output tokens.", "num_generation_tokens", vllm="generation_tokens_total"),
    _counter(
        "request_success",
        "Admitted requests that ended, by reason: stop, length, abort (the client left), error.",
        labels=("finished_reason",),
        vllm="request_success_total",
    ),
    _counter("request_refused", "Submissions refused at the door, by kind of error.", labels=("error",)),
    _histogram(
        "time_to_first_token_seconds",
        "Arrival to first output token.",
        vllm="time_to_first_token_seconds",
    ),
    _histogram(
        "inter_token_latency_seconds",
        "Each gap between output tokens of one request.",
        vllm="inter_token_latency_seconds",
    ),
    _histogram("e2e_request_latency_seconds", "Arrival to last token.", vllm="e2e_request_latency_seconds"),
    _histogram(
        "request_time_per_output_token_seconds",
        "First to last token over output tokens but one, per request.",
        vllm="request_time_per_output_token_seconds",
    ),
    _histogram("request_decode_time_seconds", "First to last output token.", vllm="request_decode_time_seconds"),
    _histogram("request_largest_stall_seconds", "The largest gap between output tokens, per request."),
    _histogram("request_prompt_tokens", "Prompt tokens of a finished request.", vllm="request_prompt_tokens"),
    _histogram("request_generation_tokens", "Output tokens of a finished request.", vllm="request_generation_tokens"),
    _histogram(
        "request_queue_time_seconds", "Arrival to the first step with a chunk.", vllm="request_queue_time_seconds"
    ),
    _histogram(
        "request_prefill_time_seconds",
        "Start of the first step with a chunk to end of the last.",
        vllm="request_prefill_time_seconds",
    ),
    _histogram("iteration_tokens_total", "Query tokens of a step.", vllm="iteration_tokens_total"),
    _histogram("step_seconds", "Planning, forward, sampling and commit of a step."),
    _histogram("prefill_chunk_tokens", "Prompt tokens of one request in one step."),
    _histogram(
        "prefill_wait_steps",
        "Steps in a row that passed over a prompt which could run, when it is served "
        "(bound: prefill_starvation_threshold_steps).",
    ),
    _histogram("prefill_wait_seconds", "Arrival, or the end of the chunk before, to the step with the next chunk."),
    _histogram("decode_gap_steps", "Steps in a row that left out the running streams, when they go on."),
    _counter("steps", "Committed steps.", "num_steps"),
    _counter("progress_only_steps", "Steps that computed prompt tokens only.", "num_progress_only_steps"),
    _counter("rolled_back_steps", "Steps that were undone.", "num_rolled_back_steps"),
    _counter("failed_steps", "Steps that raised an error.", "num_failed_steps"),
    _counter("failed_requests", "Requests that a failed step ended.", "num_failed_requests"),
    _counter("out_of_memory_steps", "Steps for which the device had too little memory.", "num_out_of_memory_steps"),
    _counter("prefill_chunks", "Chunks computed.", "num_prefill_chunks"),
    _counter("forced_prefills", "Chunks that went first because they had waited long.", "num_forced_prefills"),
    _counter("recomputed_tokens", "Committed tokens that preemption threw away.", "num_recomputed_tokens"),
    _counter("shared_tokens", "Prompt tokens whose KV another choice had computed.", "num_shared_tokens"),
    _counter("swap_copied_bytes", "Bytes copied to and from host memory for preemption.", "swap_copied_bytes"),
    _counter(
        "blocked_steps",
        "Steps in which the first waiting request did not start, by what was missing: rows, kv_blocks, tokens.",
        labels=("reason",),
    ),
    _gauge(
        "chunk_budget_tokens", "Prompt tokens a step may have; halved for a while by failures.", "chunk_budget_tokens"
    ),
    _gauge(
        "decode_stall_bound_seconds",
        "What max_decode_stall_ms asks for; 0 without.",
        "decode_stall_bound_seconds",
    ),
    _gauge(
        "decode_stall_p99_seconds",
        "Time that the streams in a step waited for it, 99th percentile of the last 1024 steps with streams.",
        "decode_stall_p99_seconds",
    ),
    _gauge(
        "decode_stall_chunk_tokens",
        "Prompt tokens that the last step with streams could have under the bound; 0 without.",
        "decode_stall_chunk_tokens",
    ),
    _counter(
        "decode_stall_exceeded_steps",
        "Steps that made streams wait longer than the bound.",
        "num_decode_stall_exceeded_steps",
    ),
    _counter(
        "decode_stall_unmet_steps",
        "Steps with the smallest chunk that is allowed and yet no hope of the bound.",
        "num_decode_stall_unmet_steps",
    ),
    _gauge("engine_up", "1 while the engine serves, else 0."),
    _gauge("engine_stats_age_seconds", "Age of the engine's numbers; above 0 only while a step takes long."),
    _gauge(
        "feature_info",
        "1; what was requested and is active of each optional feature, and why.",
        labels=("feature", "requested", "active", "reason"),
    ),
    _gauge("build_info", "1; the version.", labels=("version",)),
)
"""Every metric there is."""


class RequestMeters:
    """What clients waited for; a ``RequestObserver`` that does O(1) work a delta."""

    def __init__(self) -> None:
        self.finished = dict.fromkeys(FINISHED_REASONS, 0)
        self.refused: dict[str, int] = {}
        self.histograms = {
            "time_to_first_token_seconds": Histogram(SECONDS),
            "inter_token_latency_seconds": Histogram(SECONDS),
            "e2e_request_latency_seconds": Histogram(SECONDS),
            "request_time_per_output_token_seconds": Histogram(SECONDS),
            "request_decode_time_seconds": Histogram(SECONDS),
            "request_largest_stall_seconds": Histogram(SECONDS),
            "request_prompt_tokens": Histogram(TOKENS),
            "request_generation_tokens": Histogram(TOKENS),
        }
        self._last_token_s: dict[str, float] = {}

    def admit(self, request_id: str, submission: Submission) -> None:
        """Nothing to count yet."""

    def refuse(self, error: RequestError | EngineDeadError | EngineDrainingError) -> None:
        name = type(error).__name__
        self.refused[name] = self.refused.get(name, 0) + 1

    def observe(self, delta: TextDelta) -> None:
        if delta.token_ids:
            last_s = self._last_token_s.get(delta.request_id)
            if last_s is not None:
                self.histograms["inter_token_latency_seconds"].observe(delta.time_s - last_s)
            self._last_token_s[delta.request_id] = delta.time_s
        if delta.finish_reason is not None:
            self._last_token_s.pop(delta.request_id, None)
            self.finished[delta.finish_reason] += 1
            self._finish(delta)

    def _finish(self, delta: TextDelta) -> None:
        output = delta.output
        if output is None or delta.finish_reason not in ("stop", "length"):
            return
        times, observe = output.metrics, self._observe
        observe("request_prompt_tokens", len(output.prompt_token_ids))
        observe("request_generation_tokens", times.num_output_tokens)
        observe("e2e_request_latency_seconds", times.finished_s - times.arrival_s)
        if times.first_token_s is None:
            return
        observe("time_to_first_token_seconds", times.first_token_s - times.arrival_s)
        decode_s = times.finished_s - times.first_token_s
        observe("request_decode_time_seconds", decode_s)
        if times.num_output_tokens > 1:
            observe("request_time_per_output_token_seconds", decode_s / (times.num_output_tokens - 1))
            observe("request_largest_stall_seconds", times.largest_itl_s or 0.0)

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)

    def lose(self, request_ids: tuple[str, ...], reason: Literal["abort", "error"]) -> None:
        self.finished[reason] += len(request_ids)
        for request_id in request_ids:
            self._last_token_s.pop(request_id, None)


class MetricsPage:
    """Answers scrapes of one server; nothing is shared with another in the same process."""

    def __init__(self, client: EngineClient, meters: RequestMeters, model_name: str) -> None:
        self._client = client
        self._meters = meters
        self._model_name = model_name
        self._stats: Mapping[str, Any] = {}
        self._stats_at_s = time.monotonic()

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type, as the ``Accept`` header wants it."""
        await self._refresh()
        registry = CollectorRegistry()
        registry.register(_Families(self._samples(), self._model_name))
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    async def _refresh(self) -> None:
        try:
            self._stats = await asyncio.wait_for(self._client.stats(), STATS_TIMEOUT_S)
        except (TimeoutError, EngineDeadError):
            return  # the numbers of the last scrape; engine_up and their age say so
        self._stats_at_s = time.monotonic()

    def _samples(self) -> "_Samples":
        stats, samples = self._stats, _Samples()
        for spec in METRICS:
            if spec.stat is not None and spec.stat in stats:
                samples.add(spec.name, stats[spec.stat])
        if stats:
            samples.add("kv_cache_usage_perc", 1 - stats["kv_blocks_free"] / stats["kv_blocks_total"])
            for name, histogram in stats["histograms"].items():
                samples.add("iteration_tokens_total" if name == "iteration_tokens" else name, histogram)
            for reason, number in stats["num_blocked_steps"].items():
                samples.add("blocked_steps_total", number, reason)
            for feature, state in stats["features"].items():
                shown = (str(state[key]).lower() for key in ("requested", "active"))
                samples.add("feature_info", 1, feature, *shown, state["reason"])
        for name, meter in self._meters.histograms.items():
            samples.add(name, meter.as_json())
        for reason, number in self._meters.finished.items():
            samples.add("request_success_total", number, reason)
        for error, number in self._meters.refused.items():
            samples.add("request_refused_total", number, error)
        samples.add("engine_up", int(self._client.is_healthy))
        samples.add("engine_stats_age_seconds", time.monotonic() - self._stats_at_s)
        samples.add("build_info", 1, __version__)
        return samples


class _Samples:
    """Values by metric: a number or a histogram as JSON (Any), with its own labels."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[tuple[tuple[str, ...], Any]]] = {}

    def add(self, name: str, value: Any, *labels: str) -> None:
        self._by_name.setdefault(name, []).append((labels, value))

    def of(self, name: str) -> Iterable[tuple[tuple[str, ...], Any]]:
        return self._by_name.get(name, ())


class _Families(Collector):
    """The samples as prometheus-client wants them."""

    def __init__(self, samples: _Samples, model_name: str) -> None:
        self._samples = samples
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        for spec in METRICS:
            yield self._family(spec)

    def _family(self, spec: MetricSpec) -> Metric:
        labels = ("model_name", *spec.labels)
        if spec.kind == "histogram":
            histogram = HistogramMetricFamily(spec.full_name, spec.help, labels=labels)
            for values, value in self._samples.of(spec.name):
                histogram.add_metric([self._model_name, *values], _buckets(value), value["sum"])
            return histogram
        make = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        family = make(spec.full_name, spec.help, labels=labels)
        for values, value in self._samples.of(spec.name):
            family.add_metric([self._model_name, *values], value)
        return family


def _buckets(histogram: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the cumulative buckets of a ``Histogram.as_json``."""
    bounds = [*(str(float(bound)) for bound in histogram["bounds"]), "+Inf"]
    return list(zip(bounds, accumulate(histogram["counts"]), strict=True))
