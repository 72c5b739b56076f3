"""The memory plan of a model that is not loaded, and how it is shown."""

from dataclasses import dataclass
from pathlib import Path

import torch

from moesaic.config import EngineConfig
from moesaic.engine.memory import FreeMemory, MemoryPlan, context_length, plan_memory, resolve_device
from moesaic.kv.geometry import KVGeometry, kv_text, size_text
from moesaic.models.info import model_info
from moesaic.models.loader import read_config, resolve_dtype
from moesaic.models.weights import weights_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """What serving a model here would take."""

    device: str
    dtype: str
    weights_source: str
    """What the bytes of the weights were computed from."""
    memory: MemoryPlan


def plan_model(path: Path, config: EngineConfig) -> ModelPlan:
    """Return the plan for the model in ``path``; reads its configuration and file headers, allocates nothing.

    Raises: ``ConfigError`` with both numbers for what this machine cannot hold, ``ModelLoadError``.
    """
    model_config, device = read_config(path), resolve_device(config.device)
    dtype = resolve_dtype(model_config, None if config.dtype == "auto" else getattr(torch, config.dtype), device)
    info = model_info(model_config)
    num_bytes, source = weights_bytes(path, model_config, dtype, load_format=config.load_format)
    geometry = KVGeometry(layers=info.kv_shapes, block_size=config.block_size, element_bytes=dtype.itemsize)
    memory = plan_memory(config, geometry, context_length(config, info.max_model_len), FreeMemory.of(device), num_bytes)
    return ModelPlan(device=device.type, dtype=str(dtype).removeprefix("torch."), weights_source=source, memory=memory)


def plan_block(model: str, plan: ModelPlan) -> str:
    """Return what an operator wants to know of the plan, one fact per line."""
    memory = plan.memory
    num_requests = memory.num_full_length_requests
    rows = [
        ("model", f"{model}, {plan.dtype} on {plan.device}, context {memory.max_model_len} tokens"),
        ("free", size_text(memory.free.device_bytes)),
        ("weights", f"{size_text(memory.weights_bytes)} (from the {plan.weights_source})"),
        ("KV", f"{kv_text(memory.num_kv_blocks, memory.block_size, memory.kv_bytes)} ({memory.reason})"),
        ("KV per token", f"{memory.bytes_per_token} bytes, {memory.bytes_per_block} per block"),
        ("room for", f"{num_requests} request{'s' * (num_requests != 1)} of {memory.max_model_len} tokens"),
        ("swap space", f"{size_text(memory.swap_bytes)} of {size_text(memory.free.host_bytes)} free on the host"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
