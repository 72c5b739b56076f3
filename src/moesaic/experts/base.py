"""The seam between a model's routers and the place where expert weights live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from moesaic.batch import RaggedBatch


class ExpertBackend(Protocol):
    """Computes the routed experts of one layer at a time, wherever their weights live."""

    name: str

    def begin_step(self, batch: RaggedBatch) -> None:
        """Prepare for one step (an offloading backend plans its transfers here)."""
        ...

    def forward(
        self, layer: int, x: torch.Tensor, top_k_ids: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of expert outputs [T, C] for ``x`` [T, C], ids and weights [T, A]."""
        ...

    def stats(self) -> dict[str, Any]:
        """Return counters for ``stats()`` (Any: numbers and short texts)."""
        ...
