"""What the runner needs of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from moesaic.attention.base import AttentionBackend
    from moesaic.batch import RaggedBatch
    from moesaic.experts.base import ExpertBackend
    from moesaic.kv.geometry import LayerKVShape
    from moesaic.kv.store import LayeredPagedKVStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a loaded model says of itself (no tensors)."""

    family: str
    """transformers' ``model_type``."""
    num_layers: int
    vocab_size: int
    max_model_len: int
    """The context the model was made for, in tokens."""
    kv_shapes: tuple[LayerKVShape, ...]
    num_query_heads: int
    eos_token_ids: tuple[int, ...]
    num_experts: int
    """0 for a dense model."""
    num_experts_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """All that one forward needs besides hidden states; travels as an argument, never as a global."""

    batch: RaggedBatch
    store: LayeredPagedKVStore
    attention: AttentionBackend
    attention_plan: Any
    """From ``attention.plan(batch)`` (Any: opaque)."""


class CausalLM(Protocol):
    """A language model driven layer by layer over a ragged batch (``T`` tokens, width ``C``)."""

    info: ModelInfo
    dtype: torch.dtype
    device: torch.device
    experts: ExpertBackend | None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return hidden states [T, C] of ``token_ids`` [T]."""
        ...

    def layers(self, hidden: torch.Tensor, first: int, last: int, context: StepContext) -> torch.Tensor:
        """Return hidden states [T, C] after layers ``[first, last)``."""
        ...

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [S, V] in float32 for the hidden states [S, C] of the rows that need them."""
        ...
