"""Steps as a watcher sees them."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from moesaic import EngineConfig, SamplingParams
from moesaic.engine.core import EngineCore
from moesaic.engine.step_log import WATCH_S
from moesaic.models.hf import HFCausalLM
from moesaic.models.loader import load_model

CONFIG = EngineConfig(
    device="cpu",
    num_kv_blocks=64,
    enable_chunked_prefill=True,
    prefill_chunk_size=8,
    max_tokens_per_step=32,
    max_batch_size=4,
)
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> HFCausalLM:
    return load_model(tiny_dir)


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def drive(core: EngineCore) -> None:
    while core.has_pending_requests():
        core.step()


def test_a_watcher_sees_each_step_with_its_rows_and_its_blocks(model: HFCausalLM) -> None:
    core = EngineCore(model, CONFIG)
    assert core.steps_after(None)["steps"] == []
    core.add_request("a", range(1, 20), GREEDY)
    drive(core)
    found = core.steps_after(0)
    steps: list[dict[str, Any]] = found["steps"]
    assert [s["number"] for s in steps] == [1, 2, 3, 4, 5]
    assert [s["chunks"] for s in steps] == [((0, 8),), ((0, 8),), ((0, 3),), (), ()]
    assert [s["decode_rows"] for s in steps] == [0, 0, 0, 1, 1]
    assert [s["kv_blocks_used"] for s in steps] == [1, 1, 2, 2, 0]
    assert [s["largest_itl_s"] is None for s in steps] == [True, True, True, False, False]
    assert all(s[phase] >= 0 for s in steps for phase in ("plan_s", "launch_s", "commit_s"))
    assert (found["latest"], found["num_running"], found["kv_blocks_used"]) == (5, 0, 0)
    assert [s["number"] for s in core.steps_after(3)["steps"]] == [4, 5]


def test_phases_add_up_and_the_largest_gap_spans_steps_that_left_a_stream_out(model: HFCausalLM) -> None:
    looks = count()
    core = EngineCore(model, CONFIG, clock=lambda: next(looks) / 64)
    core.steps_after(None)
    core.add_request("a", (1, 2), GREEDY)
    core.step()
    core.add_request("b", (3, 4), GREEDY)
    core.step()
    core.step()
    steps = core.steps_after(0)["steps"]
    ends = [s["start_s"] + s["plan_s"] + s["launch_s"] + s["commit_s"] for s in steps]
    assert all(s["plan_s"] == s["launch_s"] == 1 / 64 for s in steps)
    assert steps[1]["largest_itl_s"] == ends[1] - ends[0]
    assert steps[2]["largest_itl_s"] == ends[2] - ends[1]


def test_nothing_is_recorded_while_nobody_has_asked_for_a_while(model: HFCausalLM) -> None:
    clock = Clock()
    core = EngineCore(model, CONFIG, clock=clock)
    core.add_request("a", (1, 2), GREEDY)
    core.step()
    assert core.steps_after(0)["steps"] == []
    core.step()
    assert len(core.steps_after(0)["steps"]) == 1
    clock.now_s += WATCH_S + 1
    core.step()
    found = core.steps_after(0)
    assert (found["latest"], found["steps"]) == (3, [])


def test_the_buffer_is_bounded(model: HFCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.engine.step_log.CAPACITY_STEPS", 2)
    core = EngineCore(model, CONFIG)
    core.steps_after(None)
    core.add_request("a", (1, 2), GREEDY)
    drive(core)
    assert [s["number"] for s in core.steps_after(0)["steps"]] == [2, 3]


def test_a_failed_step_is_no_step(model: HFCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = EngineCore(model, CONFIG)
    core.steps_after(None)
    core.add_request("a", (1, 2), GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "run", lambda batch: (_ for _ in ()).throw(OSError("lost")))
        with pytest.raises(OSError, match="lost"):
            core.step()
    drive(core)
    assert [s["decode_rows"] for s in core.steps_after(0)["steps"]] == [0, 1, 1]
