"""The engine on a GPU: the same tokens as transformers on the CPU in float32."""

from pathlib import Path

import pytest
import torch

from moesaic import LLM, SamplingParams
from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.testing.models import available_families, save_tiny, tiny_causal_lm, tiny_model

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


FLASHINFER = {
    "qwen3_moe": {"head_dim": 128},
    "mixtral": {"head_dim": 128},
    "gpt_oss": {"head_dim": 64},  # with sinks, and a window in every second layer
}


@pytest.mark.parametrize("family", FLASHINFER)
def test_prompt_scores_through_flashinfer_equal_those_of_transformers(family: str) -> None:
    """In bfloat16, teacher-forced over chunks, against transformers in float32 on the CPU."""
    changes = FLASHINFER[family]
    oracle = tiny_model(family, **changes)
    model = tiny_causal_lm(tiny_model(family, dtype=torch.bfloat16, **changes).to("cuda"))
    config = EngineConfig(
        enable_chunked_prefill=True, prefill_chunk_size=24, num_kv_blocks=256, device="cuda", strict=True
    )
    core = EngineCore(model, config)
    assert core.features()["attention_backend"]["active"] == "flashinfer", core.features()
    prompt = PROMPTS[-1]
    core.add_request("a", prompt, SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=0, logprobs=0))
    got: list[float] = []
    while core.has_pending_requests():
        for output in core.step():
            assert output.error is None
            got += [e.logprob for e in output.prompt_logprobs or () if e is not None]
    logits = oracle(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    expected = logits[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    differences = (torch.tensor(got) - expected).abs()
    assert differences.median() < 0.03, differences
    assert (differences > 0.3).float().mean() < 0.1, "a router near a tie may choose otherwise, most do not"
