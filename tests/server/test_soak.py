"""Many streams for a while, a third of whose clients vanish: nothing is left and nothing is told twice.

``make soak`` runs this for a minute.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moesaic import EngineConfig
from moesaic.engine.process import ProcessEngineClient
from moesaic.models.files import load_tokenizer
from moesaic.server.app import create_app
from moesaic.server.main import served_model
from moesaic.server.settings import ServerConfig
from moesaic.testing import raw
from moesaic.testing.http import running
from moesaic.testing.soak import load_counting, soak

SECONDS = float(os.environ.get("MOESAIC_SOAK_S", "3"))
NUM_CLIENTS = 256
CONFIG = EngineConfig(
    device="cpu", num_kv_blocks=1500, enable_chunked_prefill=True, max_batch_size=256, max_model_len=1024
)
"""Too few blocks for all 256 at their longest, so that some are preempted."""


@pytest.fixture
def url(tiny_dir: Path) -> Iterator[str]:
    engine = ProcessEngineClient(tiny_dir, CONFIG, partial(load_tokenizer, tiny_dir), make_core=load_counting)
    settings = ServerConfig(served_model_name=("tiny",))
    served = served_model("tiny", tiny_dir, engine.launch()["max_model_len"], settings)
    with running(create_app(engine, served, CONFIG, settings)) as address:
        yield address
    assert engine.num_open_streams == 0
    assert engine.exit_code == 0


def idle_stats(url: str) -> dict[str, Any]:
    """Return the engine's counts once nothing runs; what does not end is shown as it is then."""
    end_s = time.monotonic() + 30
    while True:
        found: dict[str, Any] = raw.ask(url, raw.get("/v1/stats")).json()
        if not found["num_requests_by_status"] or time.monotonic() > end_s:
            return found
        time.sleep(0.05)


def counted(url: str, metric: str) -> float:
    lines = raw.ask(url, raw.get("/metrics")).body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 280)
def test_a_load_with_clients_that_vanish_leaves_nothing_and_ends_every_request_once(
    url: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    result = asyncio.run(soak(url, num_clients=NUM_CLIENTS, seconds=SECONDS))
    found = idle_stats(url)
    with capsys.disabled():
        shown = {name: found[name] for name in ("num_admitted", "num_ended", "num_preemptions", "num_steps")}
        print(f"\nsoak of {SECONDS:.0f} s: {result}, {shown}")  # noqa: T201  # what make soak is for
    assert result.faults == []
    assert result.num_most_at_once == NUM_CLIENTS
    assert min(result.num_whole, result.num_vanished) > NUM_CLIENTS / 5
    assert found["num_requests_by_status"] == {}, "stuck"
    assert found["kv_blocks_free"] == found["kv_blocks_total"], "leaked"
    assert (found["num_running"], found["num_waiting"], found["num_grammars"]) == (0, 0, 0)
    assert found["num_admitted"] == found["num_ended"]
    assert found["num_late_events"] == 0
    assert (found["num_failed_steps"], found["num_failed_requests"]) == (0, 0)
    assert counted(url, "moesaic_request_success_total") == found["num_admitted"]
    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []
