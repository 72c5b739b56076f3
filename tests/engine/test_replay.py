"""What an engine did under memory pressure, with faults and clients that leave, is replayed without its model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.engine.supervisor import StepSupervisor
from moesaic.models.loader import load_model
from moesaic.request import SamplingParams
from moesaic.sched.recording import RecordingScheduler
from moesaic.sched.replay import replay
from moesaic.testing.scheduling import ManualClock

PROMPTS = [[(11 * i + 5 * n) % 250 for n in range(9 + 3 * i)] for i in range(6)]


def create_core(tiny_dir: Path, log: Path, clock: ManualClock, **settings: Any) -> EngineCore:  # Any: many
    defaults = {
        "enable_chunked_prefill": True,
        "prefill_chunk_size": 4,
        "max_batch_size": 8,
        "max_tokens_per_step": 32,
        "block_size": 4,
        "num_kv_blocks": 12,
        "decision_log": str(log),
    }
    return EngineCore(load_model(tiny_dir), EngineConfig(**(defaults | settings)), clock=clock)


def fail_at(core: EngineCore, steps: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the forwards with these numbers run out of memory."""
    run, numbers = core.runner.run, iter(range(10_000))

    def fail_sometimes(batch: Any) -> torch.Tensor:
        if next(numbers) in steps:
            raise torch.OutOfMemoryError("no memory")
        return run(batch)

    monkeypatch.setattr(core.runner, "run", fail_sometimes)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_run_with_swap_faults_stops_and_aborts_is_replayed(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunked: bool
) -> None:
    log, clock = tmp_path / "log", ManualClock()
    core = create_core(tiny_dir, log, clock, enable_chunked_prefill=chunked, swap_space_bytes=12_000)
    supervisor = StepSupervisor(core)
    fail_at(core, {6, 10}, monkeypatch)
    (eos,) = core.model.info.eos_token_ids
    for i, prompt in enumerate(PROMPTS):
        stops: dict[str, Any] = {"logit_bias": {eos: 100.0}, "min_tokens": 5} if i % 2 else {"ignore_eos": True}
        params = SamplingParams(max_tokens=14, temperature=0.0, **stops)
        core.add_request(f"r{i}", prompt, params, timeout_s=5.0 if i == 4 else None)
    ends: dict[str, str] = {}
    for step in range(200):
        if not core.has_pending_requests():
            break
        if step == 6:
            core.abort_request("r2")
        if step == 9:
            core.scheduler.preempt("r0")
            clock.advance(6.0)
        ends |= {o.request_id: o.finish_reason for o in supervisor.step() if o.finish_reason is not None}
    assert len(ends) == len(PROMPTS)
    assert set(ends.values()) == {"length", "stop", "abort", "error"}
    assert core.stats()["num_rolled_back_steps"] == 2
    assert core.stats()["swap_copied_bytes"] > 0
    assert isinstance(core.scheduler, RecordingScheduler)
    core.scheduler.log.close()
    result = replay(log)
    assert result.first_difference is None
    assert result.num_steps >= core.stats()["num_steps"] + 2
    assert '"swap_end"' in log.read_text()
