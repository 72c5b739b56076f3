"""Notes which experts each token of one forward was routed to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from moesaic.batch import RaggedBatch
    from moesaic.experts.base import ExpertBackend


class TracedExperts:
    """An ``ExpertBackend`` around another one, for one forward."""

    def __init__(self, experts: ExpertBackend) -> None:
        self.name = experts.name
        self._experts = experts
        self._ids: dict[int, list[torch.Tensor]] = {}

    def begin_step(self, batch: RaggedBatch) -> None:
        self._experts.begin_step(batch)

    def forward(
        self, layer: int, x: torch.Tensor, top_k_ids: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        self._ids.setdefault(layer, []).append(top_k_ids.to(torch.int16))
        return self._experts.forward(layer, x, top_k_ids, top_k_weights)

    def stats(self) -> dict[str, Any]:
        return self._experts.stats()

    def routed(self) -> torch.Tensor:
        """Return the expert ids [T, L, A] of all tokens so far, int16, over the layers that have experts."""
        return torch.stack([torch.cat(parts) for _, parts in sorted(self._ids.items())], dim=1)
