"""Which experts modules the fused kernels take, and what serves where they cannot run."""

from typing import Any

import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moesaic.errors import ConfigError
from moesaic.experts.resident import LoopExperts, ResidentExperts
from moesaic.experts.select import select_experts
from moesaic.experts.triton import layer_refusal, shape_of


def _qwen(*, width: int = 16, inner: int = 24, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Qwen3MoeExperts:
    fields = {"num_experts": 6, "moe_intermediate_size": inner, "hidden_size": width, "experts_implementation": "eager"}
    module = Qwen3MoeExperts(Qwen3MoeConfig(**(fields | config))).to(dtype).requires_grad_(False)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module


def test_gated_silu_experts_in_half_precision_are_taken() -> None:
    mixtral = MixtralExperts(MixtralConfig(num_local_experts=4, intermediate_size=24, hidden_size=16))
    assert layer_refusal(_qwen()) is None
    assert layer_refusal(mixtral.to(torch.float16)) is None


def test_each_layout_that_is_not_taken_has_its_reason() -> None:
    gpt_oss = GptOssExperts(GptOssConfig(num_local_experts=4, intermediate_size=24, hidden_size=16)).bfloat16()
    reasons = {
        "without bias": gpt_oss,
        r"silu\(gate\) \* up": _qwen(hidden_act="gelu"),
        "the weights are torch.float32": _qwen(dtype=torch.float32),
        "multiple of 8": _qwen(inner=20),
    }
    for reason, module in reasons.items():
        with pytest.raises(AssertionError, match=reason):
            assert layer_refusal(module) is None, layer_refusal(module)


def test_a_gate_that_clamps_is_not_taken() -> None:
    module = _qwen()
    plain = module._apply_gate
    module._apply_gate = lambda hidden: plain(hidden.clamp(max=7.0))
    assert "this family does not" in str(layer_refusal(module))


def test_the_shape_is_read_from_the_weights() -> None:
    shape = shape_of(_qwen(), 2)
    assert (shape.num_experts, shape.num_experts_per_token, shape.width, shape.inner) == (6, 2, 16, 24)
    assert (shape.dtype, shape.expert_bytes) == ("bfloat16", 3 * 16 * 24 * 2)


@pytest.mark.parametrize("requested", ["auto", "triton"])
def test_without_a_gpu_the_loaded_backend_serves_and_the_reason_is_visible(requested) -> None:
    loaded = ResidentExperts([_qwen()])
    selection = select_experts(requested, loaded, 2, 64)
    assert selection.backend is loaded
    assert (selection.requested, selection.active) == (requested, "resident")
    assert "triton refused: Triton kernels need a CUDA device, this is cpu" in selection.reason


def test_strict_refuses_a_named_backend_that_cannot_serve() -> None:
    with pytest.raises(ConfigError, match=r"'triton' cannot serve: triton refused: .*--expert-backend auto"):
        select_experts("triton", ResidentExperts([_qwen()]), 2, 64, strict=True)
    assert select_experts("auto", ResidentExperts([_qwen()]), 2, 64, strict=True).active == "resident"


def test_resident_is_served_as_requested() -> None:
    assert select_experts("resident", ResidentExperts([_qwen()]), 2, 64, strict=True).reason == "as requested"


def test_a_backend_of_another_kind_and_a_model_without_experts_stay_as_they_are() -> None:
    other = LoopExperts([_qwen()])
    assert select_experts("auto", other, 2, 64).backend is other
    assert select_experts("auto", None, 0, 64).active == "none"
    with pytest.raises(ConfigError, match="the model's experts are its own code"):
        select_experts("triton", None, 0, 64, strict=True)
