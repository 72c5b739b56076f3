"""Write docs/metrics.md and the Grafana dashboard from the list of metrics; tests/server/test_metrics.py compares."""

import json
from pathlib import Path
from typing import Any

from moesaic.server.metrics import METRICS, MetricSpec

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "metrics.md"
DASHBOARD = ROOT / "deploy" / "grafana" / "moesaic.json"

HEAD = """# Metrics

Made from the list in `server/metrics.py` by `scripts/metrics_page.py`; do not edit by hand. `GET /metrics` answers in
Prometheus' text format or OpenMetrics, as the scraper asks; with `--api-key` it wants a key like every route but
`/health`. All metrics have the label `model_name`. Counters start at 0 with each start of the engine.

Numbers of the engine are as of the end of its last step. While a step takes longer than 5 s, a scrape gets those of the
scrape before, and `moesaic_engine_stats_age_seconds` says how old they are.

The last column names the metric of vLLM with the same meaning, so that dashboards need only another prefix.
`deploy/grafana/moesaic.json` is a dashboard for these metrics.

| metric | kind | labels | meaning | vLLM |
|---|---|---|---|---|
"""


def row(spec: MetricSpec) -> str:
    """Return the table row of one metric."""
    labels = ", ".join(f"`{label}`" for label in spec.labels)
    vllm = f"`vllm:{spec.vllm}`" if spec.vllm else ""
    return f"| `{spec.full_name}` | {spec.kind} | {labels} | {spec.help} | {vllm} |\n"


def page() -> str:
    """Return the whole page."""
    return HEAD + "".join(map(row, METRICS))


def quantile(q: float, name: str) -> str:
    """Return the PromQL for one quantile of a histogram over the last minutes."""
    return f"histogram_quantile({q}, sum by (le) (rate(moesaic_{name}_bucket[$__rate_interval])))"


def rate(name: str, by: str = "") -> str:
    """Return the PromQL for a counter per second."""
    return f"sum{f' by ({by}) ' if by else ''}(rate(moesaic_{name}[$__rate_interval]))"


PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Requests", "short", tuple((f"moesaic_num_requests_{s}", s) for s in ("running", "waiting", "swapped"))),
    ("KV in use", "percentunit", (("moesaic_kv_cache_usage_perc", "used"),)),
    (
        "Tokens per second",
        "short",
        ((rate("generation_tokens_total"), "output"), (rate("prompt_tokens_total"), "prompt")),
    ),
    ("TTFT", "s", tuple((quantile(q, "time_to_first_token_seconds"), f"p{q * 100:g}") for q in (0.5, 0.9, 0.99))),
    ("ITL", "s", tuple((quantile(q, "inter_token_latency_seconds"), f"p{q * 100:g}") for q in (0.5, 0.9, 0.99))),
    (
        "Largest stall of a request",
        "s",
        tuple((quantile(q, "request_largest_stall_seconds"), f"p{q * 100:g}") for q in (0.5, 0.99)),
    ),
    (
        "Where a request's time goes (p50)",
        "s",
        tuple((quantile(0.5, f"request_{s}_time_seconds"), s) for s in ("queue", "prefill", "decode")),
    ),
    (
        "Prefill wait and decode gap (p99)",
        "short",
        ((quantile(0.99, "prefill_wait_steps"), "prefill wait"), (quantile(0.99, "decode_gap_steps"), "decode gap")),
    ),
    (
        "Decode stall and its bound",
        "s",
        (("moesaic_decode_stall_p99_seconds", "p99"), ("moesaic_decode_stall_bound_seconds", "bound")),
    ),
    ("Chunk sizes", "short", tuple((quantile(q, "prefill_chunk_tokens"), f"p{q * 100:g}") for q in (0.5, 0.99))),
    (
        "Steps in which the first prompt did not start",
        "short",
        ((rate("blocked_steps_total", "reason"), "{{reason}}"),),
    ),
    (
        "Pressure",
        "short",
        ((rate("num_preemptions_total"), "preemptions"), (rate("recomputed_tokens_total"), "recomputed tokens")),
    ),
    ("Ends", "short", ((rate("request_success_total", "finished_reason"), "{{finished_reason}}"),)),
    (
        "Faults",
        "short",
        ((rate("failed_steps_total"), "failed steps"), (rate("out_of_memory_steps_total"), "out of memory")),
    ),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it (Any: JSON)."""
    return {
        "title": "Moesaic",
        "uid": "moesaic",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [{"name": "source", "type": "datasource", "query": "prometheus"}]},
        "panels": [_panel(i, *panel) for i, panel in enumerate(PANELS)],
    }


def _panel(index: int, title: str, unit: str, queries: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"x": 8 * (index % 3), "y": 8 * (index // 3), "w": 8, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": source, "expr": expr, "legendFormat": legend}
            for i, (expr, legend) in enumerate(queries)
        ],
    }


def dashboard_text() -> str:
    """Return the dashboard's file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    DASHBOARD.parent.mkdir(parents=True, exist_ok=True)
    DASHBOARD.write_text(dashboard_text(), encoding="utf-8")
