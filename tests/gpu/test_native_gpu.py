"""The native model and its graphs on a GPU: against transformers' layers, and captured against eager steps."""

from typing import Any

import pytest
import torch

from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.models.hf import HFCausalLM
from moesaic.models.native import FAMILIES
from moesaic.request import SamplingParams
from moesaic.testing.models import tiny_causal_lm, tiny_model

pytestmark = pytest.mark.gpu

WIDE = {"head_dim": 128, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2}
"""Shapes that FlashInfer takes."""
MOST_ROWS = 9


def model_of(family: str, dtype: torch.dtype) -> HFCausalLM:
    return tiny_causal_lm(tiny_model(family, dtype=dtype, **WIDE).to("cuda"))


def create_core(model: HFCausalLM, **settings: Any) -> EngineCore:  # Any: settings of several types
    defaults = {
        "max_batch_size": MOST_ROWS,
        "max_tokens_per_step": 64,
        "block_size": 16,
        "num_kv_blocks": 256,
        "device": "cuda",
        "enable_chunked_prefill": True,
        "prefill_chunk_size": 24,
    }
    return EngineCore(model, EngineConfig(**(defaults | settings)))


def run(core: EngineCore, num_rows: int, num_tokens: int = 12) -> dict[str, list[tuple[int, float]]]:
    """Return token and log probability of each output of ``num_rows`` requests of different lengths."""
    for i in range(num_rows):
        prompt = [(31 * i + 7 * j) % 150 + 5 for j in range(3 + 17 * i)]
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=1, ignore_eos=True)
        core.add_request(str(i), prompt, params)
    got: dict[str, list[tuple[int, float]]] = {}
    while core.has_pending_requests():
        for output in core.step():
            assert output.error is None
            scores = [entry.logprob for entry in output.logprobs or ()]
            got.setdefault(output.request_id, []).extend(zip(output.new_token_ids, scores, strict=True))
    return got


def assert_close(got: dict[str, list[tuple[int, float]]], want: dict[str, list[tuple[int, float]]]) -> None:
    """Until tokens part at a near tie, log probabilities agree to bf16; a router near a tie may choose otherwise."""
    differences: list[float] = []
    for name, pairs in want.items():
        for (token, score), (wanted, wanted_score) in zip(got[name], pairs, strict=True):
            differences.append(abs(score - wanted_score))
            if token != wanted:
                break
    assert len(differences) > len(want) * 6, "nearly all of them part early"
    assert sum(d > 0.06 for d in differences) <= 0.1 * len(differences), sorted(differences)[-10:]
    assert sorted(differences)[len(differences) // 2] < 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_native_agrees_with_transformers_layers(family: str) -> None:
    model = model_of(family, torch.bfloat16)
    core = create_core(model, model_impl="native")
    features = core.features()
    assert features["model"]["active"] == "native"
    assert features["experts"]["active"] == "triton"
    other = create_core(model, model_impl="transformers", expert_backend="resident", attention_backend="torch")
    assert_close(run(core, 6), run(other, 6))


@pytest.mark.parametrize("num_rows", range(1, MOST_ROWS + 1))
def test_captured_steps_agree_with_eager_ones_for_every_number_of_rows(num_rows: int) -> None:
    """Every captured size (1, 2, 4, 8, 9), one row less and one more."""
    model = model_of("qwen3_moe", torch.bfloat16)
    core = create_core(model)
    assert core.features()["cuda_graphs"]["active"], core.features()["cuda_graphs"]
    eager = create_core(model, cuda_graphs=False)
    assert not eager.features()["cuda_graphs"]["active"]
    assert_close(run(core, num_rows), run(eager, num_rows))


def test_captured_segments_agree_with_eager_ones_in_mixed_steps() -> None:
    """Prompts of 3 to 139 tokens in chunks of 24 beside decode rows: steps of many sizes, most of them padded."""
    model = model_of("qwen3_moe", torch.bfloat16)
    core, eager = create_core(model), create_core(model, cuda_graphs=False)
    assert core.runner.segments is not None
    assert eager.runner.segments is None
    assert_close(run(core, MOST_ROWS, num_tokens=30), run(eager, MOST_ROWS, num_tokens=30))


def test_a_captured_step_leaves_the_kv_of_others_alone() -> None:
    """Padded rows write nowhere: a request that is set aside for a while goes on as if nothing had been."""
    model = model_of("qwen3_moe", torch.bfloat16)
    core, eager = create_core(model), create_core(model, cuda_graphs=False)
    for engine in (core, eager):
        for i in range(3):
            params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
            engine.add_request(str(i), [5 + i] * (20 + i), params)
    tokens: list[dict[str, list[int]]] = []
    for engine in (core, eager):
        got: dict[str, list[int]] = {}
        while engine.has_pending_requests():
            for output in engine.step():
                got.setdefault(output.request_id, []).extend(output.new_token_ids)
        tokens.append(got)
    pages = [engine.runner.store.pages(0)[0] for engine in (core, eager)]
    unused = (pages[1] == 0).flatten(1).all(dim=1)
    assert bool((pages[0][unused] == 0).all()), "a block that no request had was written"
    assert tokens[0].keys() == tokens[1].keys()
