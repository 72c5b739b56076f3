"""Which expert backend serves: what was asked, what is active, and why."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from moesaic.errors import ConfigError, Refused
from moesaic.experts.base import ExpertBackend
from moesaic.experts.resident import ResidentExperts
from moesaic.experts.triton import TritonExperts, triton_experts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSelection:
    """The backend that serves, beside the one that was asked for."""

    backend: ExpertBackend | None
    """None: the model has no routed experts that a backend could compute."""
    requested: str
    active: str
    reason: str


def select_experts(
    requested: str, loaded: ExpertBackend | None, num_experts_per_token: int, max_tokens: int, *, strict: bool = False
) -> ExpertSelection:
    """Return the backend named ``requested`` over the experts that ``loaded`` holds, or for ``auto`` the fastest.

    ``max_tokens``: most tokens of one step, for which memory is set aside. A named backend that cannot serve is
    replaced by ``loaded``, unless ``strict``; so is one that can serve some of the layers only.
    Raises: ``ConfigError`` if ``strict`` and the named backend cannot serve every layer.
    """
    selection = _choose(requested, loaded, num_experts_per_token, max_tokens)
    if strict and requested != "auto" and (selection.active != requested or "refused" in selection.reason):
        raise ConfigError(f"expert backend {requested!r} cannot serve: {selection.reason}; use --expert-backend auto")
    logger.info("experts: requested=%s active=%s reason=%s", requested, selection.active, selection.reason)
    return selection


def _choose(
    requested: str, loaded: ExpertBackend | None, num_experts_per_token: int, max_tokens: int
) -> ExpertSelection:
    if isinstance(loaded, TritonExperts):  # the model served another engine before
        loaded = loaded.resident
    if loaded is None:
        return _selection(None, requested, "none", "the model's experts are its own code")
    if requested == "resident" or not isinstance(loaded, ResidentExperts):
        return _selection(loaded, requested, loaded.name, "as requested" if requested == loaded.name else "as loaded")
    fused = triton_experts(loaded, num_experts_per_token, max_tokens)
    if isinstance(fused, Refused):
        return _selection(loaded, requested, loaded.name, f"triton refused: {fused}")
    reason = "the fastest backend here" if requested == "auto" else "as requested"
    if fused.refusals:
        first = next(iter(fused.refusals.values()))
        reason = f"{reason}; triton refused {len(fused.refusals)} layers, which are resident: {first}"
    return _selection(fused, requested, fused.name, reason)


def _selection(backend: ExpertBackend | None, requested: str, active: str, reason: str) -> ExpertSelection:
    return ExpertSelection(backend=backend, requested=requested, active=active, reason=reason)
