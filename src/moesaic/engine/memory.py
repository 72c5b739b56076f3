"""How many KV blocks to allocate: what was asked for, or what fits."""

import os
from dataclasses import dataclass

import torch

from moesaic.config import EngineConfig
from moesaic.errors import ConfigError
from moesaic.kv.geometry import KVGeometry, blocks_for_tokens

CPU_KV_SHARE = 0.25
"""Of the free memory of the machine: weights are loaded already, activations and other programs need the rest."""
CUDA_KV_SHARE = 0.80
"""Of the free memory of the GPU once the weights are loaded; the rest is for activations and workspaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The KV blocks to allocate and where the number comes from."""

    num_kv_blocks: int
    kv_bytes: int
    reason: str


def plan_memory(config: EngineConfig, geometry: KVGeometry, max_model_len: int, num_free_bytes: int) -> MemoryPlan:
    """Return the KV blocks for ``config``: given, from ``kv_cache_bytes``, or from ``num_free_bytes``.

    Without a wish the plan never takes more than ``max_batch_size`` requests of ``max_model_len`` tokens can use.
    Raises: ``ConfigError`` with both numbers if the wish exceeds the free memory or not one block fits.
    """
    if config.num_kv_blocks is not None:
        num_blocks, reason = config.num_kv_blocks, "num_kv_blocks"
    elif config.kv_cache_bytes is not None:
        num_blocks, reason = geometry.num_blocks_for_bytes(config.kv_cache_bytes), "kv_cache_bytes"
    else:
        useful = config.max_batch_size * blocks_for_tokens(max_model_len, geometry.block_size)
        num_blocks = min(useful, geometry.num_blocks_for_bytes(num_free_bytes))
        reason = "all requests at full length" if num_blocks == useful else "free memory"
    kv_bytes = num_blocks * geometry.bytes_per_block
    if reason in ("num_kv_blocks", "kv_cache_bytes") and kv_bytes > num_free_bytes:
        raise ConfigError(
            f"{num_blocks} KV blocks take {kv_bytes} bytes but {num_free_bytes} are free; "
            f"lower --{reason.replace('_', '-')} or free memory"
        )
    return MemoryPlan(num_kv_blocks=num_blocks, kv_bytes=kv_bytes, reason=reason)


def free_bytes(device: torch.device) -> int:
    """Return the bytes of ``device`` that can be allocated now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _reclaimable_bytes()


def kv_budget_bytes(device: torch.device) -> int:
    """Return the share of the free memory that KV may take unasked."""
    return int(free_bytes(device) * (CUDA_KV_SHARE if device.type == "cuda" else CPU_KV_SHARE))


def _reclaimable_bytes() -> int:
    """Return the page cache that Linux gives back on demand (``MemAvailable`` - ``MemFree``), else 0."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return (int(fields["MemAvailable"].split()[0]) - int(fields["MemFree"].split()[0])) * 1024
    except (OSError, KeyError, ValueError):
        return 0
