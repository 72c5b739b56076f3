"""Transformers' own modelling code, driven layer by layer over a ragged batch through two hooks.

The only importer of modelling code. ``layer(...)`` of every family forwards unknown keywords to its attention
function, which is how the step travels; experts modules carry a binding of their own, set once at load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface

from moesaic.attention.base import AttentionParams
from moesaic.errors import InvariantError
from moesaic.kernels.few_rows import linear
from moesaic.models.families import Family, family_of
from moesaic.models.info import model_info

if TYPE_CHECKING:
    from moesaic.experts.base import ExpertBackend
    from moesaic.models.base import StepContext

IMPLEMENTATION = "moesaic"
"""The name under which both functions are registered and configurations select them."""

_BINDING = "moesaic_binding"
_WINDOW = "moesaic_window"
_PositionEmbeddings = Any  # a (cos, sin) pair, one complex tensor or None: the family's own business


@dataclass(frozen=True, slots=True)
class _ExpertBinding:
    """Ties one experts module to its model and layer. A plain object, so it is no submodule and no parameter."""

    model: HFCausalLM
    layer: int


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    step_context: StepContext,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write this step's K and V to the pages and return attention over them, [1, T, H, Dv].

    Shapes: query [1, H, T, D], key [1, K, T, D], value [1, K, T, Dv]. ``attention_mask`` is never built for a
    custom implementation name; the parameter names are those that families pass by keyword.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]  # nn.Module types every attribute as Tensor | Module
    step_context.store.write(layer, step_context.batch.slot_mapping, key[0].transpose(0, 1), value[0].transpose(0, 1))
    params = AttentionParams(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window or module.__dict__.get(_WINDOW),
        logit_softcap=softcap,
        sinks=s_aux,
    )
    key_pages, value_pages = step_context.store.pages(layer)
    output = step_context.attention.run(
        step_context.attention_plan, query[0].transpose(0, 1), key_pages, value_pages, params
    )
    return output[None], None


def routed_experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the routed experts' output [T, C] from the backend of the model that owns ``module``."""
    binding: _ExpertBinding = module.__dict__[_BINDING]
    backend = binding.model.experts
    if backend is None:
        raise InvariantError(f"layer {binding.layer} has experts but the model has no expert backend")
    return backend.forward(binding.layer, hidden_states, top_k_index, top_k_weights)


AttentionInterface.register(IMPLEMENTATION, paged_attention)
ExpertsInterface.register(IMPLEMENTATION, routed_experts)


class HFCausalLM:
    """A ``CausalLM`` over one transformers model (see ``models/base.py`` for the verbs).

    ``expert_modules`` are the experts modules by layer, for whoever builds an expert backend; ``experts`` is that
    backend, and may be replaced between steps.
    """

    def __init__(self, model: Any) -> None:  # Any: transformers is untyped
        """Take over ``model``, built with both implementations named ``moesaic``.

        Raises: ``UnsupportedModelError`` for a family that is not proven.
        """
        self.hf_model = model
        self.info = model_info(model.config, getattr(model, "generation_config", None))
        self.dtype: torch.dtype = model.model.embed_tokens.weight.dtype
        self.device: torch.device = model.model.embed_tokens.weight.device
        self.experts: ExpertBackend | None = None
        self._family: Family = family_of(self.info.family)
        self._layers: list[nn.Module] = list(model.model.layers[: self.info.num_layers])
        self._embedding_scale = _embedding_scale(self._family, model.config)
        self.expert_modules = self._bind_experts() if self._family.experts == "backend" else {}
        if self._family.is_window_in_mask:
            self._bind_windows()

    def _bind_experts(self) -> dict[int, nn.Module]:
        """Return the experts modules by layer, each bound to this model."""
        found: dict[int, nn.Module] = {}
        for layer, decoder_layer in enumerate(self._layers):
            for module in decoder_layer.modules():
                if getattr(module, "_apply_gate", None) is not None and hasattr(module, "has_gate"):
                    module.__dict__[_BINDING] = _ExpertBinding(self, layer)
                    module.__dict__.setdefault("has_post_expert_norm", False)  # new in transformers after 5.17
                    found[layer] = module
        return found

    def _bind_windows(self) -> None:
        """Give attention modules the window that their family would have put into a mask."""
        config = self.hf_model.config
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * self.info.num_layers
        for decoder_layer, kind in zip(self._layers, kinds, strict=True):
            if kind == "sliding_attention":
                decoder_layer.self_attn.__dict__[_WINDOW] = config.sliding_window

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return hidden states [T, C] of ``token_ids`` [T]."""
        hidden: torch.Tensor = self.hf_model.model.embed_tokens(token_ids)
        return hidden if self._embedding_scale == 1.0 else hidden * self._embedding_scale

    def layers(self, hidden: torch.Tensor, first: int, last: int, context: StepContext) -> torch.Tensor:
        """Return hidden states [T, C] after layers ``[first, last)``."""
        hidden, positions = hidden[None], context.batch.positions[None]
        keywords = _position_keywords(self._family, self.hf_model.model, hidden, positions)
        for layer in range(first, last):
            hidden = self._layers[layer](
                hidden, attention_mask=None, position_ids=positions, step_context=context, **keywords(layer)
            )
        return hidden[0]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [S, V] in float32 for hidden states [S, C]."""
        logits = _vocabulary_scores(self.hf_model.lm_head, self.hf_model.model.norm(hidden[None])[0]).float()
        config, family = self.hf_model.config, self._family
        if family.logits_multiplier is not None:
            logits = logits * getattr(config, family.logits_multiplier)
        if family.logits_divisor is not None:
            logits = logits / getattr(config, family.logits_divisor)
        cap = None if family.logits_softcap is None else getattr(config, family.logits_softcap)
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _embedding_scale(family: Family, config: Any) -> float:
    if family.embedding_multiplier is not None:
        return float(getattr(config, family.embedding_multiplier))
    if family.scales_embedding_by_width and config.mup_enabled:
        return float(config.hidden_size**0.5)
    return 1.0


def _vocabulary_scores(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Return [S, V]: the largest product of a step of few rows, and so by the kernel for those where it can be."""
    if type(head) is nn.Linear and getattr(head, "bias", None) is None:  # a subclass may do more
        return linear(hidden, head.weight)
    scores: torch.Tensor = head(hidden)
    return scores


def _position_keywords(family: Family, decoder: Any, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
    """Return a function from layer index to that layer's position keywords, computed once per step.

    ``positions`` is [1, T]. Any: a callable that returns what the family's layers take.
    """
    config = decoder.config
    if family.rotary == "shared":
        shared = {"position_embeddings": decoder.rotary_emb(hidden, positions)}
        return lambda layer: shared
    if family.rotary == "layer_theta":
        by_theta: dict[float, _PositionEmbeddings] = {
            rotary.config.rope_parameters["rope_theta"]: rotary(hidden, positions) for rotary in decoder.rotary_embs
        }
        return lambda layer: {"position_embeddings": by_theta.get(config.layer_rope_theta[layer])}
    rotates = {kind: config.rope_parameters[kind] is not None for kind in set(config.layer_types)}
    by_type = {
        kind: {"position_embeddings": decoder.rotary_emb(hidden, positions, kind) if rotates[kind] else None}
        for kind in rotates
    }
    if family.rotary == "layer_type_or_scaling":
        for kind, keywords in by_type.items():
            keywords["attention_scaling"] = None if rotates[kind] else _query_scaling(positions)
    return lambda layer: by_type[config.layer_types[layer]]


def _query_scaling(positions: torch.Tensor) -> torch.Tensor:
    """Return beam's query scale per position, [1, 1, T, 1]."""
    from transformers.models.beam.modeling_beam import compute_attention_scaling

    scaling: torch.Tensor = compute_attention_scaling(positions)
    return scaling
