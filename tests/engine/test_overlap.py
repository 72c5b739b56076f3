"""Steps launched before the tokens of the step before them are known: the same tokens, whatever happens meanwhile.

A CPU has nothing to overlap, so the engine is told to all the same: the order of planning, sampling and commits is
that of a GPU.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.batch import RaggedBatch
from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.engine.supervisor import StepSupervisor
from moesaic.models.hf import HFCausalLM
from moesaic.models.loader import load_model
from moesaic.request import SamplingParams, StepOutput
from moesaic.sampling.sampler import Sampler
from moesaic.sched.chunked import ChunkedPrefill
from moesaic.sched.transaction import StepTransaction
from moesaic.structured import StructuredOutput

Events = dict[str, list[StepOutput]]
NUM_BLOCKS = 64


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> HFCausalLM:
    return load_model(tiny_dir)


def create(model: HFCausalLM, *, ahead: bool = True, **settings: Any) -> EngineCore:  # Any: settings of several types
    defaults = {
        "enable_chunked_prefill": True,
        "prefill_chunk_size": 8,
        "max_batch_size": 8,
        "max_tokens_per_step": 32,
        "block_size": 4,
        "num_kv_blocks": NUM_BLOCKS,
    }
    core = EngineCore(model, EngineConfig(**(defaults | settings)))
    assert not core.plans_ahead
    core.plans_ahead = ahead
    return core


def params_of(i: int, *, waits: bool = True) -> SamplingParams:
    """Greedy, random, scored and stopping requests; those whose steps must wait for tokens only if ``waits``."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": i, "top_k": 20, "logprobs": 2},
        {"temperature": 1.2, "seed": i, "stop_token_ids": tuple(range(60))},
        {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 0},
        {"temperature": 0.8, "seed": i, "presence_penalty": 1.0, "repetition_penalty": 1.3},
        {"temperature": 1.0, "seed": i, "stop_token_ids": tuple(range(100))},
    ]
    kinds = kinds if waits else [kind for kind in kinds if not kind.keys() & {"prompt_logprobs", "presence_penalty"}]
    max_tokens = (1, 9, 4, 0 if waits else 3, 14)[i % 5]
    return SamplingParams(
        max_tokens=max_tokens, min_tokens=min(i % 4, max_tokens), ignore_eos=True, **kinds[i % len(kinds)]
    )


def add_all(core: EngineCore, count: int = 24, *, waits: bool = True) -> None:
    rng = random.Random(5)
    for i in range(count):
        core.add_request(
            f"r{i}", [rng.randrange(3, 250) for _ in range(rng.choice([1, 2, 5, 30]))], params_of(i, waits=waits)
        )


def drain(core: EngineCore, events: Events | None = None) -> Events:
    events = {} if events is None else events
    while core.has_pending_requests():
        take(events, core.step())
    return events


def take(events: Events, outputs: list[StepOutput]) -> None:
    for output in outputs:
        assert not any(o.finish_reason for o in events.get(output.request_id, ())), "something after the end"
        events.setdefault(output.request_id, []).append(output)


def answers(events: Events) -> dict[str, tuple[list[int], Any, Any]]:
    return {
        name: ([t for o in outputs for t in o.new_token_ids], outputs[-1].finish_reason, outputs[-1].stop_reason)
        for name, outputs in events.items()
    }


def scores(events: Events) -> list[tuple[str, Any, Any]]:
    """Return all log probabilities, rounded: other rows run beside a row, so sums round otherwise."""
    entries = [
        (name, e.token_id, round(e.logprob, 4))
        for name, outputs in events.items()
        for o in outputs
        for e in (*(o.logprobs or ()), *(o.prompt_logprobs or ()))
        if e is not None
    ]
    return sorted(entries)


def is_clean(core: EngineCore) -> bool:
    return core.scheduler.kv.pool.num_free == NUM_BLOCKS and not core.scheduler.in_flight


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("swap_bytes", [0, 1 << 20])
def test_tokens_and_scores_are_those_of_steps_one_by_one(model: HFCausalLM, chunked: bool, swap_bytes: int) -> None:
    settings = {"enable_chunked_prefill": chunked, "swap_space_bytes": swap_bytes}
    plain, core = create(model, ahead=False, **settings), create(model, **settings)
    for each in (plain, core):
        add_all(each)
    expected, got = drain(plain), drain(core)
    assert answers(got) == answers(expected)
    assert scores(got) == scores(expected)
    assert is_clean(core)


def test_a_small_pool_preempts_and_loses_nothing(model: HFCausalLM) -> None:
    settings = {"num_kv_blocks": 14, "max_batch_size": 6}
    plain, core = create(model, ahead=False, **settings), create(model, **settings)
    for each in (plain, core):
        add_all(each)
    assert answers(drain(core)) == answers(drain(plain))
    assert core.stats()["num_preemptions"] > 0
    assert core.scheduler.kv.pool.num_free == 14


def test_most_steps_are_launched_ahead(model: HFCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    carried: list[bool] = []
    original = EngineCore._launch

    def watch(self: EngineCore, tokens: Any = None) -> Any:
        carried.append(tokens is not None)
        return original(self, tokens)

    monkeypatch.setattr(EngineCore, "_launch", watch)
    core = create(model)
    core.add_request("a", [1, 2, 3], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    drain(core)
    assert carried == [False, *[True] * 20]


@pytest.mark.parametrize("verb", ["abort_request", "pause_request"])
@pytest.mark.parametrize("at", range(8))
def test_a_request_that_leaves_at_any_step_changes_no_other(model: HFCausalLM, verb: str, at: int) -> None:
    plain, core = create(model, ahead=False), create(model)
    for each in (plain, core):
        add_all(each, 12)
    expected, events = answers(drain(plain)), {}
    for _ in range(at):
        take(events, core.step())
    for name in ("r1", "r4"):
        getattr(core, verb)(name)
    for _ in range(3):
        take(events, core.step())
    core.resume_request("r1")
    core.resume_request("r4")
    got = answers(drain(core, events))
    leaving = {"r1", "r4"} if verb == "abort_request" else set()
    assert {n: a for n, a in got.items() if n not in leaving} == {n: a for n, a in expected.items() if n not in leaving}
    for name in leaving & got.keys():
        tokens, reason, _ = got[name]
        assert tokens == expected[name][0][: len(tokens)]
        assert reason == "abort" or tokens == expected[name][0]
    assert is_clean(core)


def test_aborting_the_last_request_ends_its_step_at_once(model: HFCausalLM) -> None:
    core = create(model)
    core.add_request("a", [1, 2, 3], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    core.step()
    assert core.scheduler.in_flight
    core.abort_request("a")
    assert is_clean(core)
    assert [o.finish_reason for o in core.step()] == ["abort"]
    assert not core.has_pending_requests()


def test_grammars_rule_rows_beside_free_ones(model: HFCausalLM, tiny_dir: Path) -> None:
    def run(overlap: bool) -> Events:
        core = EngineCore.from_path(tiny_dir, EngineConfig(num_kv_blocks=NUM_BLOCKS, block_size=4))
        core.plans_ahead = overlap
        ruled = StructuredOutput(kind="regex", text="[ab]{3}c")
        core.add_request("ruled", [5, 6], SamplingParams(max_tokens=12, seed=1, structured_output=ruled))
        core.add_request("free", [7, 8], SamplingParams(max_tokens=20, seed=2, ignore_eos=True))
        return drain(core)

    assert answers(run(True)) == answers(run(False))


PHASES: dict[str, tuple[Any, str]] = {  # Any: classes
    "plan": (ChunkedPrefill, "propose"),
    "lease": (StepTransaction, "lease"),
    "batch": (RaggedBatch, "build"),
    "head": (HFCausalLM, "head"),
    "sampling": (Sampler, "begin"),
    "advance": (StepTransaction, "advance"),
    "keep": (StepTransaction, "keep_leases"),
}


def plant(patch: pytest.MonkeyPatch, phase: str, fails: list[bool]) -> None:
    """Let the calls of a phase do their work and then fail, as ``fails`` says."""
    owner, name = PHASES[phase]
    original = getattr(owner, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if fails and fails.pop(0):
            raise OSError("planted fault")
        return result

    patch.setattr(owner, name, faulty)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("seed", range(2))
def test_a_fault_in_any_phase_loses_nothing(
    model: HFCausalLM, monkeypatch: pytest.MonkeyPatch, phase: str, seed: int
) -> None:
    """Faults at random calls: what fails is undone and done again, and a step launched behind it with it."""
    plain, core = create(model, ahead=False), create(model)
    for each in (plain, core):
        add_all(each, 12, waits=False)
    expected, events, rng = answers(drain(plain)), {}, random.Random(seed)
    fails = [rng.random() < 0.5 for _ in range(10)]
    with monkeypatch.context() as patch:
        plant(patch, phase, fails)
        while core.has_pending_requests():
            try:
                take(events, core.step())
            except OSError:
                failed = core.take_failed_step()
                assert failed is None or core.scheduler.was_rolled_back(failed.step_id)
    assert len(fails) < 7, "hardly a fault was met"
    assert answers(events) == expected
    assert is_clean(core)


def test_broken_logits_end_the_row_and_undo_the_step_behind(model: HFCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, core = create(model, ahead=False), create(model)
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    for each in (plain, core):
        for i in range(3):
            each.add_request(f"r{i}", [10 + i, 20 + i], params)
    expected = answers(drain(plain))
    supervisor, events = StepSupervisor(core), Events()
    original, num_calls = HFCausalLM.head, [0]

    def breaks_once(self: HFCausalLM, hidden: torch.Tensor) -> torch.Tensor:
        logits, num_calls[0] = original(self, hidden), num_calls[0] + 1
        if num_calls[0] == 4:
            logits[1] = torch.nan
        return logits

    monkeypatch.setattr(HFCausalLM, "head", breaks_once)
    while core.has_pending_requests():
        take(events, supervisor.step())
    got = answers(events)
    assert got["r1"][1] == "error"
    assert got["r1"][0] == expected["r1"][0][:3]
    assert (got["r0"], got["r2"]) == (expected["r0"], expected["r2"])
    assert supervisor.stats()["num_failed_steps"] == 1
    assert is_clean(core)


def test_an_interrupt_leaves_no_step_behind(model: HFCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = create(model)
    core.add_request("a", [1, 2, 3], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
    core.step()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            core.step()
    assert not core.scheduler.in_flight
    assert len(answers(drain(core))["a"][0]) == 4


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"overlap": False}, "switched off"), ({}, "on cpu has ended"), ({"batch_invariant": True}, "one by one")],
)
def test_the_feature_says_whether_it_is_active(model: HFCausalLM, settings: dict[str, bool], reason: str) -> None:
    feature = create(model, ahead=False, **settings).features()["overlap"]
    assert feature["requested"] == settings.get("overlap", True)
    assert reason in feature["reason"]
