"""Which definition of the model serves: what was asked, what is active, and why."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesaic.errors import ConfigError
from moesaic.models.hf import HFCausalLM
from moesaic.models.native import NativeCausalLM, native_refusal

if TYPE_CHECKING:
    from moesaic.models.base import CausalLM

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSelection:
    """The definition that serves, beside the one that was asked for."""

    model: CausalLM
    requested: str
    active: str
    reason: str


def select_model(requested: str, loaded: CausalLM, *, strict: bool = False) -> ModelSelection:
    """Return the definition named ``requested`` of the ``loaded`` model, or for ``auto`` the fastest.

    ``native`` where it cannot serve is replaced by ``transformers``, unless ``strict``.
    Raises: ``ConfigError`` if ``strict`` then.
    """
    selection = _choose(requested, loaded)
    if strict and requested != "auto" and selection.active != requested:
        raise ConfigError(f"model definition {requested!r} cannot serve: {selection.reason}; use --model-impl auto")
    logger.info("model: requested=%s active=%s reason=%s", requested, selection.active, selection.reason)
    return selection


def _choose(requested: str, loaded: CausalLM) -> ModelSelection:
    adapter = loaded.adapter if isinstance(loaded, NativeCausalLM) else loaded
    if requested == "transformers" or not isinstance(adapter, HFCausalLM):
        reason = "as requested" if requested == "transformers" else "as given"
        return ModelSelection(model=adapter, requested=requested, active="transformers", reason=reason)
    if requested == "auto" and adapter.device.type != "cuda":
        reason = "native has fused operations for CUDA devices only"
        return ModelSelection(model=adapter, requested=requested, active="transformers", reason=reason)
    if refusal := native_refusal(adapter):
        reason = f"native refused: {refusal}"
        return ModelSelection(model=adapter, requested=requested, active="transformers", reason=reason)
    reason = "the fastest here" if requested == "auto" else "as requested"
    return ModelSelection(model=NativeCausalLM(adapter), requested=requested, active="native", reason=reason)
