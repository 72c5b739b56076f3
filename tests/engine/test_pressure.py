"""The engine with too little KV memory, deadlines, priorities and pauses: nothing is lost, tokens stay the same."""

from pathlib import Path
from typing import Any

import pytest

from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.errors import QueueFullError, RequestError
from moesaic.kv.store import LayeredPagedKVStore
from moesaic.models.hf import HFCausalLM
from moesaic.models.loader import load_model
from moesaic.request import SamplingParams
from moesaic.testing.scheduling import ManualClock

GREEDY = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
PROMPTS = [[(11 * i + 5 * n) % 250 for n in range(9 + i)] for i in range(4)]


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> HFCausalLM:
    return load_model(tiny_dir)


def create_core(model: HFCausalLM, clock: ManualClock | None = None, **settings: Any) -> EngineCore:  # Any: many
    defaults = {
        "enable_chunked_prefill": True,
        "prefill_chunk_size": 4,
        "max_batch_size": 8,
        "max_tokens_per_step": 32,
        "block_size": 4,
        "num_kv_blocks": 64,
    }
    return EngineCore(model, EngineConfig(**(defaults | settings)), clock=clock or ManualClock())


def run(core: EngineCore, prompts: list[list[int]] = PROMPTS) -> dict[str, list[int]]:
    for i, prompt in enumerate(prompts):
        core.add_request(f"r{i}", prompt, GREEDY)
    return drain(core)


def drain(core: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while core.has_pending_requests():
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("swap_space_bytes", [0, 1 << 20])
def test_preemption_changes_no_token(model: HFCausalLM, chunked: bool, swap_space_bytes: int) -> None:
    expected = run(create_core(model))
    core = create_core(model, num_kv_blocks=10, enable_chunked_prefill=chunked, swap_space_bytes=swap_space_bytes)
    assert run(core) == expected
    stats = core.stats()
    assert stats["num_preemptions"] > 0
    assert (stats["num_recomputed_tokens"] > 0) == (swap_space_bytes == 0)
    assert (stats["swap_copied_bytes"] > 0) == (swap_space_bytes > 0)
    assert (stats["kv_blocks_free"], stats["swap_bytes"], stats["num_swapped"]) == (10, 0, 0)


def test_a_copy_that_fails_costs_a_recompute_and_no_token(model: HFCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(create_core(model))
    core = create_core(model, num_kv_blocks=10, swap_space_bytes=1 << 20)

    def fail(self: LayeredPagedKVStore, block_ids: Any) -> Any:
        raise MemoryError("no host memory")

    monkeypatch.setattr(LayeredPagedKVStore, "checkpoint", fail)
    assert run(core) == expected
    assert core.stats()["num_recomputed_tokens"] > 0


def test_aborting_a_swapped_request_frees_its_host_copy(model: HFCausalLM) -> None:
    core = create_core(model, num_kv_blocks=10, swap_space_bytes=1 << 20)
    for i, prompt in enumerate(PROMPTS):
        core.add_request(f"r{i}", prompt, GREEDY)
    while not core.scheduler.swap.resting():
        core.step()
    (name,) = {s.request.request_id for s in core.scheduler.swap.resting()}
    assert core.abort_request(name)
    drain(core)
    assert core.swap_pool.num_bytes == 0
    assert core.stats()["kv_blocks_free"] == 10


@pytest.mark.parametrize("step", range(12))
def test_forced_preemption_at_any_step_changes_no_token(model: HFCausalLM, step: int) -> None:
    expected = run(create_core(model))
    core = create_core(model)
    for i, prompt in enumerate(PROMPTS):
        core.add_request(f"r{i}", prompt, GREEDY)
    tokens: dict[str, list[int]] = {}
    for index in range(200):
        if index == step:
            for i in range(len(PROMPTS)):
                core.scheduler.preempt(f"r{i}")
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        if not core.has_pending_requests():
            break
    assert tokens == expected


def test_a_paused_request_goes_on_with_the_same_tokens(model: HFCausalLM) -> None:
    expected = run(create_core(model))
    core = create_core(model)
    for i, prompt in enumerate(PROMPTS):
        core.add_request(f"r{i}", prompt, GREEDY)
    tokens = {f"r{i}": [] for i in range(4)}  # type: dict[str, list[int]]
    for _ in range(6):
        for output in core.step():
            tokens[output.request_id] += output.new_token_ids
    assert core.pause_request("r1")
    for name, new in drain(core).items():
        tokens[name] += new
    assert len(tokens["r1"]) < 14
    assert core.stats()["num_paused"] == 1
    assert core.resume_request("r1")
    tokens["r1"] += drain(core)["r1"]
    assert tokens == expected


def test_a_request_ends_with_an_error_when_its_time_is_over(model: HFCausalLM) -> None:
    clock = ManualClock()
    core = create_core(model, clock)
    core.add_request("slow", PROMPTS[0], GREEDY, timeout_s=5.0)
    core.add_request("other", PROMPTS[1], GREEDY)
    core.step()
    clock.advance(4.9)
    assert all(o.finish_reason is None for o in core.step())
    clock.advance(0.1)
    (event,) = [o for o in core.step() if o.request_id == "slow"]
    assert (event.finish_reason, event.new_token_ids) == ("error", ())
    assert event.error is not None
    assert "5.0 s" in event.error
    assert len(drain(core)["other"]) > 0
    assert core.stats()["kv_blocks_free"] == 64


def test_an_old_deadline_does_not_end_a_new_request_of_the_same_id(model: HFCausalLM) -> None:
    clock = ManualClock()
    core = create_core(model, clock)
    core.add_request("r", PROMPTS[0], GREEDY, timeout_s=5.0)
    drain(core)
    core.add_request("r", PROMPTS[0], GREEDY)
    clock.advance(6.0)
    assert len(drain(core)["r"]) == 14


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), "5", True])
def test_bad_deadlines_are_refused(model: HFCausalLM, timeout_s: Any) -> None:
    core = create_core(model)
    with pytest.raises(RequestError, match="timeout_s"):
        core.add_request("r", PROMPTS[0], GREEDY, timeout_s=timeout_s)
    assert not core.has_pending_requests()


def test_priority_is_refused_unless_the_policy_heeds_it(model: HFCausalLM) -> None:
    with pytest.raises(RequestError, match="--scheduling-policy priority"):
        create_core(model).add_request("r", PROMPTS[0], GREEDY, priority=1)
    core = create_core(model, scheduling_policy="priority", max_batch_size=1)
    with pytest.raises(RequestError, match="must be an integer"):
        core.add_request("r", PROMPTS[0], GREEDY, priority=1.5)  # type: ignore[arg-type]  # bad on purpose
    core.add_request("later", PROMPTS[0], GREEDY, priority=5)
    core.add_request("sooner", PROMPTS[1], GREEDY, priority=-5)
    assert list(drain(core)) == ["sooner", "later"]


def test_more_waiting_requests_than_allowed_are_refused(model: HFCausalLM) -> None:
    core = create_core(model, max_waiting_requests=1)
    core.add_request("a", PROMPTS[0], GREEDY)
    with pytest.raises(QueueFullError, match="max_waiting_requests"):
        core.add_request("b", PROMPTS[1], GREEDY)
    assert set(drain(core)) == {"a"}
