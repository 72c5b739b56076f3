"""What a model says of itself, read from its configuration alone (no tensors, no torch)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moesaic.errors import ModelLoadError, UnsupportedModelError
from moesaic.kv.geometry import LayerKVShape
from moesaic.models.base import ModelInfo
from moesaic.models.families import Family, family_of

# Any below: transformers configurations are untyped and differ per family.

_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def model_info(config: Any, generation_config: Any = None) -> ModelInfo:
    """Return the description of a model with this configuration.

    Raises: ``UnsupportedModelError`` for a family or an option of it that is not proven, ``ModelLoadError`` if a
    field is missing.
    """
    family = family_of(config.model_type)
    _refuse_options(config)
    try:
        return ModelInfo(
            family=family.model_type,
            num_layers=config.num_hidden_layers,
            vocab_size=config.vocab_size,
            max_model_len=max_model_len(config),
            kv_shapes=tuple(kv_shape(family, config, layer) for layer in range(config.num_hidden_layers)),
            num_query_heads=config.num_attention_heads,
            eos_token_ids=eos_token_ids(config, generation_config),
            num_experts=0 if family.experts == "none" else next(iter(_values(config, _NUM_EXPERTS))),
            num_experts_per_token=0 if family.experts == "none" else int(config.num_experts_per_tok),
        )
    except (AttributeError, StopIteration, TypeError) as error:
        raise ModelLoadError(
            f"the configuration of this {family.model_type} model lacks a field or has one per layer: {error}"
        ) from error


def kv_shape(family: Family, config: Any, layer: int) -> LayerKVShape:
    """Return what ``layer`` stores per token."""
    if family.kv == "mla":
        key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        return LayerKVShape(num_kv_heads=config.num_attention_heads, key_dim=key_dim, value_dim=config.v_head_dim)
    head_dim = _head_dim(config)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if family.kv == "repeated":
        return LayerKVShape(num_kv_heads=heads * config.num_experts_per_tok, key_dim=head_dim, value_dim=head_dim)
    if family.kv == "wide_window":
        heads *= 2 if config.layer_types[layer] == "sliding_attention" else 1
        return LayerKVShape(num_kv_heads=heads, key_dim=head_dim, value_dim=config.v_head_dim)
    return LayerKVShape(num_kv_heads=heads, key_dim=head_dim, value_dim=head_dim)


def max_model_len(config: Any) -> int:
    """Return the context the model was made for, in tokens.

    YaRN states it as factor times the original context. LongRoPE chooses its frequencies by the longest position
    of a step, so a sequence would depend on its neighbours: only the original context is served, where it does not.
    Source: the YaRN paper (arXiv 2309.00071), section 3; transformers' ``dynamic_rope_update``.
    """
    context = int(config.max_position_embeddings)
    for rope in _rope_parameters(config):
        original = int(rope.get("original_max_position_embeddings") or context)
        if rope.get("rope_type") == "yarn":
            context = max(context, int(original * rope["factor"]))
        elif rope.get("rope_type") == "longrope":
            context = min(context, original)
    return context


def eos_token_ids(config: Any, generation_config: Any = None) -> tuple[int, ...]:
    """Return the tokens that end an output: the generation configuration's, else the model's."""
    for source in (generation_config, config):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(dict.fromkeys(ids if isinstance(ids, list | tuple) else [ids]))
    return ()


def _refuse_options(config: Any) -> None:
    """Return if no option of a proven family makes it another model.

    Raises: ``UnsupportedModelError`` naming the option.
    """
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModelError(
            f"this {config.model_type} model attends to later tokens too (use_bidirectional_attention); "
            "only causal models can be served"
        )
    if any(rope.get("rope_type") == "dynamic" for rope in _rope_parameters(config)):
        raise UnsupportedModelError(
            f"this {config.model_type} model has rope_type 'dynamic', whose frequencies follow the longest sequence "
            "of a step; set rope_type to 'yarn' or remove the scaling in its config.json"
        )


def _head_dim(config: Any) -> int:
    # Some families have heads * head_dim != width: the quotient is right only where the family itself takes it.
    head_dim = getattr(config, "head_dim", None)
    return int(head_dim if head_dim is not None else config.hidden_size // config.num_attention_heads)


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Return the rotary parameter sets: one, or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [entry for entry in rope.values() if isinstance(entry, dict)]


def _values(config: Any, names: Iterable[str]) -> Iterable[int]:
    found = (getattr(config, name, None) for name in names)
    return (int(value) for value in found if value is not None)
