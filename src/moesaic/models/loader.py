"""From the files of a model to the model on its device; refuses early and names what is wrong."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import logging
import re
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from moesaic.builtin import Progress
from moesaic.errors import ModelLoadError
from moesaic.experts.resident import ResidentExperts
from moesaic.models.families import family_of
from moesaic.models.hf import IMPLEMENTATION, HFCausalLM
from moesaic.models.info import model_info
from moesaic.models.loading_bar import told_to

logger = logging.getLogger(__name__)

LoadFormat = Literal["auto", "dummy"]

_EXPERT_TENSOR = re.compile(r"(?P<prefix>.*\bexperts\.)(?P<expert>\d+)(?P<suffix>\..+)")
_DUMMY_STD = 0.02  # the initializer_range of nearly every family: activations stay finite through many layers


def load_model(
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> HFCausalLM:
    """Return the model in ``path`` on ``device``, in evaluation mode, its experts resident.

    ``dtype`` None means the configuration's on an accelerator and float32 on a CPU. ``load_format`` "dummy" gives
    random weights from ``seed`` and the configuration alone. Blocks until the weights are in place.
    Raises: ``UnsupportedModelError`` for a family that is not proven, ``ModelLoadError`` naming the file or tensor
    that is missing, broken or of another shape; both before anything large is allocated where that can be known.
    """
    report = progress or (lambda what, fraction: None)
    device = torch.device(device)
    config = read_config(path)
    dtype = resolve_dtype(config, dtype, device)
    if load_format == "auto":
        _check_weight_files(path, model_info(config).num_experts)
    report("loading weights", 0.0)
    bar = contextlib.nullcontext() if progress is None else told_to(partial(progress, "loading weights"))
    with bar:
        dummy = load_format == "dummy"
        hf_model = _dummy(path, config, dtype, device, seed) if dummy else _load(path, config, dtype, device)
    report("loading weights", 1.0)
    model = HFCausalLM(hf_model.eval().requires_grad_(False))
    if model.expert_modules:
        model.experts = ResidentExperts(model.expert_modules)
    return model


def read_config(path: Path) -> Any:
    """Return transformers' configuration object of the model in ``path`` (Any: untyped), its family proven.

    Raises: ``ModelLoadError`` if there is no readable ``config.json``, ``UnsupportedModelError`` for the family.
    """
    from transformers import AutoConfig

    fields = _read_json(path / "config.json")
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise ModelLoadError(f"{path / 'config.json'} names no model_type; it is no transformers checkpoint")
    family_of(model_type)
    if quantization := fields.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise ModelLoadError(f"{path} holds {method} quantized weights, which are not supported; use a bf16 checkpoint")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises whatever its validators do; all mean the same to the caller
        raise ModelLoadError(
            f"{path / 'config.json'} is no {model_type} configuration that the installed transformers takes: {error}"
        ) from error
    model_info(config)  # raises for what cannot be served
    return config


def resolve_dtype(config: Any, dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the dtype of the weights: the one asked for, else the configuration's, but float32 on a CPU."""
    if dtype is not None:
        return dtype
    stated = getattr(config, "dtype", None)
    if isinstance(stated, str):
        stated = getattr(torch, stated)
    if device.type == "cpu":
        logger.info("dtype: float32 on a CPU (the configuration says %s, which is slower there)", stated)
        return torch.float32
    return stated or torch.bfloat16


def _read_json(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise ModelLoadError(f"model directory {path.parent} does not exist; check the path")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} does not exist; the directory holds no transformers checkpoint") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return fields


def _check_weight_files(path: Path, num_experts: int) -> None:
    """Return if every shard opens, holds what its index names, and the experts are complete; reads headers only.

    Raises: ``ModelLoadError`` naming the file or tensor.
    """
    index = path / "model.safetensors.index.json"
    if not index.exists():
        _check_experts(path, _shapes(path / "model.safetensors"), num_experts)
        return
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map; download the checkpoint again")
    held = {shard: _shapes(path / shard) for shard in sorted(set(weight_map.values()))}
    for tensor, shard in weight_map.items():
        if tensor not in held[shard]:
            raise ModelLoadError(f"tensor {tensor} is not in {path / shard}, where {index.name} says it is")
    _check_experts(path, {name: shape for shapes in held.values() for name, shape in shapes.items()}, num_experts)


def _shapes(shard: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a safetensors file."""
    from safetensors import SafetensorError, safe_open

    if not shard.exists():
        raise ModelLoadError(f"{shard} does not exist; the checkpoint is incomplete or not in safetensors format")
    try:
        with safe_open(shard, framework="pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{shard} is truncated or corrupt ({error}); download it again") from error


def _check_experts(path: Path, shapes: dict[str, tuple[int, ...]], num_experts: int) -> None:
    # transformers stacks what it finds: a missing or odd expert would show only as an odd stack, without its name.
    stacks: dict[tuple[str, str], dict[int, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in shapes.items():
        if match := _EXPERT_TENSOR.fullmatch(name):
            stacks[match["prefix"], match["suffix"]][int(match["expert"])] = shape
    for (prefix, suffix), experts in sorted(stacks.items()):
        if absent := set(range(num_experts)) - experts.keys():
            raise ModelLoadError(
                f"{path}: missing: {prefix}{min(absent)}{suffix} ({len(absent)} of {num_experts} experts)"
            )
        usual, _ = Counter(experts.values()).most_common(1)[0]
        for expert, shape in experts.items():
            if shape != usual:
                raise ModelLoadError(f"{path}: {prefix}{expert}{suffix} has shape {shape}, other experts have {usual}")


def _load(path: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return transformers' model with the checkpoint's weights, none of them missing or reshaped."""
    from transformers import AutoModelForCausalLM

    # accelerate places tensors on the device one by one; without it they all pass through host memory first.
    direct = device.type != "cpu" and importlib.util.find_spec("accelerate") is not None
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            config=copy.deepcopy(config),
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported by name below instead
            attn_implementation=IMPLEMENTATION,
            experts_implementation=IMPLEMENTATION,
            **({"device_map": {"": device}} if direct else {}),
        )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # shape and conversion errors come as RuntimeError, ValueError and others
        raise ModelLoadError(
            f"the weights in {path} do not fit the {config.model_type} configuration: {error}"
        ) from error
    _check_complete(path, found)
    return model if direct else model.to(device)


def _check_complete(path: Path, found: dict[str, Any]) -> None:
    # transformers fills what is missing with random numbers and only warns.
    for problem, what in (("missing_keys", "missing"), ("mismatched_keys", "of another shape"), ("error_msgs", "bad")):
        if names := sorted(map(str, found[problem])):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelLoadError(
                f"{path}: {what}: {', '.join(names[:3])}{more}; the checkpoint does not fit its config"
            )
    if unused := sorted(found["unexpected_keys"]):
        logger.warning("tensors not used by this model: count=%d first=%s", len(unused), unused[0])


def meta_model(config: Any, dtype: torch.dtype) -> Any:
    """Return transformers' model without memory for its weights (device ``meta``), each of the type it is served in."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            experts_implementation=IMPLEMENTATION,
        )
    float32 = model._get_dtype_plan(dtype)  # routers that the family keeps in float32, by part of their name
    for name, tensor in model.state_dict(keep_vars=True).items():
        if any(part in name for part in float32):
            tensor.data = tensor.data.to(torch.float32)
    return model


def _dummy(path: Path, config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """Return transformers' model with random weights, made on the device (host memory holds none of them)."""
    from transformers import GenerationConfig

    model = meta_model(config, dtype)
    model.to_empty(device=device)
    model.tie_weights()
    _fill(model, torch.Generator(device).manual_seed(seed))
    if (path / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return model


@torch.no_grad()
def _fill(model: Any, generator: torch.Generator) -> None:
    for buffer in model.buffers():
        buffer.zero_()  # the memory is anybody's, and not every initialiser sets what a checkpoint would bring
    for module in model.modules():
        # Computed buffers (rotary frequencies) were lost on meta; the family's own initialiser knows them.
        if next(module.buffers(recurse=False), None) is not None:
            model._init_weights(module)
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            nn.init.ones_(parameter)
        else:
            parameter.normal_(0.0, _DUMMY_STD, generator=generator)
