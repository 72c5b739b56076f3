"""A failed step ends the requests that were in it and no other; too many in a row end the engine."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.batch import RaggedBatch
from moesaic.config import EngineConfig
from moesaic.engine.chunk_budget import RECOVERY_STEPS, ChunkBudget
from moesaic.engine.core import EngineCore
from moesaic.engine.prompt_logprobs import PromptLogprobs
from moesaic.engine.supervisor import StepSupervisor
from moesaic.errors import ConfigError, EngineDeadError, SamplingError
from moesaic.experts.resident import ResidentExperts
from moesaic.kv.table import PagedKVCache
from moesaic.models.hf import HFCausalLM
from moesaic.models.loader import load_model
from moesaic.request import SamplingParams, StepOutput
from moesaic.sampling.sampler import Sampler
from moesaic.sched.chunked import ChunkedPrefill
from moesaic.sched.transaction import StepTransaction

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
LONG = list(range(40, 90))
NUM_BLOCKS = 64
PROMPTS = {"a": [1, 2, 3], "b": [4, 5], "long": LONG, "late": [9, 9]}

# Where a step can fail once its rows are known, in the order of the step.
PHASES: dict[str, tuple[Any, str]] = {  # Any: classes
    "batch": (RaggedBatch, "build"),
    "forward": (ResidentExperts, "forward"),
    "head": (HFCausalLM, "head"),
    "sampling": (Sampler, "begin"),
    "commit": (StepTransaction, "keep_leases"),
    "after the commit": (PromptLogprobs, "attach"),
}
UNPLANNED: dict[str, tuple[Any, str]] = {"plan": (ChunkedPrefill, "propose"), "lease": (StepTransaction, "lease")}

Events = dict[str, list[StepOutput]]


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> HFCausalLM:
    return load_model(tiny_dir)


def create(model: HFCausalLM, **settings: Any) -> tuple[EngineCore, StepSupervisor]:  # Any: settings of several types
    defaults = {
        "enable_chunked_prefill": True,
        "prefill_chunk_size": 8,
        "max_batch_size": 8,
        "max_tokens_per_step": 32,
        "block_size": 4,
        "num_kv_blocks": NUM_BLOCKS,
    }
    core = EngineCore(model, EngineConfig(**(defaults | settings)))
    return core, StepSupervisor(core)


def note(events: Events, outputs: list[StepOutput]) -> None:
    for output in outputs:
        events.setdefault(output.request_id, []).append(output)


def drain(core: EngineCore, supervisor: StepSupervisor, events: Events | None = None) -> Events:
    """Step until nothing is left, and check that nothing leaked and everybody was told once."""
    events = {} if events is None else events
    for _ in range(1000):
        if not core.has_pending_requests():
            break
        note(events, supervisor.step())
    core.scheduler.check()
    assert core.stats()["kv_blocks_free"] == NUM_BLOCKS
    for outputs in events.values():
        assert [o.finish_reason is not None for o in outputs] == [False] * (len(outputs) - 1) + [True]
    return events


def tokens(events: Events) -> dict[str, list[int]]:
    return {key: [t for o in outputs for t in o.new_token_ids] for key, outputs in events.items()}


def failed(events: Events) -> set[str]:
    return {key for key, outputs in events.items() if outputs[-1].finish_reason == "error"}


def raising(original: Callable[..., Any], faults: Iterator[Exception | None]) -> Callable[..., Any]:
    """Return ``original`` that works and then raises the next of ``faults``, as long as there are any."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)  # the work is done, then lost: the worst moment
        if (fault := next(faults, None)) is not None:
            raise fault
        return result

    return call


def plant(patch: pytest.MonkeyPatch, place: tuple[Any, str], *faults: Exception | None) -> None:
    owner, name = place
    patch.setattr(owner, name, raising(getattr(owner, name), iter(faults)))


def out_of_memory(num: int = 1) -> list[torch.OutOfMemoryError]:
    return [torch.OutOfMemoryError("CUDA out of memory") for _ in range(num)]


def add(core: EngineCore, *request_ids: str) -> None:
    for request_id in request_ids:
        core.add_request(request_id, PROMPTS[request_id], GREEDY)


def start_mixed(core: EngineCore, supervisor: StepSupervisor) -> Events:
    """Two requests decode, one is half prefilled, one was just added."""
    events: Events = {}
    add(core, "a", "b")
    note(events, supervisor.step())
    add(core, "long")
    note(events, supervisor.step())
    add(core, "late")
    return events


@pytest.fixture(scope="module")
def expected(model: HFCausalLM) -> dict[str, list[int]]:
    """The tokens of an undisturbed run."""
    core, supervisor = create(model)
    return tokens(drain(core, supervisor, start_mixed(core, supervisor)))


def chosen(values: dict[str, list[int]], *request_ids: str) -> dict[str, list[int]]:
    return {request_id: values[request_id] for request_id in request_ids}


@pytest.mark.parametrize("num_steps_before", [0, 2])
@pytest.mark.parametrize("phase", list(PHASES))
def test_a_fault_ends_the_rows_of_its_step_and_the_waiting_go_on(
    model: HFCausalLM,
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    num_steps_before: int,
) -> None:
    core, supervisor = create(model, max_batch_size=2)
    add(core, *PROMPTS)
    events: Events = {}
    for _ in range(num_steps_before):
        note(events, supervisor.step())
    with monkeypatch.context() as patch:
        plant(patch, PHASES[phase], OSError("secret of the machine"))
        note(events, supervisor.step())
    assert failed(events) == {"a", "b"}
    drain(core, supervisor, events)
    assert failed(events) == {"a", "b"}
    assert chosen(tokens(events), "long", "late") == chosen(expected, "long", "late")
    assert tokens(events)["a"] == expected["a"][:num_steps_before]
    error = events["a"][-1].error or ""
    assert "OSError" in error
    assert "secret" not in error
    stats = supervisor.stats()
    assert (stats["num_failed_steps"], stats["num_failed_requests"], stats["last_error"]) == (1, 2, "OSError")
    assert stats["is_healthy"]


@pytest.mark.parametrize("phase", list(UNPLANNED))
def test_a_fault_before_there_are_rows_blames_nobody_and_the_step_is_tried_again(
    model: HFCausalLM, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    core, supervisor = create(model)
    events = start_mixed(core, supervisor)
    with monkeypatch.context() as patch:
        plant(patch, UNPLANNED[phase], OSError("fault"))
        assert supervisor.step() == []
    assert tokens(drain(core, supervisor, events)) == expected
    assert failed(events) == set()
    assert supervisor.stats()["num_failed_steps"] == 1


def test_a_request_that_its_failed_step_had_finished_is_told_all_the_same(
    model: HFCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, supervisor = create(model)
    core.add_request("one", [1, 2], SamplingParams(max_tokens=1))
    with monkeypatch.context() as patch:
        plant(patch, PHASES["after the commit"], OSError("fault"))
        events = drain(core, supervisor)
    assert failed(events) == {"one"}


def test_memory_that_runs_out_after_the_commit_ends_the_rows_whose_tokens_are_lost(
    model: HFCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, supervisor = create(model)
    add(core, "a", "b")
    with monkeypatch.context() as patch:
        plant(patch, PHASES["after the commit"], *out_of_memory())
        assert failed(drain(core, supervisor)) == {"a", "b"}
    assert supervisor.stats()["num_out_of_memory_steps"] == 1


def test_an_event_that_was_untold_when_a_step_failed_is_told_once(
    model: HFCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, supervisor = create(model)
    events = start_mixed(core, supervisor)
    core.abort_request("b")
    with monkeypatch.context() as patch:
        plant(patch, PHASES["head"], OSError("fault"))
        drain(core, supervisor, events)
    assert {k: v[-1].finish_reason for k, v in events.items()} == dict.fromkeys(PROMPTS, "error") | {"b": "abort"}


def broken_head(original: Callable[..., torch.Tensor], rows: Iterator[int | None]) -> Callable[..., torch.Tensor]:
    """Return a head that breaks one row, once for each of ``rows``."""

    def head(self: HFCausalLM, hidden: torch.Tensor) -> torch.Tensor:
        logits = original(self, hidden)
        if (row := next(rows, None)) is not None:
            logits[row] = torch.nan
        return logits

    return head


def test_broken_logits_end_the_request_they_belong_to_and_its_neighbours_get_the_same_tokens(
    model: HFCausalLM, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, supervisor = create(model)
    events = start_mixed(core, supervisor)
    monkeypatch.setattr(HFCausalLM, "head", broken_head(HFCausalLM.head, iter([1])))
    note(events, supervisor.step())
    assert failed(events) == {"b"}
    assert "NaN" in (events["b"][-1].error or "")
    drain(core, supervisor, events)
    assert failed(events) == {"b"}
    assert tokens(events) == expected | {"b": expected["b"][:2]}


def test_broken_prompt_logits_end_the_request_that_asked_for_them(
    model: HFCausalLM, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that this error names are positions of a prompt: taken for sampling rows they would blame others."""
    core, supervisor = create(model)
    add(core, "a", "b")
    events: Events = {}
    note(events, supervisor.step())
    core.add_request("scored", LONG, SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0))
    monkeypatch.setattr(HFCausalLM, "head", broken_head(HFCausalLM.head, iter([2])))  # rows 0 and 1 are a and b
    drain(core, supervisor, events)
    assert failed(events) == {"scored"}
    assert chosen(tokens(events), "a", "b") == chosen(expected, "a", "b")


@pytest.mark.parametrize("together", [False, True])
def test_a_model_that_gives_only_broken_logits_ends_the_engine_however_long_its_prompts_are(
    model: HFCausalLM, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """Steps that compute prompts alone succeed in between, and those that sample have rows beside them that do not."""
    core, supervisor = create(model, max_consecutive_failed_steps=3)
    head = HFCausalLM.head
    monkeypatch.setattr(HFCausalLM, "head", lambda model, hidden: head(model, hidden) * torch.nan)
    events: Events = {}
    for i in range(9):
        core.add_request(str(i), LONG[: 20 + 3 * i], GREEDY)
        if not together:
            drain(core, supervisor, events)
        if not supervisor.is_healthy:
            break
    if together:
        drain(core, supervisor, events)
    assert not supervisor.is_healthy
    assert 3 <= supervisor.stats()["num_failed_steps"] <= 4


def test_clients_whose_own_parameters_leave_no_token_cannot_stop_the_engine(model: HFCausalLM) -> None:
    core, supervisor = create(model)
    nothing = SamplingParams(min_tokens=1, stop_token_ids=list(range(260)))
    for i in range(5):
        core.add_request(str(i), [1, 2, 3], nothing)
        events = drain(core, supervisor)
        assert "own parameters" in (events[str(i)][-1].error or "")
    assert supervisor.stats()["num_failed_steps"] == 5
    assert supervisor.is_healthy


def test_unusable_logits_that_name_no_row_end_the_whole_step(
    model: HFCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, supervisor = create(model)
    add(core, "a", "b")
    plant(monkeypatch, PHASES["sampling"], SamplingError("no row", rows=()))
    assert failed(drain(core, supervisor)) == {"a", "b"}


@pytest.mark.parametrize("phase", ["head", "plan"])
def test_too_many_failed_steps_in_a_row_end_the_engine_and_everybody_is_told_once(
    model: HFCausalLM, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    core, supervisor = create(model, max_batch_size=1)
    cause = OSError("device lost")
    for i in range(5):
        core.add_request(str(i), [1, 2, 3], GREEDY)
    events: Events = {}
    plant(monkeypatch, (PHASES | UNPLANNED)[phase], OSError("first"), OSError("second"), cause)
    for _ in range(2):
        note(events, supervisor.step())
    assert supervisor.is_healthy
    note(events, supervisor.step())
    assert not supervisor.is_healthy
    assert not core.has_pending_requests()
    assert failed(drain(core, supervisor, events)) == set("01234")
    for refused in (lambda: core.add_request("new", [1], GREEDY), core.step, supervisor.step):
        with pytest.raises(EngineDeadError, match="device lost") as caught:
            refused()
        assert caught.value.__cause__ is cause
    stats = supervisor.stats()
    assert (stats["is_healthy"], stats["num_failed_steps"], stats["num_failed_requests"]) == (False, 3, 5)


def test_a_step_that_succeeds_resets_the_count_and_one_without_rows_does_not(
    model: HFCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, supervisor = create(model, max_consecutive_failed_steps=2)
    plant(monkeypatch, PHASES["head"], OSError("1"), None, OSError("2"), OSError("3"))
    add(core, "a")
    drain(core, supervisor)
    core.add_request("b", PROMPTS["b"], SamplingParams(max_tokens=1))
    drain(core, supervisor)
    core.add_request("b", PROMPTS["b"], GREEDY)
    drain(core, supervisor)
    assert supervisor.is_healthy
    core.add_request("left", [1], GREEDY)
    core.abort_request("left")
    drain(core, supervisor)  # tells of the abort, computes nothing
    core.add_request("b", PROMPTS["b"], GREEDY)
    drain(core, supervisor)
    assert not supervisor.is_healthy


def test_a_rollback_that_fails_ends_the_engine_at_once(model: HFCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core, supervisor = create(model)
    events = start_mixed(core, supervisor)
    with monkeypatch.context() as patch:
        plant(patch, PHASES["head"], OSError("fault"))
        plant(patch, (PagedKVCache, "rollback_sequence_reservation"), OSError("worse"))
        note(events, supervisor.step())
    assert not supervisor.is_healthy
    assert failed(events) == set(PROMPTS)


def test_an_interrupt_goes_through_and_changes_nothing(
    model: HFCausalLM, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, supervisor = create(model)
    events = start_mixed(core, supervisor)

    def interrupt(self: HFCausalLM, hidden: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HFCausalLM, "head", interrupt)
        with pytest.raises(KeyboardInterrupt):
            supervisor.step()
    assert tokens(drain(core, supervisor, events)) == expected
    assert supervisor.stats()["num_failed_steps"] == 0


def test_a_failure_is_logged_once_with_its_traceback_and_no_prompt(
    model: HFCausalLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core, supervisor = create(model)
    core.add_request("a", [101, 102, 103], GREEDY)
    plant(monkeypatch, PHASES["head"], OSError("fault"))
    with caplog.at_level("INFO"):
        drain(core, supervisor)
    (record,) = caplog.records
    assert record.getMessage() == "step failed: rows=1 tokens=3 failed_requests=1 chunk_budget_tokens=32"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], OSError)
    assert "101" not in caplog.text


# Memory


def test_out_of_memory_halves_the_chunk_budget_and_fails_nobody(
    model: HFCausalLM, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, supervisor = create(model, prefill_chunk_size=16)
    events = start_mixed(core, supervisor)
    with monkeypatch.context() as patch:
        plant(patch, PHASES["head"], *out_of_memory())
        assert supervisor.step() == []
        # The failed step had 16 tokens of "long" and 2 of "late".
        assert supervisor.stats()["chunk_budget_tokens"] == 9
        num_prompt_tokens = core.stats()["num_prompt_tokens"]
        note(events, supervisor.step())
    assert core.stats()["num_prompt_tokens"] - num_prompt_tokens == 9
    assert tokens(drain(core, supervisor, events)) == expected
    stats = supervisor.stats()
    assert (stats["num_out_of_memory_steps"], stats["num_failed_requests"]) == (1, 0)
    assert stats["last_error"] == "OutOfMemoryError"


def test_the_chunk_budget_comes_back_after_steps_that_succeed(
    model: HFCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, supervisor = create(model)
    core.add_request("r", [1, 2], SamplingParams(max_tokens=3 * RECOVERY_STEPS, temperature=0.0, ignore_eos=True))
    plant(monkeypatch, PHASES["head"], None, *out_of_memory(2))
    budgets = []
    while core.has_pending_requests():
        supervisor.step()
        budgets.append(supervisor.stats()["chunk_budget_tokens"])
    assert list(dict.fromkeys(budgets)) == [32, 16, 8]
    assert [budgets.count(b) for b in (16, 8)] == [1 + RECOVERY_STEPS, RECOVERY_STEPS]
    assert budgets[-1] == 32
    assert core.scheduler.max_tokens_per_step == 32


def test_out_of_memory_in_the_smallest_step_ends_the_later_half_of_its_rows(
    model: HFCausalLM, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, supervisor = create(model)
    events = start_mixed(core, supervisor)
    with monkeypatch.context() as patch:
        plant(patch, PHASES["head"], *out_of_memory(3))
        for _ in range(3):  # 10 prompt tokens, then 5, then a block of 4
            note(events, supervisor.step())
    assert failed(events) == {"long", "late"}
    assert "memory" in (events["late"][-1].error or "")
    drain(core, supervisor, events)
    assert chosen(tokens(events), "a", "b") == chosen(expected, "a", "b")


def test_memory_that_stays_short_ends_the_only_request_after_the_budget_is_at_its_floor(
    model: HFCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, supervisor = create(model)
    add(core, "long")
    plant(monkeypatch, (RaggedBatch, "build"), *out_of_memory(50))
    assert failed(drain(core, supervisor)) == {"long"}
    stats = supervisor.stats()
    # The chunk of 8, one of 4 tokens (the floor, a block), and then it fails.
    assert (stats["chunk_budget_tokens"], stats["num_out_of_memory_steps"]) == (4, 2)
    assert stats["is_healthy"]


def test_a_whole_prompt_that_does_not_fit_alone_fails_at_once(
    model: HFCausalLM, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside others it has its own step first: the halved budget sees to that."""
    core, supervisor = create(model, enable_chunked_prefill=False, max_tokens_per_step=64)
    add(core, "a", "b")
    events: Events = {}
    note(events, supervisor.step())
    add(core, "long")
    plant(monkeypatch, (RaggedBatch, "build"), *out_of_memory(2))
    assert supervisor.step() == []
    note(events, supervisor.step())
    assert failed(events) == {"long"}
    drain(core, supervisor, events)
    assert chosen(tokens(events), "a", "b") == chosen(expected, "a", "b")
    assert supervisor.stats()["num_failed_requests"] == 1


def test_the_floor_leaves_every_lane_its_turn() -> None:
    config = EngineConfig(block_size=1, max_partial_prefills=40, prefill_starvation_threshold_steps=3, max_batch_size=8)
    budget = ChunkBudget(config)
    while budget.shrink(0):
        pass
    assert budget.floor_tokens == budget.tokens == 11  # 41 members in turns of 11 wait at most 3 steps
    assert budget.step_limit(8) == 19
    assert budget.step_limit(5000) == config.max_tokens_per_step


def test_at_least_one_failed_step_is_allowed_for() -> None:
    with pytest.raises(ConfigError, match="max_consecutive_failed_steps is 0"):
        EngineConfig(max_consecutive_failed_steps=0)
