"""Steps launched behind one another on a real device, where they do overlap: the same tokens as one by one."""

import random

import pytest
import torch

from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.engine.supervisor import StepSupervisor
from moesaic.request import SamplingParams, StepOutput
from moesaic.sampling.sampler import Sampler
from moesaic.testing.models import tiny_causal_lm, tiny_model

pytestmark = pytest.mark.gpu

NUM_BLOCKS = 128
WIDE = {"head_dim": 128, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2}
"""Shapes that FlashInfer takes."""


def create(dtype: torch.dtype, *, overlap: bool, num_blocks: int = NUM_BLOCKS) -> EngineCore:
    model = tiny_causal_lm(tiny_model("qwen3_moe", dtype=dtype, **WIDE).to("cuda"))
    config = EngineConfig(
        enable_chunked_prefill=True,
        prefill_chunk_size=16,
        max_batch_size=8,
        max_tokens_per_step=64,
        block_size=16,
        num_kv_blocks=num_blocks,
        overlap=overlap,
        dtype=str(dtype).removeprefix("torch."),
        device="cuda",
    )
    core = EngineCore(model, config)
    assert core.features()["overlap"]["active"] == overlap
    return core


def add_all(core: EngineCore) -> None:
    rng = random.Random(3)
    for i in range(20):
        params = SamplingParams(
            max_tokens=rng.choice([1, 5, 40]),
            temperature=(0.0, 1.0)[i % 2],
            seed=i,
            stop_token_ids=tuple(range(0, 90, 7)),
            logprobs=(None, 2)[i % 3 == 0],
            presence_penalty=(0.0, 0.5)[i == 13],
        )
        core.add_request(f"r{i}", [rng.randrange(3, 90) for _ in range(rng.choice([1, 9, 70]))], params)


def drain(core: EngineCore, abort_at: int | None = None) -> dict[str, list[StepOutput]]:
    events: dict[str, list[StepOutput]] = {}
    step = 0
    while core.has_pending_requests():
        if step == abort_at:
            core.abort_request("r3")
        for output in core.step():
            events.setdefault(output.request_id, []).append(output)
        step += 1
    assert core.scheduler.kv.pool.num_free == core.scheduler.kv.pool.num_blocks
    return events


def answers(events: dict[str, list[StepOutput]]) -> dict[str, tuple[list[int], str | None]]:
    return {n: ([t for o in es for t in o.new_token_ids], es[-1].finish_reason) for n, es in events.items()}


@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS, 18])
def test_tokens_are_those_of_steps_one_by_one(num_blocks: int) -> None:
    """In float32, where what else is in a step does not move a choice."""
    got, expected = (
        answers(drain(create_with_requests(torch.float32, overlap, num_blocks))) for overlap in (True, False)
    )
    assert got == expected


def create_with_requests(dtype: torch.dtype, overlap: bool, num_blocks: int = NUM_BLOCKS) -> EngineCore:
    core = create(dtype, overlap=overlap, num_blocks=num_blocks)
    add_all(core)
    return core


def test_captured_steps_overlap_too() -> None:
    """In bf16 with captured steps: greedy rows alone, one size of step, so that equal sums meet equal roundings."""
    tokens = []
    for overlap in (True, False):
        core = create(torch.bfloat16, overlap=overlap)
        for i in range(4):
            params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
            core.add_request(f"r{i}", [5 + i] * 9, params)
        tokens.append(answers(drain(core)))
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("abort_at", [1, 2, 5, 9])
def test_an_abort_between_steps_changes_no_other(abort_at: int) -> None:
    expected = answers(drain(create_with_requests(torch.float32, False)))
    got = answers(drain(create_with_requests(torch.float32, True), abort_at))
    gone = got.pop("r3")
    assert gone[0] == expected.pop("r3")[0][: len(gone[0])]
    assert got == expected


def test_a_step_behind_reads_tokens_that_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is kept busy before each choice: whoever read a token too early would read the one before it."""
    expected = answers(drain(create_with_requests(torch.float32, False)))
    begin = Sampler.begin

    def late(self: Sampler, logits: torch.Tensor, rows: object) -> object:
        torch.cuda._sleep(5_000_000)  # cycles: some milliseconds
        return begin(self, logits, rows)  # type: ignore[arg-type]  # passed on as it came

    monkeypatch.setattr(Sampler, "begin", late)
    assert answers(drain(create_with_requests(torch.float32, True))) == expected


def test_a_broken_row_does_not_break_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its token id is negative; the step behind must not look an embedding up with it."""
    core = create_with_requests(torch.float32, True)
    model_type, num_calls = type(core.model), [0]
    head = model_type.head

    def broken(self: object, hidden: torch.Tensor) -> torch.Tensor:
        num_calls[0] += 1
        logits: torch.Tensor = head(self, hidden)  # type: ignore[arg-type]  # any of the two definitions
        return torch.full_like(logits, torch.nan) if num_calls[0] == 3 else logits

    monkeypatch.setattr(model_type, "head", broken)
    supervisor, events = StepSupervisor(core), {}
    while core.has_pending_requests():
        for output in supervisor.step():
            events.setdefault(output.request_id, []).append(output)
    assert len(events) == 20
    assert supervisor.stats()["num_failed_steps"] == 1
    assert "error" in {es[-1].finish_reason for es in events.values()}
