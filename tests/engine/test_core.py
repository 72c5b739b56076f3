"""The engine loop on the built-in tiny model: faults, bad input, log probabilities, statistics."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.errors import (
    ConfigError,
    DuplicateRequestError,
    RequestError,
    RequestTooLargeError,
    SamplingError,
)
from moesaic.models.hf import HFCausalLM
from moesaic.models.loader import load_model
from moesaic.request import SamplingParams, StepOutput

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
LONG = list(range(40, 90))


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> HFCausalLM:
    return load_model(tiny_dir)


def create_core(model: HFCausalLM, **settings: Any) -> EngineCore:  # Any: settings of several types
    defaults = {
        "enable_chunked_prefill": True,
        "prefill_chunk_size": 8,
        "max_batch_size": 8,
        "max_tokens_per_step": 32,
        "block_size": 4,
        "num_kv_blocks": 64,
    }
    return EngineCore(model, EngineConfig(**(defaults | settings)))


def drain(core: EngineCore) -> dict[str, list[StepOutput]]:
    outputs: dict[str, list[StepOutput]] = {}
    while core.has_pending_requests():
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs: list[StepOutput]) -> list[int]:
    return [t for o in outputs for t in o.new_token_ids]


def scored_ids(output: StepOutput) -> list[int]:
    return [entry.token_id for entry in output.prompt_logprobs or () if entry is not None]


def start_mixed(core: EngineCore) -> None:
    """Two requests decode, one is half prefilled, one waits."""
    core.add_request("a", [1, 2, 3], GREEDY)
    core.add_request("b", [4, 5], GREEDY)
    core.step()
    core.add_request("long", LONG, GREEDY)
    core.step()
    core.add_request("late", [9, 9], GREEDY)


def plant(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:  # Any: classes and modules
    def apply(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)

        def fail(*args: Any, **kwargs: Any) -> Any:
            original(*args, **kwargs)  # the work is done, then lost: the worst moment
            raise OSError("planted fault")

        patch.setattr(owner, name, fail)

    return apply


def phases() -> dict[str, Callable[[pytest.MonkeyPatch], None]]:
    from moesaic.batch import RaggedBatch
    from moesaic.experts.resident import ResidentExperts
    from moesaic.kv.store import LayeredPagedKVStore
    from moesaic.sampling.sampler import Sampler
    from moesaic.sched.chunked import ChunkedPrefill
    from moesaic.sched.transaction import StepTransaction

    return {
        "plan": plant(ChunkedPrefill, "propose"),
        "lease": plant(StepTransaction, "lease"),
        "batch": plant(RaggedBatch, "build"),
        "kv write": plant(LayeredPagedKVStore, "write"),
        "experts": plant(ResidentExperts, "forward"),
        "head": plant(HFCausalLM, "head"),
        "sampling": plant(Sampler, "begin"),
        "commit": plant(StepTransaction, "keep_leases"),
    }


@pytest.mark.parametrize("phase", list(phases()))
def test_a_fault_in_any_phase_changes_nothing_and_the_next_step_works(
    model: HFCausalLM, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    undisturbed, core = create_core(model), create_core(model)
    for c in (undisturbed, core):
        start_mixed(c)
    expected = drain(undisturbed)
    got: dict[str, list[StepOutput]] = {}
    num_faults = 0
    while core.has_pending_requests():
        before = core.scheduler.fingerprint()
        with monkeypatch.context() as patch:
            phases()[phase](patch)
            outputs = []
            try:
                outputs = core.step()
            except OSError:
                num_faults += 1
                assert core.scheduler.fingerprint() == before
        for output in [*outputs, *core.step()]:
            got.setdefault(output.request_id, []).append(output)
    assert {k: tokens(v) for k, v in got.items()} == {k: tokens(v) for k, v in expected.items()}
    assert num_faults > 0


def test_progress_only_steps_are_empty_and_move_the_prompt(model: HFCausalLM) -> None:
    core = create_core(model)
    core.add_request("long", LONG, GREEDY)
    assert core.step() == []
    sequence = core.scheduler.get("long")
    assert sequence is not None
    assert sequence.committed_kv_tokens == 8
    assert core.stats()["num_progress_only_steps"] == 1


def test_who_asks_is_told_how_far_the_prompt_is(model: HFCausalLM) -> None:
    core = create_core(model)
    core.add_request("asks", LONG, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, prompt_progress=True))
    core.add_request("silent", LONG, GREEDY)
    outputs = drain(core)
    told = [o.num_computed_prompt_tokens for o in outputs["asks"] if o.num_computed_prompt_tokens is not None]
    assert told == list(range(8, len(LONG), 8))
    assert [len(o.new_token_ids) for o in outputs["asks"]] == [0] * len(told) + [1, 1]
    assert all(o.num_computed_prompt_tokens is None for o in outputs["silent"])


def test_head_runs_for_sampling_rows_only(model: HFCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = create_core(model)
    seen: list[int] = []
    head = HFCausalLM.head

    def watch(self: HFCausalLM, hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return head(self, hidden)

    monkeypatch.setattr(HFCausalLM, "head", watch)
    start_mixed(core)
    core.step()
    assert seen == [2, 2, 3]


@pytest.mark.parametrize("chunked", [False, True])
def test_prompt_logprobs_equal_one_plain_forward_across_chunks(model: HFCausalLM, chunked: bool) -> None:
    from transformers import AutoModelForCausalLM

    path = model.hf_model.config._name_or_path
    oracle = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", experts_implementation="eager")
    logprobs = torch.log_softmax(oracle(torch.tensor([LONG])).logits[0].float(), -1)
    core = create_core(model, enable_chunked_prefill=chunked, max_tokens_per_step=64)
    core.add_request("other", [1, 2, 3], GREEDY)
    core.add_request("r", LONG, SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=2))
    outputs = drain(core)["r"]
    first, rest = outputs[0], outputs[1:]
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert all(o.prompt_logprobs is None for o in rest)
    for position, entry in enumerate(first.prompt_logprobs[1:], 1):
        assert entry is not None
        assert entry.token_id == LONG[position]
        assert entry.logprob == pytest.approx(logprobs[position - 1, LONG[position]].item(), abs=1e-4)
        assert entry.top[0][1] == pytest.approx(logprobs[position - 1].max().item(), abs=1e-4)
    assert len(first.prompt_logprobs) == len(LONG)


def test_prompt_logprobs_survive_preemption(model: HFCausalLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    results = []
    for num_blocks in (64, 13):
        core = create_core(model, num_kv_blocks=num_blocks)
        for i in range(3):
            core.add_request(f"r{i}", LONG[i : i + 12], params)
        outputs = drain(core)
        results.append(
            {k: (tokens(v), [e and e.token_id for e in v[0].prompt_logprobs or ()]) for k, v in outputs.items()}
        )
    assert core.stats()["num_preemptions"] > 0
    assert results[0] == results[1]


def test_seeded_sampling_does_not_depend_on_the_batch(model: HFCausalLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.5, seed=7, ignore_eos=True)
    alone, together = create_core(model), create_core(model, prefill_chunk_size=3)
    alone.add_request("r", LONG, params)
    for i in range(5):
        together.add_request(f"x{i}", LONG[i:], SamplingParams(max_tokens=9, temperature=2.0, ignore_eos=True))
    together.add_request("r", LONG, params)
    assert tokens(drain(alone)["r"]) == tokens(drain(together)["r"])


def test_requests_without_a_seed_differ(model: HFCausalLM) -> None:
    core = create_core(model)
    for i in range(2):
        core.add_request(f"r{i}", LONG, SamplingParams(max_tokens=12, temperature=3.0, ignore_eos=True))
    outputs = drain(core)
    assert tokens(outputs["r0"]) != tokens(outputs["r1"])


def test_abort_yields_one_terminal_event_and_frees_everything(model: HFCausalLM) -> None:
    core = create_core(model)
    start_mixed(core)
    for request_id in ("a", "long", "late"):
        assert core.abort_request(request_id)
    assert not core.abort_request("a")
    outputs = drain(core)
    for request_id in ("a", "long", "late"):
        assert [(o.new_token_ids, o.finish_reason) for o in outputs[request_id]] == [((), "abort")]
    assert outputs["b"][-1].finish_reason == "length"
    assert core.stats()["kv_blocks_free"] == 64


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], RequestError, "0 tokens"),
        ([1, 260], RequestError, "token id 260; this model has ids from 0 to 259"),
        ([-1], RequestError, "token id -1"),
        ([1.5], RequestError, "token id 1.5"),
        ([True], RequestError, "token id True"),
        ("text", RequestError, "prompt is text"),
        ([1] * 300, RequestTooLargeError, "300 tokens"),
        ([1] * 9000, RequestTooLargeError, "context holds 8192"),
    ],
)
def test_bad_prompts_are_refused_and_leave_others_alone(
    model: HFCausalLM, prompt: Any, error: type[Exception], message: str
) -> None:
    core = create_core(model)
    start_mixed(core)
    before = core.scheduler.fingerprint()
    with pytest.raises(error, match=message):
        core.add_request("bad", prompt, GREEDY)
    assert core.scheduler.fingerprint() == before
    assert len(drain(core)) == 4


def test_bad_ids_and_parameters_are_refused(model: HFCausalLM) -> None:
    core = create_core(model)
    core.add_request("r", [1], GREEDY)
    with pytest.raises(DuplicateRequestError, match="'r' is in use"):
        core.add_request("r", [1], GREEDY)
    with pytest.raises(RequestError, match="non-empty"):
        core.add_request("", [1], GREEDY)
    with pytest.raises(RequestError, match="stop_token_ids has token id 999"):
        core.add_request("s", [1], SamplingParams(stop_token_ids=[999]))
    with pytest.raises(RequestError, match="pass SamplingParams"):
        core.add_request("s", [1], {"max_tokens": 3})  # type: ignore[arg-type]  # bad on purpose


def test_impossible_settings_for_this_model_are_refused(model: HFCausalLM) -> None:
    with pytest.raises(ConfigError, match="max_model_len is 9000 but the model was made for 8192"):
        create_core(model, max_model_len=9000)
    with pytest.raises(ConfigError, match="are free; lower --num-kv-blocks"):
        create_core(model, num_kv_blocks=10**9)
    with pytest.raises(ConfigError, match="hold no block"):
        create_core(model, num_kv_blocks=None, kv_cache_bytes=10)
    with pytest.raises(ConfigError, match="is not known"):
        create_core(model, attention_backend="magic")


def test_broken_logits_name_the_rows_and_lose_nothing(model: HFCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = create_core(model)
    start_mixed(core)
    before = core.scheduler.fingerprint()
    with monkeypatch.context() as patch:
        patch.setattr(HFCausalLM, "head", lambda self, hidden: torch.full((len(hidden), 260), torch.nan))
        with pytest.raises(SamplingError):
            core.step()
    assert core.scheduler.fingerprint() == before
    assert len(drain(core)) == 4


def test_two_engines_over_one_model_do_not_interfere(model: HFCausalLM) -> None:
    alone = create_core(model)
    start_mixed(alone)
    expected = {k: tokens(v) for k, v in drain(alone).items()}
    first, second = create_core(model), create_core(model, block_size=16)
    start_mixed(first)
    start_mixed(second)
    got: list[dict[str, list[int]]] = [{}, {}]
    while first.has_pending_requests() or second.has_pending_requests():
        for core, outputs in zip((first, second), got, strict=True):
            for output in core.step():
                outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert got == [expected, expected]


def test_stats_tell_counts_and_features(model: HFCausalLM) -> None:
    core = create_core(model)
    start_mixed(core)
    stats = core.stats()
    assert (stats["num_running"], stats["num_waiting"]) == (3, 1)
    assert stats["num_requests_by_status"] == {"decode": 2, "prefill": 1, "waiting": 1}
    assert stats["kv_blocks_total"] == 64
    assert stats["features"]["chunked_prefill"] == {"requested": True, "active": True, "reason": "as requested"}
    assert stats["features"]["attention_backend"]["active"] == "torch"
    drain(core)
    stats = core.stats()
    assert (stats["num_generation_tokens"], stats["num_prompt_tokens"]) == (24, 3 + 2 + 50 + 2)
    assert stats["kv_blocks_free"] == 64
