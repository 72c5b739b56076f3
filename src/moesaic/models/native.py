"""A lean definition of the hot families over the weights of transformers' modules, with fused operations.

Why beside transformers' own layers: those launch some forty small kernels a layer, and on an H200 a decode step of
Qwen3-30B-A3B waits for launches, not for the device (docs/benchmarks). ``HFCausalLM`` stays the oracle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from moesaic.attention.base import AttentionParams
from moesaic.errors import InvariantError, Refused
from moesaic.kernels.few_rows import linear
from moesaic.kernels.select import Kernels, kernels_for

if TYPE_CHECKING:
    from moesaic.experts.base import ExpertBackend
    from moesaic.models.base import StepContext
    from moesaic.models.hf import HFCausalLM

# Any below: transformers modules and configurations are untyped.

FAMILIES = ("mixtral", "qwen3_moe")
"""Attention with grouped queries and rotation by halves, every layer's MLP routed by a softmax over all experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """The weights of one layer; norms [C] and [D], the rest [out, in]."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    expert_norm: torch.Tensor
    router: torch.Tensor
    attention: AttentionParams

    @classmethod
    def of(cls, layer: Any) -> _Layer:
        attention = layer.self_attn
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        return cls(
            input_norm=layer.input_layernorm.weight,
            qkv=_fused(attention.q_proj, attention.k_proj, attention.v_proj),
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            output=attention.o_proj.weight,
            expert_norm=layer.post_attention_layernorm.weight,
            router=layer.mlp.gate.weight,
            # Qwen3-MoE keeps its window on the module, Mixtral reads the configuration's in each call.
            attention=AttentionParams(
                scale=attention.scaling,
                sliding_window=getattr(attention, "sliding_window", None) or attention.config.sliding_window,
            ),
        )


class NativeCausalLM:
    """A ``CausalLM`` over the weights of ``adapter``, which stays usable: its projections become views of fused ones.

    Raises: ``InvariantError`` for a model that ``native_refusal`` refuses.
    """

    def __init__(self, adapter: HFCausalLM) -> None:
        if refusal := native_refusal(adapter):
            raise InvariantError(f"{adapter.info.family} has no native definition: {refusal}")
        self.adapter = adapter
        self.info = adapter.info
        self.dtype = adapter.dtype
        self.device = adapter.device
        self.experts: ExpertBackend | None = adapter.experts
        self.kernels: Kernels = kernels_for(adapter.device)
        decoder, config = adapter.hf_model.model, adapter.hf_model.config
        self._embedding: torch.Tensor = decoder.embed_tokens.weight
        self._norm: torch.Tensor = decoder.norm.weight
        self._head: torch.Tensor = adapter.hf_model.lm_head.weight
        self._layers = tuple(map(_Layer.of, decoder.layers[: self.info.num_layers]))
        self._eps: float = config.rms_norm_eps
        self._renormalises: bool = getattr(config, "norm_topk_prob", True)
        self._num_kv_heads = self.info.kv_shapes[0].num_kv_heads
        self._cos_sin = _cos_sin_table(decoder.rotary_emb, self.info.max_model_len, self._embedding)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return hidden states [T, C] of ``token_ids`` [T]."""
        return functional.embedding(token_ids, self._embedding)

    def layers(self, hidden: torch.Tensor, first: int, last: int, context: StepContext) -> torch.Tensor:
        """Return hidden states [T, C] after layers ``[first, last)``."""
        residual: torch.Tensor | None = None
        for index in range(first, last):
            query, residual = self.project(index, hidden, residual, context)
            mixed = context.attention.run(
                context.attention_plan, query, *context.store.pages(index), self.attention_params(index)
            )
            hidden, residual = self.route(index, mixed, residual, context)
        return hidden if residual is None else hidden + residual

    # A layer is ``project``, attention, ``route``; hidden states are ``hidden + residual`` between them.

    def attention_params(self, index: int) -> AttentionParams:
        """Return what layer ``index`` asks of attention."""
        return self._layers[index].attention

    def project(
        self, index: int, hidden: torch.Tensor, residual: torch.Tensor | None, context: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries [T, H, D] of layer ``index`` and the sum of its inputs [T, C]; write its KV."""
        layer, batch = self._layers[index], context.batch
        normed, residual = self.kernels.rms_norm(hidden, layer.input_norm, self._eps, residual)
        query = self.kernels.norm_rope_write(
            functional.linear(normed, layer.qkv), layer.q_norm, layer.k_norm, self._cos_sin, batch.positions,
            batch.slot_mapping, *context.store.pages(index), self._eps, self.info.num_query_heads, self._num_kv_heads,
        )  # fmt: skip
        return query, residual

    def route(
        self, index: int, mixed: torch.Tensor, residual: torch.Tensor, context: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts' output [T, C] of layer ``index`` after attention [T, H, D], and what to add to it."""
        assert self.experts is not None  # native_refusal asks for them
        layer = self._layers[index]
        hidden = functional.linear(mixed.reshape(len(mixed), -1), layer.output)
        normed, residual = self.kernels.rms_norm(hidden, layer.expert_norm, self._eps, residual)
        weights, ids = self.kernels.route(
            functional.linear(normed, layer.router),
            self.info.num_experts_per_token,
            self._renormalises,
            context.batch.num_valid_tokens,
        )
        return self.experts.forward(index, normed, ids, weights), residual

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [S, V] in float32 for hidden states [S, C]."""
        normed, _ = self.kernels.rms_norm(hidden, self._norm, self._eps)
        return linear(normed, self._head).float()


def native_refusal(adapter: HFCausalLM) -> Refused | None:
    """Return why the native definition is not this model, or None if it is."""
    if adapter.info.family not in FAMILIES:
        return Refused(f"there is a native definition of {', '.join(FAMILIES)}, not of {adapter.info.family}")
    config = adapter.hf_model.config
    if len(adapter.expert_modules) != adapter.info.num_layers or adapter.experts is None:
        return Refused("some layers have no routed experts")
    if getattr(config, "attention_bias", False):
        return Refused("its attention projections have biases")
    if config.hidden_act != "silu":
        return Refused(f"its activation is {config.hidden_act}, not silu")
    if len(set(adapter.info.kv_shapes)) != 1:
        return Refused("its layers store KV of different shapes")
    return None


def _fused(*projections: Any) -> torch.Tensor:
    """Return the weights of linear layers one below the other, each layer's now a view of its part."""
    fused = torch.cat([projection.weight.data for projection in projections])
    first = 0
    for projection in projections:
        num_rows = len(projection.weight)
        projection.weight.data = fused[first : first + num_rows]
        first += num_rows
    return fused


@torch.no_grad()
def _cos_sin_table(rotary: Any, num_positions: int, like: torch.Tensor) -> torch.Tensor:
    """Return float32 [num_positions, D]: half the cosines and half the sines (the other halves are the same)."""
    positions = torch.arange(num_positions, device=like.device)[None]
    cos, sin = rotary(like.new_empty(0, dtype=torch.float32), positions)
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1).float().contiguous()
