"""How many bytes a model's weights will take, without loading them."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.errors import ModelLoadError
from moesaic.models.loader import meta_model

if TYPE_CHECKING:
    import torch

_FLOAT_TYPES = frozenset({"F64", "F32", "F16", "BF16"})


def weights_bytes(path: Path, config: Any, dtype: torch.dtype, *, load_format: str = "auto") -> tuple[int, str]:
    """Return the bytes of the weights in ``path`` served in ``dtype``, and what that is computed from.

    Read from the headers of the safetensors files if all are there, tensors that the model leaves unused included;
    else, and for ``load_format`` "dummy", from the configuration (Any: transformers' object). Loads no tensor.
    Raises: ``ModelLoadError`` for a file that is truncated or corrupt.
    """
    shards = _shards(path) if load_format == "auto" else ()
    if not shards or not all(shard.exists() for shard in shards):
        return _bytes_from_config(config, dtype), "configuration"
    tensors = (tensor for shard in shards for tensor in _header(shard))
    return sum(_served_bytes(tensor, dtype.itemsize) for tensor in tensors), "checkpoint"


def _shards(path: Path) -> tuple[Path, ...]:
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return (path / "model.safetensors",)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return tuple(path / shard for shard in sorted(set(weight_map.values())))
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{index} cannot be read ({error}); download the checkpoint again") from error


def _header(shard: Path) -> list[dict[str, Any]]:
    """Return type, shape and place of each tensor. Source: safetensors' format page: u64 length, then JSON."""
    num_bytes = shard.stat().st_size
    try:
        with open(shard, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            fields = json.loads(file.read(min(length, num_bytes)))
        tensors = [tensor for name, tensor in fields.items() if name != "__metadata__"]
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    except (OSError, struct.error, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ModelLoadError(f"{shard} is truncated or corrupt ({error}); download it again") from error
    if end > num_bytes:
        raise ModelLoadError(f"{shard} is truncated ({num_bytes} of {end} bytes); download it again")
    return tensors


def _served_bytes(tensor: dict[str, Any], element_bytes: int) -> int:
    begin, end = tensor["data_offsets"]
    return math.prod(tensor["shape"]) * element_bytes if tensor["dtype"] in _FLOAT_TYPES else int(end - begin)


def _bytes_from_config(config: Any, dtype: torch.dtype) -> int:
    tensors = {id(t): t for t in meta_model(config, dtype).state_dict(keep_vars=True).values()}  # tied ones once
    return sum(t.numel() * t.element_size() for t in tensors.values())
