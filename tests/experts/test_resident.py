"""Resident experts against transformers' own eager experts and against the plain loop."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moesaic.errors import InvariantError
from moesaic.experts.resident import LoopExperts, ResidentExperts

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss"]


def _experts(family: str, *, num_experts: int = 6, width: int = 16, dtype: torch.dtype = torch.float32) -> Any:
    """One tiny experts module with random weights (Any: transformers is not typed)."""
    common = {"hidden_size": 16, "experts_implementation": "eager"}
    config: Any
    if family == "qwen3_moe":
        config, kind = Qwen3MoeConfig(num_experts=num_experts, moe_intermediate_size=width, **common), Qwen3MoeExperts
    elif family == "mixtral":
        config, kind = MixtralConfig(num_local_experts=num_experts, intermediate_size=width, **common), MixtralExperts
    else:
        config, kind = GptOssConfig(num_local_experts=num_experts, intermediate_size=width, **common), GptOssExperts
    module = kind(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module.to(dtype).eval().requires_grad_(False)


def _routing(num_tokens: int, num_chosen: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores, ids = torch.rand(num_tokens, num_experts).topk(num_chosen, dim=-1)
    return ids, scores / scores.sum(-1, keepdim=True)


@pytest.fixture(params=[ResidentExperts, LoopExperts], ids=["resident", "loop"])
def backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("num_tokens", [1, 2, 37])
@pytest.mark.parametrize("family", FAMILIES)
def test_output_equals_the_eager_experts_of_transformers(family, num_tokens, backend) -> None:
    module = _experts(family)
    x = torch.randn(num_tokens, 16)
    ids, weights = _routing(num_tokens, 3, 6)
    out = backend([module]).forward(0, x, ids, weights)
    torch.testing.assert_close(out, module(x, ids, weights), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("expert", [0, 3, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_tokens_may_choose_one_expert(family, expert, backend) -> None:
    module = _experts(family)
    x, ids, weights = torch.randn(9, 16), torch.full((9, 1), expert), torch.rand(9, 1)
    out = backend([module]).forward(0, x, ids, weights)
    torch.testing.assert_close(out, module(x, ids, weights), atol=1e-5, rtol=1e-5)


@settings(max_examples=30)
@given(data=st.data(), family=st.sampled_from(FAMILIES), num_tokens=st.integers(1, 12), num_chosen=st.integers(1, 4))
def test_any_routing_equals_the_eager_experts(data, family, num_tokens, num_chosen) -> None:
    """Most experts stay empty here, at the front, between and at the end."""
    chosen = data.draw(
        st.lists(
            st.lists(st.integers(0, 15), min_size=num_chosen, max_size=num_chosen, unique=True),
            min_size=num_tokens,
            max_size=num_tokens,
        )
    )
    module = _experts(family, num_experts=16)
    x, ids, weights = torch.randn(num_tokens, 16), torch.tensor(chosen), torch.rand(num_tokens, num_chosen)
    out = ResidentExperts([module]).forward(0, x, ids, weights)
    torch.testing.assert_close(out, module(x, ids, weights), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_near_float32_whatever_the_dtype_of_the_router(family, weights_dtype, backend) -> None:
    module = _experts(family, dtype=torch.bfloat16)
    x = torch.randn(20, 16).bfloat16()
    ids, weights = _routing(20, 2, 6)
    weights = weights.to(weights_dtype)
    out = backend([module]).forward(0, x, ids, weights)
    assert out.dtype == torch.bfloat16
    exact = module.float()(x.float(), ids, weights.float())
    torch.testing.assert_close(out.float(), exact, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_with_unaligned_strides_take_the_loop_and_say_so(family) -> None:
    """Width 6 in float32 is a stride of 24 bytes, no multiple of 16."""
    module = _experts(family, width=6)
    experts = ResidentExperts({3: module, 7: _experts(family)})
    stats = experts.stats()
    assert (stats["num_layers_by_grouped_mm"], stats["num_layers_by_loop"]) == (1, 1)
    assert "grouped_mm refuses" in stats["loop_reason"]
    x = torch.randn(11, 16)
    ids, weights = _routing(11, 2, 6)
    torch.testing.assert_close(experts.forward(3, x, ids, weights), module(x, ids, weights), atol=1e-5, rtol=1e-5)


def test_layers_are_found_by_their_index() -> None:
    modules = {2: _experts("qwen3_moe"), 5: _experts("qwen3_moe")}
    x = torch.randn(4, 16)
    ids, weights = _routing(4, 2, 6)
    experts = ResidentExperts(modules)
    for layer, module in modules.items():
        torch.testing.assert_close(experts.forward(layer, x, ids, weights), module(x, ids, weights))


def test_weights_loaded_after_binding_are_used() -> None:
    module = _experts("mixtral")
    experts = ResidentExperts([module])
    x = torch.randn(4, 16)
    ids, weights = _routing(4, 2, 6)
    module.down_proj = torch.nn.Parameter(torch.randn_like(module.down_proj), requires_grad=False)
    torch.testing.assert_close(experts.forward(0, x, ids, weights), module(x, ids, weights))


def test_stats_count_layers_and_bytes() -> None:
    modules = [_experts("gpt_oss"), _experts("gpt_oss")]
    stats = ResidentExperts(modules).stats()
    assert stats["num_layers_by_grouped_mm"] == stats["num_expert_layers"] == 2
    assert stats["loop_reason"] == ""
    assert stats["expert_weights_bytes"] == sum(p.nbytes for m in modules for p in m.parameters())


def test_a_module_of_another_kind_is_refused_by_name(backend) -> None:
    with pytest.raises(InvariantError, match="layer 4: Linear is no fused experts module"):
        backend({4: torch.nn.Linear(2, 2)})


def test_a_part_of_the_experts_is_refused(backend) -> None:
    module = _experts("mixtral")
    module._is_expert_parallel = True
    with pytest.raises(InvariantError, match="a part of the experts"):
        backend([module])
