"""``/metrics`` counts what happened, in names that its page, its dashboard and its code share."""

import asyncio
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moesaic.config import EngineConfig
from moesaic.engine.client import Submission, TextEngineClient
from moesaic.engine.messages import AbortRequests, AddRequests, Command
from moesaic.histogram import Histogram
from moesaic.request import SamplingParams
from moesaic.server.main import load_app
from moesaic.server.metrics import METRICS, RequestMeters
from moesaic.server.observed import ObservedClient
from moesaic.server.settings import ServerConfig
from moesaic.testing.http import running

ROOT = Path(__file__).parents[2]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(scope="module")
def url(tiny_dir: Path) -> Iterator[str]:
    """A server of its own: its counters are compared."""
    config = EngineConfig(
        device="cpu",
        num_kv_blocks=64,
        enable_chunked_prefill=True,
        prefill_chunk_size=16,
        max_tokens_per_step=64,
        max_batch_size=8,
    )
    app, _ = load_app(str(tiny_dir), config, ServerConfig(served_model_name=("tiny",)))
    with running(app) as address:
        yield address


def scrape(url: str) -> Samples:
    """Return every sample by name and labels, ``model_name`` left out."""
    text = httpx2.get(f"{url}/metrics", timeout=30).text
    return {
        (s.name, tuple(sorted((k, v) for k, v in s.labels.items() if k != "model_name"))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def growth(before: Samples, after: Samples, name: str, **labels: str) -> float:
    key = (f"moesaic_{name}", tuple(sorted(labels.items())))
    return after[key] - before.get(key, 0.0)


def complete(url: str, **fields: object) -> httpx2.Response:
    body = {"model": "tiny", "prompt": [7] * 40, "max_tokens": 6, "temperature": 0, "ignore_eos": True} | fields
    return httpx2.post(f"{url}/v1/completions", json=body, timeout=60)


def test_a_request_is_counted_once_in_every_place_it_belongs_to(url: str) -> None:
    before = scrape(url)
    assert complete(url).status_code == 200
    after = scrape(url)
    assert growth(before, after, "prompt_tokens_total") == 40
    assert growth(before, after, "generation_tokens_total") == 6
    assert growth(before, after, "request_success_total", finished_reason="length") == 1
    assert growth(before, after, "prefill_chunks_total") == 3
    assert growth(before, after, "prefill_chunk_tokens_sum") == 40
    assert growth(before, after, "iteration_tokens_total_sum") == 45
    assert growth(before, after, "steps_total") == 8
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert growth(before, after, f"{name}_seconds_count") == 1
    assert growth(before, after, "inter_token_latency_seconds_count") == 5
    assert growth(before, after, "request_largest_stall_seconds_count") == 1
    assert after[("moesaic_engine_up", ())] == 1
    assert after[("moesaic_kv_cache_usage_perc", ())] == 0


def test_a_refusal_is_counted_and_is_no_request(url: str) -> None:
    before = scrape(url)
    assert complete(url, prompt=[7] * 5000).status_code == 400
    after = scrape(url)
    assert growth(before, after, "request_refused_total", error="RequestTooLargeError") == 1
    assert growth(before, after, "request_success_total", finished_reason="error") == 0


def test_a_stream_that_its_reader_leaves_is_counted_as_aborted(url: str) -> None:
    before = scrape(url)
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 900, "stream": True, "ignore_eos": True}
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
        next(reply.iter_lines())
    for _ in range(200):
        after = scrape(url)
        if growth(before, after, "request_success_total", finished_reason="abort"):
            break
    assert growth(before, after, "request_success_total", finished_reason="abort") == 1


def test_two_servers_in_one_process_share_no_number(url: str, tiny_dir: Path) -> None:
    app, _ = load_app(str(tiny_dir), EngineConfig(device="cpu", num_kv_blocks=16))
    complete(url)
    with running(app) as other:
        assert scrape(other)[("moesaic_steps_total", ())] == 0


def test_every_metric_of_the_list_is_exposed_and_no_other(url: str) -> None:
    complete(url)
    text = httpx2.get(f"{url}/metrics", timeout=30).text
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert families == {spec.full_name for spec in METRICS}
    sampled = {name for name, _ in scrape(url)}
    silent = [s.full_name for s in METRICS if not any(n.startswith(s.full_name) for n in sampled)]
    assert silent == ["moesaic_request_refused_total"] or silent == []


def test_a_scraper_that_wants_openmetrics_gets_it(url: str) -> None:
    reply = httpx2.get(f"{url}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}, timeout=30)
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    assert reply.text.endswith("# EOF\n")


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("metrics_page", ROOT / "scripts" / "metrics_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_and_the_dashboard_are_what_the_list_makes() -> None:
    """If this fails: python scripts/metrics_page.py"""
    made = generator()
    assert made.PAGE.read_text(encoding="utf-8") == made.page()
    assert made.DASHBOARD.read_text(encoding="utf-8") == made.dashboard_text()


def test_every_metric_in_the_dashboard_exists() -> None:
    known = {spec.full_name for spec in METRICS}
    known |= {f"{spec.full_name}_bucket" for spec in METRICS if spec.kind == "histogram"}
    queried = set(re.findall(r"moesaic_\w+", generator().dashboard_text()))
    assert queried
    assert queried <= known


def test_a_histogram_counts_a_value_at_its_bound_below_it() -> None:
    histogram = Histogram((1, 2))
    for value in (1, 1.5, 2, 3):
        histogram.observe(value)
    assert histogram.as_json() == {"bounds": [1, 2], "counts": [1, 2, 1], "sum": 7.5}
    assert histogram.num_values == 4


def test_a_client_that_leaves_before_its_request_is_admitted_is_counted_as_one_that_left() -> None:
    """The engine begins such a request and aborts it: the counts of both would differ for ever."""

    class Silent(TextEngineClient):
        """An engine that answers nothing."""

        def __init__(self) -> None:
            super().__init__(None)
            self._loop = asyncio.get_running_loop()
            self.sent: list[Command] = []

        def _send(self, command: Command) -> None:
            self.sent.append(command)

    async def scenario() -> None:
        meters, engine = RequestMeters(), Silent()
        one = Submission(prompt_token_ids=(1,), sampling_params=SamplingParams())
        submitting = asyncio.create_task(ObservedClient(engine, [meters]).submit(one, one))
        await asyncio.sleep(0)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        assert [type(command) for command in engine.sent] == [AddRequests, AbortRequests]
        assert meters.finished == {"stop": 0, "length": 0, "abort": 2, "error": 0}

    asyncio.run(scenario())
