"""Greedy tokens and log probabilities of ``LLM`` against the unmodified transformers model, prompt by prompt."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic import LLM, SamplingParams
from moesaic.request import RequestOutput
from moesaic.testing.models import save_tiny

FAMILIES = (
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "olmoe",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
)
CHUNK_SIZES = (1, 2, 3, 7, 16, 64)
BLOCK_SIZES = (1, 4, 16)
NUM_OUTPUTS = 8


@dataclass(frozen=True)
class Oracle:
    """A checkpoint on disk, prompts, and what transformers makes of each."""

    family: str
    path: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[list[float]]


def generate(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:  # Any: transformers is untyped
    """Return the greedy continuation of one prompt, with the log probability of each token."""
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_OUTPUTS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = result.sequences[0, len(prompt) :].tolist()
    logprobs = [
        torch.log_softmax(step[0].float(), -1)[token].item() for step, token in zip(result.logits, tokens, strict=True)
    ]
    return tokens, logprobs


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    return {}


@pytest.fixture
def oracle(request: pytest.FixtureRequest, oracles: dict[str, Oracle], tmp_path_factory: Any) -> Oracle:
    family = request.param
    if family not in oracles:
        path = tmp_path_factory.mktemp(family)
        model = save_tiny(family, path)
        rng = random.Random(family)
        lengths = [1, 2, 300, *(rng.randint(1, 120) for _ in range(13))]
        prompts = [[rng.randrange(3, model.config.vocab_size) for _ in range(n)] for n in lengths]
        tokens, logprobs = zip(*(generate(model, p) for p in prompts), strict=True)
        oracles[family] = Oracle(family, path, prompts, list(tokens), list(logprobs))
    return oracles[family]


def check(oracle: Oracle, outputs: list[RequestOutput], chosen: list[int]) -> None:
    for index, output in zip(chosen, outputs, strict=True):
        assert list(output.token_ids) == oracle.tokens[index]
        assert output.logprobs is not None
        got = [entry.logprob for entry in output.logprobs]
        assert got == pytest.approx(oracle.logprobs[index], abs=1e-4)


def run(oracle: Oracle, chosen: list[int], **settings: Any) -> LLM:  # Any: settings of several types
    llm = LLM(oracle.path, max_tokens_per_step=128, max_batch_size=32, **{"num_kv_blocks": 4096} | settings)
    params = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, logprobs=0)
    check(oracle, llm.generate([oracle.prompts[i] for i in chosen], params, use_tqdm=False), chosen)
    assert llm.stats()["kv_blocks_free"] == llm.stats()["kv_blocks_total"]
    return llm


ALL = list(range(16))


@pytest.mark.parametrize("oracle", FAMILIES, indirect=True)
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_chunked_tokens_equal_transformers(oracle: Oracle, chunk_size: int) -> None:
    """Each chunk size meets a different block size in each family; qwen3_moe below meets them all."""
    turn = FAMILIES.index(oracle.family) + CHUNK_SIZES.index(chunk_size)
    run(
        oracle,
        ALL if chunk_size > 2 else ALL[3:],
        enable_chunked_prefill=True,
        prefill_chunk_size=chunk_size,
        block_size=BLOCK_SIZES[turn % 3],
        max_partial_prefills=16,
    )


@pytest.mark.parametrize("oracle", FAMILIES, indirect=True)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_whole_tokens_equal_transformers(oracle: Oracle, block_size: int) -> None:
    run(oracle, ALL, block_size=block_size)


@pytest.mark.parametrize("oracle", ["qwen3_moe"], indirect=True)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_every_chunk_size_meets_every_block_size(oracle: Oracle, chunk_size: int, block_size: int) -> None:
    run(
        oracle,
        ALL,
        enable_chunked_prefill=True,
        prefill_chunk_size=chunk_size,
        block_size=block_size,
        max_partial_prefills=16,
    )


@pytest.mark.parametrize("oracle", ["qwen3_moe", "gpt_oss"], indirect=True)
@pytest.mark.parametrize("num_prompts", range(1, 17))
def test_batches_of_every_size(oracle: Oracle, num_prompts: int) -> None:
    run(oracle, ALL[-num_prompts:], enable_chunked_prefill=True, prefill_chunk_size=16)


@pytest.mark.parametrize("oracle", ["mixtral", "deepseek_v3"], indirect=True)
@pytest.mark.parametrize("chunked", [False, True])
def test_preempted_requests_yield_the_same_tokens(oracle: Oracle, chunked: bool) -> None:
    llm = run(
        oracle,
        ALL,
        enable_chunked_prefill=chunked,
        prefill_chunk_size=16,
        block_size=1,
        num_kv_blocks=320,
    )
    assert llm.stats()["num_preemptions"] > 0
