"""The seam between a model's attention layers and the kernels that read paged KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from moesaic.batch import RaggedBatch
    from moesaic.errors import Refused
    from moesaic.kv.geometry import KVGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """What one layer's attention call may carry besides its tensors."""

    scale: float
    sliding_window: int | None = None
    """Each query sees itself and the ``sliding_window - 1`` tokens before it; None sees all."""
    logit_softcap: float | None = None
    sinks: torch.Tensor | None = None
    """[H] learned logits that take part in the softmax and are then dropped (gpt-oss)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLimits:
    """The largest step that an engine can make, for which a backend sets memory aside."""

    geometry: KVGeometry
    num_query_heads: int
    dtype: torch.dtype
    """Of queries, keys, values and output."""
    max_rows: int
    max_tokens: int
    """Query tokens of one step."""
    max_pages: int
    """KV blocks of the pool."""


class AttentionBackend(Protocol):
    """Plans once per step, runs once per layer. Holds no step between calls."""

    name: str

    def supports(self, geometry: KVGeometry) -> Refused | None:
        """Return why this backend cannot serve these layers, or None if it can."""
        ...

    def prepare(self, limits: AttentionLimits) -> None:
        """Set aside what the largest step needs; called once, before the first ``plan``.

        Raises: ``ConfigError`` if that cannot be had.
        """
        ...

    def plan(self, batch: RaggedBatch) -> Any:
        """Return the backend's own metadata for one step (Any: opaque to everyone else)."""
        ...

    def run(
        self,
        plan: Any,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        params: AttentionParams,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention output [T, H, Dv] of the step's query tokens [T, H, D]; in ``out`` if it is given.

        The step's own keys and values are already in the pages (``[N, B, K, D]`` and ``[N, B, K, Dv]``):
        row ``r`` sees positions ``[0, kv_seq_lengths[r])`` of its block table, causally.
        """
        ...
