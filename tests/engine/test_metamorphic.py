"""With ``batch_invariant``, nothing but a request's own tokens has any influence on one bit of what it gets.

Float32 on a CPU. Each request is run alone first, its prompt whole; everything else must give the same tokens, log
probabilities and, bit for bit, the same logits of every sampled position.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from moesaic.batch import RaggedBatch
from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.models.hf import HFCausalLM
from moesaic.request import SamplingParams, StepOutput, TokenLogprobs
from moesaic.runner import ModelRunner
from moesaic.sampling.pending import SampledTokens
from moesaic.sampling.row import SamplingRow
from moesaic.sampling.rowwise import RowwiseSampler
from moesaic.sched.scheduler import PreemptionKind
from moesaic.testing.models import tiny_causal_lm, tiny_model
from moesaic.tokenwise import TokenwiseRunner

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
CHUNK_SIZES = (1, 2, 3, 7, 16, 64)
PROMPT_LENGTHS = (9, 4, 6, 1, 20, 2, 11, 67)
NUM_OUTPUTS = 4
PROMPTS = [tuple((31 * n + 7 * i + i * i) % 157 + 3 for i in range(n)) for n in PROMPT_LENGTHS]
SHUFFLED = (5, 1, 4, 0, 3, 6, 2)
FEW, SHORT, ALL = range(3), range(7), range(8)

pytestmark = pytest.mark.parametrize("family", FAMILIES)

BeforeStep = Callable[[EngineCore, int], None]


class PlantedError(RuntimeError):
    """Raised by ``FaultyRunner``."""


class Position(NamedTuple):
    """One sampled position: which request, and after how many of its outputs."""

    request: int
    num_outputs: int


@dataclass
class Record:
    """What was seen of some requests, by request and by position."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] = field(default_factory=dict)
    logits: dict[Position, torch.Tensor] = field(default_factory=dict)

    def note(self, output: StepOutput) -> None:
        assert output.error is None
        request = int(output.request_id)
        self.tokens.setdefault(request, []).extend(output.new_token_ids)
        self.logprobs.setdefault(request, []).extend(output.logprobs or ())
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[request] = output.prompt_logprobs


class RecordingSampler(RowwiseSampler):
    """Notes the logits it is given; a position sampled again after a failure must see the same bits."""

    def __init__(self, model: HFCausalLM) -> None:
        super().__init__(vocab_size=model.info.vocab_size, eos_token_ids=model.info.eos_token_ids)
        self.logits: dict[Position, torch.Tensor] = {}
        self.owners: dict[int, int] = {}
        """Which request each parameters object belongs to, by its ``id``."""

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SampledTokens:
        for row, seen in zip(rows, logits, strict=True):
            position = Position(self.owners[id(row.params)], len(row.output_token_ids))
            assert torch.equal(self.logits.setdefault(position, seen.clone()), seen), position
        return super().sample(logits, rows)


class FaultyRunner(TokenwiseRunner):
    """Fails before or after the work of a forward that was told to."""

    fault: str | None = None

    def run(self, batch: RaggedBatch) -> torch.Tensor:
        fault, self.fault = self.fault, None
        if fault == "before":
            raise PlantedError
        logits = super().run(batch)
        if fault == "after":
            raise PlantedError
        return logits


@cache
def model_of(family: str) -> HFCausalLM:
    return tiny_causal_lm(tiny_model(family))


def params_of(request: int) -> SamplingParams:
    """Every third request is random, with its own seed and filters; every second has its prompt scored."""
    shared: dict[str, Any] = {  # Any: fields of several types
        "max_tokens": NUM_OUTPUTS,
        "ignore_eos": True,
        "logprobs": request % 3,
        "prompt_logprobs": 1 if request % 2 else None,
    }
    if request % 3:
        return SamplingParams(temperature=0.0, **shared)
    return SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, seed=request, **shared)


def create_core(family: str, **settings: Any) -> EngineCore:  # Any: settings of several types
    defaults = {"max_batch_size": 8, "max_tokens_per_step": 128, "block_size": 4, "num_kv_blocks": 64}
    return EngineCore(model_of(family), EngineConfig(batch_invariant=True, **(defaults | settings)))


def drain(core: EngineCore, requests: Sequence[int], before_step: BeforeStep = lambda core, index: None) -> Record:
    """Run ``requests`` to their end; planted faults are stepped over."""
    core.sampler = sampler = RecordingSampler(model_of_core(core))
    for request in requests:
        params = params_of(request)
        sampler.owners[id(params)] = request
        core.add_request(str(request), PROMPTS[request], params)
    record, index = Record(logits=sampler.logits), 0
    while core.has_pending_requests():
        before_step(core, index)
        index += 1
        try:
            outputs = core.step()
        except PlantedError:
            continue
        for output in outputs:
            record.note(output)
    return record


def model_of_core(core: EngineCore) -> HFCausalLM:
    assert isinstance(core.model, HFCausalLM)
    return core.model


@cache
def alone(family: str) -> Record:
    """Return what each request gets with the engine for itself."""
    merged = Record()
    for request in ALL:
        record = drain(create_core(family), [request])
        for kind in ("tokens", "logprobs", "prompt_logprobs", "logits"):
            getattr(merged, kind).update(getattr(record, kind))
    return merged


def check(family: str, record: Record, requests: Sequence[int]) -> None:
    expected = alone(family)
    for kind in ("tokens", "logprobs", "prompt_logprobs"):
        wanted = {r: value for r, value in getattr(expected, kind).items() if r in requests}
        assert getattr(record, kind) == wanted, kind
    assert record.logits.keys() == {p for p in expected.logits if p.request in requests}
    assert [p for p, logits in record.logits.items() if not torch.equal(logits, expected.logits[p])] == []


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_chunks_of_any_size_change_no_bit(family: str, chunk_size: int) -> None:
    requests = ALL if chunk_size > 7 else SHORT
    core = create_core(family, enable_chunked_prefill=True, prefill_chunk_size=chunk_size)
    check(family, drain(core, requests), requests)


@pytest.mark.parametrize("max_tokens_per_step", [12, 27])
def test_a_smaller_step_budget_changes_no_bit(family: str, max_tokens_per_step: int) -> None:
    core = create_core(
        family, enable_chunked_prefill=True, prefill_chunk_size=16, max_tokens_per_step=max_tokens_per_step
    )
    check(family, drain(core, SHORT), SHORT)


@pytest.mark.parametrize(("requests", "block_size"), [(ALL[::-1], 16), (SHUFFLED, 1)], ids=["reversed", "shuffled"])
def test_company_order_and_blocks_change_no_bit(family: str, requests: Sequence[int], block_size: int) -> None:
    check(family, drain(create_core(family, block_size=block_size, num_kv_blocks=160), requests), requests)


@pytest.mark.parametrize("by", ["recompute", "swap"])
def test_preemption_at_any_step_changes_no_bit(family: str, by: PreemptionKind) -> None:
    """In run ``k`` every running request loses its KV before step ``k``, in prefill and in decode."""
    for step in range(1, _num_steps(family)):
        stats = _preempt_all_before(family, step, by)
        assert stats["num_preemptions"] > 0
        assert (stats["num_recomputed_tokens"] > 0) == (by == "recompute")
        assert (stats["swap_copied_bytes"] > 0) == (by == "swap")


def _preempt_all_before(family: str, step: int, by: PreemptionKind) -> dict[str, Any]:  # Any: stats of all types
    def preempt(core: EngineCore, index: int) -> None:
        if index == step:
            for seq in core.scheduler.running.all():
                assert core.scheduler.preempt(seq.request.request_id, by)

    core = _small_core(family, swap_space_bytes=1 << 20)
    check(family, drain(core, FEW, preempt), FEW)
    return core.stats()


def _small_core(family: str, **settings: Any) -> EngineCore:  # Any: settings of several types
    return create_core(family, enable_chunked_prefill=True, prefill_chunk_size=3, **settings)


def _num_steps(family: str) -> int:
    indices: list[int] = []
    drain(_small_core(family), FEW, lambda core, index: indices.append(index))
    return len(indices)


@pytest.mark.parametrize("swap_space_bytes", [0, 1 << 20], ids=["recompute", "swap"])
def test_too_few_blocks_change_no_bit(family: str, swap_space_bytes: int) -> None:
    """Blocks of one token: every decode row needs one in each step, so the pool's size sets who must go and when."""
    for num_kv_blocks in (14, 19):
        core = _small_core(family, block_size=1, num_kv_blocks=num_kv_blocks, swap_space_bytes=swap_space_bytes)
        check(family, drain(core, FEW), FEW)
        assert core.stats()["num_preemptions"] > 0
        assert (core.stats()["swap_copied_bytes"] > 0) == (swap_space_bytes > 0)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_failure_of_every_step_changes_no_bit(family: str, moment: str) -> None:
    """Each step fails once, before any work or with all of its KV already written, and is then taken again."""
    core = _small_core(family)
    core.runner = runner = FaultyRunner(core.runner.model, core.runner.attention, core.runner.store)

    def plant(core: EngineCore, index: int) -> None:
        runner.fault = None if index % 2 else moment

    check(family, drain(core, FEW, plant), FEW)
    assert core.stats()["num_rolled_back_steps"] == _num_steps(family)


def test_the_batched_path_agrees_up_to_rounding(family: str) -> None:
    core = create_core(family)
    core.runner = ModelRunner(core.runner.model, core.runner.attention, core.runner.store)
    batched, expected = drain(core, ALL), alone(family)
    assert batched.tokens == expected.tokens
    for position, logits in batched.logits.items():
        torch.testing.assert_close(logits, expected.logits[position], atol=1e-4, rtol=0)
