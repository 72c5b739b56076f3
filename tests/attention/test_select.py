"""Requested and active backend are both visible, and a fallback has a reason."""

from typing import Any

import pytest
import torch

from moesaic.attention.base import AttentionBackend
from moesaic.attention.reference import TorchAttention
from moesaic.attention.select import choose_backend, select_attention
from moesaic.errors import ConfigError, Refused
from moesaic.kv.geometry import KVGeometry, LayerKVShape

GEOMETRY = KVGeometry(layers=(LayerKVShape(num_kv_heads=2, key_dim=24, value_dim=16),), block_size=16, element_bytes=2)


class EvenDimsOnly:
    """A fast backend that wants equal key and value dims."""

    name = "picky"

    def supports(self, geometry: KVGeometry) -> Refused | None:
        return Refused("key and value dims differ")

    def prepare(self, limits: Any) -> None:
        raise AssertionError("never chosen")

    def plan(self, batch: Any) -> Any:
        raise AssertionError("never chosen")

    def run(self, *args: Any) -> torch.Tensor:
        raise AssertionError("never chosen")


def _picky(device: torch.device) -> AttentionBackend:
    return EvenDimsOnly()


def _missing(device: torch.device) -> Refused:
    return Refused(f"its library is not installed for {device.type}")


def _torch(device: torch.device) -> AttentionBackend:
    return TorchAttention()


FACTORIES = {"missing": _missing, "picky": _picky, "torch": _torch}


@pytest.mark.parametrize("requested", ["auto", "torch"])
@pytest.mark.parametrize("strict", [False, True])
def test_torch_serves_a_cpu(requested, strict) -> None:
    selection = select_attention(requested, GEOMETRY, "cpu", strict)
    assert isinstance(selection.backend, TorchAttention)
    assert (selection.requested, selection.active) == (requested, "torch")
    assert selection.reason


def test_an_unknown_name_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"'flash' is not known; choose one of auto, .*torch"):
        select_attention("flash", GEOMETRY, "cpu", strict=False)


def test_auto_takes_the_first_that_can_and_says_why_not_the_others() -> None:
    selection = choose_backend("auto", GEOMETRY, torch.device("cpu"), True, FACTORIES)
    assert selection.active == "torch"
    assert "missing refused: its library" in selection.reason
    assert "picky refused: key and value dims differ" in selection.reason


@pytest.mark.parametrize("requested", ["missing", "picky"])
def test_a_named_backend_that_cannot_serve_is_replaced_with_the_reason(requested) -> None:
    selection = choose_backend(requested, GEOMETRY, torch.device("cpu"), False, FACTORIES)
    assert (selection.requested, selection.active) == (requested, "torch")
    assert selection.reason.startswith(f"{requested} refused: ")


@pytest.mark.parametrize("requested", ["missing", "picky"])
def test_strict_turns_the_replacement_into_an_error(requested) -> None:
    with pytest.raises(ConfigError, match=rf"{requested} refused: .*--attention-backend auto"):
        choose_backend(requested, GEOMETRY, torch.device("cpu"), True, FACTORIES)
