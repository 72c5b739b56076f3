"""Which attention backend serves: what was asked, what is active, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from moesaic.attention.base import AttentionBackend
from moesaic.errors import ConfigError, Refused
from moesaic.kv.geometry import KVGeometry

logger = logging.getLogger(__name__)

Factory = Callable[[torch.device], AttentionBackend | Refused]
"""Makes a backend for a device, or says why it cannot: its library is missing, the device is too old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The backend that serves, beside the one that was asked for."""

    backend: AttentionBackend
    requested: str
    active: str
    reason: str


def select_attention(
    requested: str, geometry: KVGeometry, device: torch.device | str, strict: bool = False
) -> Selection:
    """Return the backend named ``requested``, or for ``auto`` the fastest that can serve these layers here.

    A named backend that cannot serve is replaced by ``torch``, unless ``strict``.
    Raises: ``ConfigError`` for unknown names, and if ``strict`` for a backend that cannot serve.
    """
    selection = choose_backend(requested, geometry, torch.device(device), strict, FACTORIES)
    logger.info("attention: requested=%s active=%s reason=%s", requested, selection.active, selection.reason)
    return selection


def choose_backend(
    requested: str, geometry: KVGeometry, device: torch.device, strict: bool, factories: Mapping[str, Factory]
) -> Selection:
    """Return the choice among ``factories``, the fastest first and the one that serves everything last."""
    if requested != "auto" and requested not in factories:
        known = ", ".join(["auto", *factories])
        raise ConfigError(f"attention backend {requested!r} is not known; choose one of {known} (--attention-backend)")
    fallback = list(factories)[-1]
    candidates = list(factories) if requested == "auto" else list(dict.fromkeys([requested, fallback]))
    refusals: list[str] = []
    for name in candidates:
        made = _make(factories[name], geometry, device)
        if not isinstance(made, Refused):
            reason = "; ".join(refusals) or ("the fastest backend here" if requested == "auto" else "as requested")
            return Selection(backend=made, requested=requested, active=name, reason=reason)
        refusals.append(f"{name} refused: {made}")
        if strict and requested != "auto":
            break
    raise ConfigError(
        f"attention backend {requested!r} cannot serve: {'; '.join(refusals)}; use --attention-backend auto"
    )


def _make(factory: Factory, geometry: KVGeometry, device: torch.device) -> AttentionBackend | Refused:
    made = factory(device)
    return made if isinstance(made, Refused) else made.supports(geometry) or made


def _torch_backend(device: torch.device) -> AttentionBackend:
    from moesaic.attention.reference import TorchAttention

    return TorchAttention()


def _flashinfer_backend(device: torch.device) -> AttentionBackend | Refused:
    from moesaic.attention.flashinfer import flashinfer_backend

    return flashinfer_backend(device)


FACTORIES: dict[str, Factory] = {"flashinfer": _flashinfer_backend, "torch": _torch_backend}
"""By name, the fastest first; the last serves everything."""
