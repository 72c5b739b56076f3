"""A request that is over leaves nothing behind: no table of the engine is larger than before it came."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.engine.supervisor import StepSupervisor
from moesaic.models.hf import HFCausalLM
from moesaic.models.loader import load_model
from moesaic.request import SamplingParams
from moesaic.testing.scheduling import ManualClock
from moesaic.testing.tables import table_sizes


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> HFCausalLM:
    return load_model(tiny_dir)


def create(model: HFCausalLM) -> StepSupervisor:
    """Return an engine with too little memory for its load, so that some are swapped and some computed again."""
    config = EngineConfig(
        enable_chunked_prefill=True,
        prefill_chunk_size=8,
        max_batch_size=8,
        max_tokens_per_step=32,
        block_size=4,
        num_kv_blocks=12,
        swap_space_bytes=20_000,
    )
    return StepSupervisor(EngineCore(model, config, clock=ManualClock()))


def sizes(supervisor: StepSupervisor, core: EngineCore) -> dict[str, int]:
    return table_sizes(supervisor, without=[core.model])


def serve(supervisor: StepSupervisor, core: EngineCore, num_requests: int, end: Callable[[str], Any]) -> None:
    """Let requests with every kind of side table come, a few in each step, and ``end`` each after 0 to 14 steps."""
    num_added, ends = 0, list[tuple[int, str]]()
    finished = set[str]()
    for step in range(1000):
        while num_added < num_requests and len(core.scheduler.sequences) < 12:
            name, prompt = f"r{num_added}", [(7 * num_added + i) % 250 for i in range(1 + 5 * (num_added % 7))]
            params = SamplingParams(max_tokens=12, logprobs=2, prompt_logprobs=1, seed=num_added, ignore_eos=True)
            core.add_request(name, prompt, params, timeout_s=1000.0)
            ends.append((step + num_added % 15, name))
            num_added += 1
        for due, name in ends:
            if due == step:
                end(name)
        finished |= {o.request_id for o in supervisor.step() if o.finish_reason is not None}
        if len(finished) == num_requests:
            return
    raise AssertionError(f"{num_requests - len(finished)} requests did not end")


@pytest.mark.parametrize(("how", "num_requests"), [("abort", 200), ("fail", 200), ("to the end", 40)])
def test_requests_with_logprobs_that_are_over_leave_no_side_table(
    model: HFCausalLM, how: str, num_requests: int
) -> None:
    supervisor = create(model)
    core = supervisor._core
    serve(supervisor, core, 1, lambda name: None)  # from now on newcomers have their place in the rotation
    before = sizes(supervisor, core)
    ends: dict[str, Callable[[str], Any]] = {
        "abort": core.abort_request,
        "fail": lambda name: core.fail_request(name, "told to"),
        "to the end": lambda name: None,
    }
    serve(supervisor, core, num_requests, ends[how])
    supervisor.step()  # what an end leaves to the next step
    assert sizes(supervisor, core) == before
    assert core.stats()["num_preemptions"] > 0


def test_what_a_request_keeps_while_it_runs_is_seen(model: HFCausalLM) -> None:
    """The measure must be able to fail: scores, deadline, sequence, block table and place in a queue are all seen."""
    supervisor = create(model)
    core = supervisor._core
    before = sizes(supervisor, core)
    core.add_request("r", list(range(20)), SamplingParams(max_tokens=2, prompt_logprobs=1), timeout_s=1.0)
    supervisor.step()
    after = sizes(supervisor, core)
    grown = {name.rsplit(".", 1)[-1] for name, size in after.items() if size > before.get(name, 0)}
    assert {"_scored", "_by_request", "_order", "_sequences", "_tables", "lanes", "wait_steps"} <= grown
