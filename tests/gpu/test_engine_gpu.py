"""The engine on a GPU: the same tokens as transformers on the CPU in float32."""

from pathlib import Path

import pytest
import torch

from moesaic import LLM, SamplingParams
from moesaic.testing.models import available_families, save_tiny

pytestmark = pytest.mark.gpu

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss")
PROMPTS = [[(7 * i + n) % 150 + 3 for i in range(n)] for n in (1, 2, 5, 17, 64, 120)]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers(tmp_path: Path, family: str, chunked: bool) -> None:
    if family not in available_families():
        pytest.fail(f"the installed transformers has no {family}")
    oracle = save_tiny(family, tmp_path)
    llm = LLM(
        tmp_path,
        device="cuda",
        dtype="float32",
        enable_chunked_prefill=chunked,
        prefill_chunk_size=16,
        num_kv_blocks=512,
    )
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0.0), use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt])
        expected = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert list(output.token_ids) == expected[0, len(prompt) :].tolist()
    assert llm.stats()["kv_blocks_free"] == 512


def test_chunked_equals_whole_in_bfloat16_up_to_rounding(tmp_path: Path) -> None:
    """Teacher-forced: the prompt's own log probabilities, since greedy tokens may differ at a tie."""
    save_tiny("qwen3_moe", tmp_path)
    scores = []
    for chunked in (False, True):
        llm = LLM(
            tmp_path,
            device="cuda",
            dtype="bfloat16",
            enable_chunked_prefill=chunked,
            prefill_chunk_size=16,
            num_kv_blocks=512,
        )
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        (output,) = llm.generate([PROMPTS[-1]], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        scores.append(torch.tensor([e.logprob for e in output.prompt_logprobs if e is not None]))
    assert (scores[0] - scores[1]).abs().median() < 0.05
