"""Choices of one prompt, computed once, give what independent requests give: tokens, scores and ends."""

import asyncio
from functools import cache
from typing import Any

import pytest

from moesaic.config import EngineConfig
from moesaic.engine.client import Submission
from moesaic.engine.core import EngineCore
from moesaic.engine.thread_client import ThreadEngineClient
from moesaic.errors import RequestError
from moesaic.models.hf import HFCausalLM
from moesaic.request import SamplingParams, StepOutput
from moesaic.testing.models import tiny_causal_lm, tiny_model

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
CHUNK_SIZES = (None, 1, 3, 16)
PROMPT = tuple((13 * i + i * i) % 157 + 3 for i in range(21))
OTHERS = [tuple((7 * i + n) % 100 + 3 for i in range(n)) for n in (5, 11)]
NUM_CHOICES, NUM_OUTPUTS = 4, 6
Answers = dict[str, tuple[list[int], list[float]]]


@cache
def model_of(family: str) -> HFCausalLM:
    return tiny_causal_lm(tiny_model(family))


def create_core(family: str, chunk_size: int | None, **settings: Any) -> EngineCore:  # Any: of many types
    config = EngineConfig(
        **{
            "enable_chunked_prefill": chunk_size is not None,
            "prefill_chunk_size": chunk_size or 1,
            "max_batch_size": 8,
            "max_tokens_per_step": 32,
            "block_size": 4,
            "num_kv_blocks": 64,
            **settings,
        }
    )
    return EngineCore(model_of(family), config)


def params(choice: int, **changed: Any) -> SamplingParams:  # Any: of many types
    return SamplingParams(
        **{"max_tokens": NUM_OUTPUTS, "temperature": 0.9, "seed": choice, "logprobs": 0, "ignore_eos": True} | changed
    )


def add_all(core: EngineCore, *, shares: bool) -> None:
    """Add the choices of ``PROMPT`` among others."""
    core.add_request("x0", OTHERS[0], params(10))
    core.add_request("c0", PROMPT, params(0))
    for i in range(1, NUM_CHOICES):
        if shares:
            core.add_sibling(f"c{i}", "c0", params(i))
        else:
            core.add_request(f"c{i}", PROMPT, params(i))
    core.add_request("x1", OTHERS[1], params(11))


def answers(core: EngineCore, before_step: Any = lambda core, step: None) -> Answers:  # Any: a function
    """Return tokens and log probabilities of every request."""
    outputs: list[StepOutput] = []
    step = 0
    while core.has_pending_requests():
        before_step(core, step)
        outputs += core.step()
        step += 1
    found: Answers = {}
    for output in outputs:
        assert output.error is None
        tokens, scores = found.setdefault(output.request_id, ([], []))
        tokens += output.new_token_ids
        scores += [score.logprob for score in output.logprobs or ()]
    return found


@cache
def expected(family: str) -> Answers:
    core = create_core(family, None)
    add_all(core, shares=False)
    return answers(core)


def assert_equal(got: Answers, wanted: Answers) -> None:
    assert {name: tokens for name, (tokens, _) in got.items()} == {name: tokens for name, (tokens, _) in wanted.items()}
    for name, (_, scores) in wanted.items():
        assert got[name][1] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prompts_change_no_token_and_are_computed_once(family: str, chunk_size: int | None) -> None:
    core = create_core(family, chunk_size)
    add_all(core, shares=True)
    assert_equal(answers(core), expected(family))
    stats = core.stats()
    assert stats["num_shared_tokens"] == (NUM_CHOICES - 1) * 20
    assert stats["num_prompt_tokens"] == len(PROMPT) + (NUM_CHOICES - 1) + sum(map(len, OTHERS))
    assert stats["kv_blocks_free"] == 64


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("swap_space_bytes", [0, 1 << 20])
def test_a_full_pool_changes_no_token(chunk_size: int | None, swap_space_bytes: int) -> None:
    core = create_core("qwen3_moe", chunk_size, num_kv_blocks=11, swap_space_bytes=swap_space_bytes)
    add_all(core, shares=True)
    assert_equal(answers(core), expected("qwen3_moe"))
    assert core.stats()["num_preemptions"] > 0
    assert core.stats()["kv_blocks_free"] == 11


@pytest.mark.parametrize("verb", ["abort", "preempt", "pause"])
@pytest.mark.parametrize("victim", ["c0", "c1"])
def test_one_that_goes_at_any_step_leaves_the_others_as_they_were(victim: str, verb: str) -> None:
    for when in range(12):

        def go(core: EngineCore, step: int, when: int = when) -> None:
            if step == when:
                if verb == "preempt":
                    core.scheduler.preempt(victim)
                elif verb == "pause":
                    core.pause_request(victim)
                else:
                    core.abort_request(victim)

        core = create_core("qwen3_moe", 3)
        add_all(core, shares=True)
        got = answers(core, go)
        if verb == "pause":
            core.resume_request(victim)
            for name, (tokens, scores) in answers(core).items():
                before = got.setdefault(name, ([], []))
                got[name] = (before[0] + tokens, before[1] + scores)
        wanted = expected("qwen3_moe")
        if verb == "abort":
            got, wanted = ({k: v for k, v in one.items() if k != victim} for one in (got, wanted))
        assert_equal(got, wanted)
        assert core.stats()["kv_blocks_free"] == 64


def test_scores_of_the_prompt_are_those_of_a_request_alone() -> None:
    core, alone = create_core("qwen3_moe", 3), create_core("qwen3_moe", None)
    alone.add_request("c0", PROMPT, params(0, prompt_logprobs=1))
    core.add_request("c0", PROMPT, params(0))
    core.add_sibling("c1", "c0", params(0, prompt_logprobs=1))

    def scores(core: EngineCore, name: str) -> list[float]:
        found: list[float] = []
        while core.has_pending_requests():
            for output in core.step():
                if output.request_id == name and output.prompt_logprobs is not None:
                    found += [score.logprob for score in output.prompt_logprobs if score is not None]
        return found

    assert scores(core, "c1") == pytest.approx(scores(alone, "c0"), abs=1e-4)


def test_a_sibling_of_nobody_is_refused() -> None:
    core = create_core("qwen3_moe", None)
    with pytest.raises(RequestError, match="'gone' is unknown or over"):
        core.add_sibling("c1", "gone", params(0))
    assert not core.has_pending_requests()


def test_equal_prompts_of_one_submission_are_sent_and_computed_once() -> None:
    core = create_core("qwen3_moe", 3)

    async def submit() -> dict[str, int]:
        client = ThreadEngineClient(core, None)
        await client.start()
        try:
            submissions = [
                Submission(prompt_token_ids=p, sampling_params=params(0)) for p in (PROMPT, OTHERS[0], PROMPT)
            ]
            async with await client.submit(*submissions) as stream:
                counts = dict.fromkeys(stream.request_ids, 0)
                async for delta in stream:
                    counts[delta.request_id] += len(delta.token_ids)
            return counts
        finally:
            await client.close()

    assert list(asyncio.run(submit()).values()) == [NUM_OUTPUTS] * 3
    assert core.stats()["num_shared_tokens"] == 20
