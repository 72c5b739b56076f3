"""The native definition is the same model: tokens and log probabilities equal those through transformers' layers."""

from typing import Any

import pytest
import torch

from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.errors import ConfigError, InvariantError
from moesaic.models.hf import HFCausalLM
from moesaic.models.native import FAMILIES, NativeCausalLM, native_refusal
from moesaic.request import SamplingParams
from moesaic.testing.models import tiny_causal_lm, tiny_model

PROMPTS = [tuple((31 * n + 7 * i) % 157 + 3 for i in range(n)) for n in (1, 9, 23, 40)]


def create_core(model: HFCausalLM, **settings: Any) -> EngineCore:  # Any: settings of several types
    defaults = {"max_batch_size": 4, "max_tokens_per_step": 32, "block_size": 4, "num_kv_blocks": 64}
    return EngineCore(model, EngineConfig(**(defaults | settings)))


def run(core: EngineCore) -> dict[str, list[tuple[int, float]]]:
    for i, prompt in enumerate(PROMPTS):
        core.add_request(str(i), prompt, SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True))
    got: dict[str, list[tuple[int, float]]] = {}
    while core.has_pending_requests():
        for output in core.step():
            scores = [entry.logprob for entry in output.logprobs or ()]
            got.setdefault(output.request_id, []).extend(zip(output.new_token_ids, scores, strict=True))
    return got


@pytest.mark.parametrize("chunk_size", [None, 3, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_log_probabilities_equal_those_of_transformers_layers(family: str, chunk_size: int | None) -> None:
    settings = {"enable_chunked_prefill": chunk_size is not None, "prefill_chunk_size": chunk_size or 16}
    model = tiny_causal_lm(tiny_model(family))
    expected = run(create_core(model, model_impl="transformers", **settings))
    core = create_core(model, model_impl="native", **settings)
    assert core.features()["model"]["active"] == "native"
    got = run(core)
    for name, pairs in expected.items():
        assert [token for token, _ in got[name]] == [token for token, _ in pairs]
        torch.testing.assert_close([p for _, p in got[name]], [p for _, p in pairs], atol=1e-4, rtol=0)


def test_the_weights_are_in_memory_once_and_the_adapter_goes_on() -> None:
    adapter = tiny_causal_lm(tiny_model("qwen3_moe"))
    expected = run(create_core(adapter, model_impl="transformers"))
    native = NativeCausalLM(adapter)
    attention = adapter.hf_model.model.layers[0].self_attn
    storages = {p.weight.untyped_storage().data_ptr() for p in (attention.q_proj, attention.k_proj, attention.v_proj)}
    assert len(storages) == 1
    assert native.adapter is adapter
    assert run(create_core(adapter, model_impl="transformers")) == expected


def test_another_family_falls_back_with_the_reason_or_is_refused_when_strict() -> None:
    model = tiny_causal_lm(tiny_model("gpt_oss"))
    feature = create_core(model, model_impl="native").features()["model"]
    assert (feature["requested"], feature["active"]) == ("native", "transformers")
    assert "gpt_oss" in feature["reason"]
    with pytest.raises(ConfigError, match=r"native.*gpt_oss.*--model-impl auto"):
        create_core(model, model_impl="native", strict=True)
    with pytest.raises(InvariantError, match="gpt_oss"):
        NativeCausalLM(model)


def test_auto_is_transformers_on_a_cpu() -> None:
    feature = create_core(tiny_causal_lm(tiny_model("qwen3_moe"))).features()["model"]
    assert (feature["active"], "CUDA" in feature["reason"]) == ("transformers", True)


def test_a_layer_without_routed_experts_is_refused() -> None:
    adapter = tiny_causal_lm(tiny_model("qwen3_moe"))
    adapter.expert_modules = dict(list(adapter.expert_modules.items())[1:])
    assert "no routed experts" in str(native_refusal(adapter))
