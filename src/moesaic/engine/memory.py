"""How many KV blocks to allocate: what was asked for, or what fits."""

import os
from dataclasses import dataclass

import torch

from moesaic.config import EngineConfig
from moesaic.errors import ConfigError
from moesaic.kv.geometry import KVGeometry, blocks_for_tokens

CPU_KV_SHARE = 0.25
"""Of the free memory of the machine once the weights are loaded: activations and other programs need the rest."""
CUDA_KV_SHARE = 0.80
"""Of the free memory of the GPU once the weights are loaded; the rest is for activations and workspaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """The bytes that can be allocated now, on the model's device and on the host."""

    device_bytes: int
    host_bytes: int
    is_shared: bool
    """The device is the host's CPU: both numbers are of the same memory."""

    @classmethod
    def of(cls, device: torch.device) -> "FreeMemory":
        """Return what is free on ``device`` and on the host."""
        is_shared, host_bytes = device.type != "cuda", _free_host_bytes()
        device_bytes = host_bytes if is_shared else int(torch.cuda.mem_get_info(device)[0])
        return cls(device_bytes=device_bytes, host_bytes=host_bytes, is_shared=is_shared)

    @property
    def kv_share(self) -> float:
        """The part of what the weights leave that KV may take unasked."""
        return CPU_KV_SHARE if self.is_shared else CUDA_KV_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What the weights and the KV take, and what that is enough for."""

    num_kv_blocks: int
    block_size: int
    bytes_per_token: int
    """KV of one token in all layers."""
    max_model_len: int
    weights_bytes: int
    """Weights that are still to be loaded; 0 once they are."""
    swap_bytes: int
    """Host memory that the KV of preempted requests may take."""
    free: FreeMemory
    """What was free when the plan was made."""
    reason: str
    """Where the number of blocks comes from."""

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    @property
    def kv_bytes(self) -> int:
        return self.num_kv_blocks * self.bytes_per_block

    @property
    def num_kv_tokens(self) -> int:
        return self.num_kv_blocks * self.block_size

    @property
    def num_full_length_requests(self) -> int:
        """How many requests of ``max_model_len`` tokens the KV holds at once."""
        return self.num_kv_blocks // blocks_for_tokens(self.max_model_len, self.block_size)


def plan_memory(
    config: EngineConfig, geometry: KVGeometry, max_model_len: int, free: FreeMemory, weights_bytes: int = 0
) -> MemoryPlan:
    """Return the plan for ``config``: KV blocks as given, from ``kv_cache_bytes``, or from what is free.

    ``weights_bytes`` are those still to be loaded. Without a wish the plan takes a share of what they leave, and
    never more than ``max_batch_size`` requests of ``max_model_len`` tokens can use.
    Raises: ``ConfigError`` with both numbers if weights, KV or swap space exceed what is free, or no block fits.
    """
    num_left = free.device_bytes - weights_bytes
    if num_left < 0:
        raise ConfigError(
            f"the weights take {weights_bytes} bytes but {free.device_bytes} bytes are free; "
            "free memory, use a smaller --dtype or another --device"
        )
    num_blocks, reason = _kv_blocks(config, geometry, max_model_len, int(num_left * free.kv_share))
    plan = MemoryPlan(
        num_kv_blocks=num_blocks,
        block_size=geometry.block_size,
        bytes_per_token=geometry.bytes_per_token,
        max_model_len=max_model_len,
        weights_bytes=weights_bytes,
        swap_bytes=config.swap_space_bytes,
        free=free,
        reason=reason,
    )
    _check_fit(plan)
    return plan


def _kv_blocks(config: EngineConfig, geometry: KVGeometry, max_model_len: int, num_bytes: int) -> tuple[int, str]:
    """Return how many blocks to take and why, where ``num_bytes`` may be taken unasked."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks, "num_kv_blocks"
    if config.kv_cache_bytes is not None:
        return geometry.num_blocks_for_bytes(config.kv_cache_bytes), "kv_cache_bytes"
    useful = config.max_batch_size * blocks_for_tokens(max_model_len, geometry.block_size)
    num_blocks = min(useful, geometry.num_blocks_for_bytes(num_bytes))
    return num_blocks, "all requests at full length" if num_blocks == useful else "free memory"


def _check_fit(plan: MemoryPlan) -> None:
    free, needed = plan.free, plan.weights_bytes + plan.kv_bytes
    if needed > free.device_bytes:
        weights = f"the weights take {plan.weights_bytes} bytes and " if plan.weights_bytes else ""
        flag = "--kv-cache-bytes" if plan.reason == "kv_cache_bytes" else "--num-kv-blocks"
        raise ConfigError(
            f"{weights}{plan.num_kv_blocks} KV blocks take {plan.kv_bytes} bytes but {free.device_bytes} bytes "
            f"are free; lower {flag} or free memory"
        )
    num_host_left = free.host_bytes - (needed if free.is_shared else 0)
    if plan.swap_bytes > num_host_left:
        raise ConfigError(
            f"swap_space_bytes is {plan.swap_bytes} bytes but {num_host_left} bytes of host memory are left; "
            "lower --swap-space-bytes or free memory"
        )


def context_length(config: EngineConfig, model_context: int) -> int:
    """Return the longest prompt plus output: ``max_model_len``, else what the model was made for.

    Raises: ``ConfigError`` if the wish is longer than ``model_context``.
    """
    if config.max_model_len is None:
        return model_context
    if config.max_model_len > model_context:
        raise ConfigError(
            f"max_model_len is {config.max_model_len} but the model was made for {model_context} tokens; "
            f"lower --max-model-len to {model_context}"
        )
    return config.max_model_len


def resolve_device(device: str) -> torch.device:
    """Return the device that ``device`` ("auto", "cpu" or "cuda") means here.

    Raises: ``ConfigError`` for "cuda" without a GPU.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError("device is cuda but torch finds no GPU; install a CUDA build of torch or use --device cpu")
    return torch.device("cuda" if device != "cpu" and has_cuda else "cpu")


def _free_host_bytes() -> int:
    """Return the memory that can be had without swapping: free pages and what Linux gives back on demand."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _reclaimable_bytes()


def _reclaimable_bytes() -> int:
    """Return the page cache that Linux gives back on demand (``MemAvailable`` - ``MemFree``), else 0."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return (int(fields["MemAvailable"].split()[0]) - int(fields["MemFree"].split()[0])) * 1024
    except (OSError, KeyError, ValueError):
        return 0
