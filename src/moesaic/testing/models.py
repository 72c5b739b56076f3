"""Tiny random models of every proven family: the unmodified transformers model is the oracle of ours."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moesaic.models.families import PROVEN

if TYPE_CHECKING:
    from moesaic.models.hf import HFCausalLM

# Any below: transformers configurations and models are untyped.

_COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # 4 * 16 != 48: a head_dim taken from the quotient fails
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_MLA: dict[str, Any] = {
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
_GROUPS: dict[str, Any] = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
_WINDOW = 6
_WINDOW_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

_SPARSE = ["dense", "sparse", "sparse"]
_WINDOWED: dict[str, Any] = {"sliding_window": _WINDOW, "layer_types": _WINDOW_TYPES}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
}
_THETAS: dict[str, Any] = {"layer_rope_theta": [10000.0, 0.0, 500.0]}
_TWO_ROTARIES: dict[str, Any] = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 8,  # shorter than the test's contexts, so that all position rules act
    "rope_theta": 10000.0,
}
_MISTRAL_YARN = _YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}

_OVERRIDES: dict[str, dict[str, Any]] = {
    "afmoe": _MOE | _WINDOWED | {"num_experts": 8, "num_dense_layers": 1, "mup_enabled": True, "num_shared_experts": 1},
    "axk1": _MOE | _MLA | _GROUPS | {"mlp_layer_types": _SPARSE},
    "beam": _MOE
    | _WINDOWED
    | {
        "num_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "mlp_layer_types": _SPARSE,
        "final_logit_softcapping": 2.0,
        "rope_parameters": _TWO_ROTARIES | {"full_attention": None},
    },
    "cohere2_moe": _WINDOWED
    | {"num_experts": 8, "num_experts_per_tok": 2, "logit_scale": 0.5, "num_shared_experts": 1},
    "deepseek_v2": _MOE | _MLA | _GROUPS | {"first_k_dense_replace": 1, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _MOE | _MLA | _GROUPS | {"first_k_dense_replace": 1, "rope_parameters": _YARN},
    "dots1": _MOE | _GROUPS | _WINDOWED | {"first_k_dense_replace": 1},
    "ernie4_5_moe": {
        "moe_intermediate_size": 24,
        "moe_k": 2,
        "moe_num_experts": 8,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "head_dim": None,
    },
    "exaone_moe": _MOE | _WINDOWED | {"num_experts": 8, "num_shared_experts": 1, "mlp_layer_types": _SPARSE},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": None},
    "flint": _MOE | _WINDOWED | {"num_experts": 8, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    "glm4_moe": _MOE | _GROUPS | {"use_qk_norm": True, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    "glm4_moe_lite": _MOE | _MLA | _GROUPS | {"mlp_layer_types": _SPARSE, "head_dim": None},
    "gpt_oss": _WINDOWED | {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_parameters": _YARN},
    "granitemoe": _GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": None},
    "granitemoe_swa": _GRANITE
    | _WINDOWED
    | _THETAS
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": None, "shared_intermediate_size": 40},
    "granitemoeshared": _GRANITE
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 40, "head_dim": None},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "hy_v3": _MOE | {"num_experts": 8, "num_shared_experts": 1, "mlp_layer_types": _SPARSE},
    "jetmoe": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "kv_channels": 16,
        "head_dim": None,
        "num_attention_heads": None,
    },
    "kolibri1": _MOE | _WINDOWED | {"num_local_experts": 8, "shared_expert_intermediate_size": 40},
    "laguna": _MOE
    | _WINDOWED
    | {
        "num_experts": 8,
        "shared_expert_intermediate_size": 40,
        "mlp_layer_types": _SPARSE,
        "num_attention_heads_per_layer": [4, 2, 4],
        "rope_parameters": _TWO_ROTARIES,
    },
    "mellum": _MOE | _WINDOWED | {"num_local_experts": 8, "rope_parameters": _TWO_ROTARIES},
    "mimo_v2_flash": _MOE
    | _GROUPS
    | _WINDOWED
    | {"v_head_dim": 12, "mlp_layer_types": _SPARSE, "rope_parameters": _TWO_ROTARIES, "n_shared_experts": None},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": _WINDOW},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": None},
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": None, "sliding_window": _WINDOW},
    "qwen2_moe": _MOE
    | _WINDOWED
    | {"num_experts": 8, "shared_expert_intermediate_size": 40, "use_sliding_window": True, "head_dim": None},
    "qwen3_moe": _MOE
    | {"num_experts": 8, "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": _WINDOW},
    "sarvam_mla": _MOE | _MLA | _GROUPS | {"first_k_dense_replace": 1},
    "sarvam_moe": _MOE | _GROUPS | {"use_qk_norm": True, "first_k_dense_replace": 1},
    "solar_open": _MOE | _GROUPS,
    "arcee": {},
    "apertus": {"head_dim": None},
    "cohere": {"head_dim": None, "logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": _WINDOWED | {"logit_scale": 0.5},
    "cwm": _WINDOWED,
    "ernie4_5": {},
    "exaone4": _WINDOWED | {"head_dim": None},
    "gemma": {},
    "gemma2": _WINDOWED | {"query_pre_attn_scalar": 24, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5},
    "gemma3_text": _WINDOWED | {"query_pre_attn_scalar": 24, "rope_parameters": _TWO_ROTARIES},
    "glm": {},
    "glm4": {},
    "granite": _GRANITE | {"head_dim": None},
    "granite_swa": _GRANITE | _WINDOWED | _THETAS | {"head_dim": None},
    "helium": {"head_dim": 12},
    "hunyuan_v1_dense": {},
    "llama": {},
    "ministral": _WINDOWED,
    "ministral3": {"sliding_window": _WINDOW, "rope_parameters": _MISTRAL_YARN | {"llama_4_scaling_beta": 0.1}},
    "mistral": {"sliding_window": _WINDOW},
    "olmo": {"head_dim": None, "clip_qkv": 1.0},
    "olmo2": {"head_dim": None},
    "olmo3": _WINDOWED | {"head_dim": None, "rope_parameters": _TWO_ROTARIES},
    "phi3": {"head_dim": None, "sliding_window": _WINDOW},
    "qwen2": _WINDOWED | {"use_sliding_window": True, "head_dim": None},
    "qwen3": _WINDOWED | {"use_sliding_window": True},
    "seed_oss": {},
    "smollm3": _WINDOWED | {"use_sliding_window": True, "no_rope_layers": [1, 0, 1], "head_dim": None},
    "hyperclovax": _GRANITE | {"use_post_norm": True},
    "jais2": {},
    "vaultgemma": _WINDOWED
    | {"query_pre_attn_scalar": 24, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5},
    "youtu": _MLA,
    "starcoder2": {"sliding_window": _WINDOW, "head_dim": None},
}


def available_families() -> tuple[str, ...]:
    """Return the proven families that the installed transformers has."""
    from transformers import CONFIG_MAPPING

    return tuple(name for name in PROVEN if name in CONFIG_MAPPING)


def tiny_config(family: str, **changes: Any) -> Any:
    """Return a configuration of ``family`` with three layers, grouped queries and several experts, then ``changes``.

    Raises: ``KeyError`` if ``family`` is not proven or the installed transformers lacks it.
    """
    from transformers import CONFIG_MAPPING

    fields = {name: value for name, value in (_COMMON | _OVERRIDES[family] | changes).items() if value is not None}
    return CONFIG_MAPPING[family](**fields)


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return an unmodified transformers model of ``family`` with eager attention and experts.

    No weight is trivial: norms spread around 1, biases and sinks are random, router scores lie far apart so that
    rounding changes no choice of experts. The same ``seed`` gives the same weights.
    ``changes`` replace fields of the configuration.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        tiny_config(family, **changes), attn_implementation="eager", experts_implementation="eager"
    )
    _randomise(model, torch.Generator().manual_seed(seed))
    return model.to(dtype).eval().requires_grad_(False)


def tiny_causal_lm(oracle: Any) -> HFCausalLM:
    """Return our model over the same weights as ``oracle`` (a ``tiny_model``), experts resident."""
    from transformers import AutoModelForCausalLM

    from moesaic.experts.resident import ResidentExperts
    from moesaic.models.hf import IMPLEMENTATION, HFCausalLM

    ours = AutoModelForCausalLM.from_config(
        copy.deepcopy(oracle.config),
        dtype=oracle.dtype,
        attn_implementation=IMPLEMENTATION,
        experts_implementation=IMPLEMENTATION,
    )
    ours.load_state_dict(oracle.state_dict(), assign=True)
    model = HFCausalLM(ours.eval().requires_grad_(False))
    if model.expert_modules:
        model.experts = ResidentExperts(model.expert_modules)
    return model


def save_tiny(family: str, path: Path, *, seed: int = 0, max_shard_size: str = "50GB") -> Any:
    """Write a tiny checkpoint in the layout of the hub (one tensor per expert) and return the model written."""
    model = tiny_model(family, seed)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model


@torch.no_grad()
def _randomise(model: nn.Module, generator: torch.Generator) -> None:
    for name, tensor in [*model.named_parameters(), *_persistent_buffers(model)]:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        tensor.copy_(_spread(name, noise))


def _persistent_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers that a checkpoint holds (router biases), not the computed ones (rotary frequencies)."""
    saved = model.state_dict()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point()]


def _spread(name: str, noise: torch.Tensor) -> torch.Tensor:
    """Return ``noise`` at the scale of the parameter ``name``: activations keep their size through the layers."""
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.2 * noise
    if noise.dim() <= 1:
        return 0.2 * noise
    if "embed" in name:
        return noise
    is_router = "gate.weight" in name or "router" in name
    return torch.mul(noise, (2.0 if is_router else 1.0) * noise.shape[-1] ** -0.5)
