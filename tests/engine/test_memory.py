"""The memory plan: one arithmetic for the engine and for `moesaic plan`; both refuse what cannot fit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.engine.memory import CPU_KV_SHARE, CUDA_KV_SHARE, FreeMemory, plan_memory
from moesaic.engine.model_plan import plan_block, plan_model
from moesaic.errors import ConfigError, RequestTooLargeError
from moesaic.kv.geometry import KVGeometry, LayerKVShape, blocks_needed, kv_text
from moesaic.models.loader import load_model
from moesaic.request import SamplingParams

LAYER = LayerKVShape(num_kv_heads=2, key_dim=8, value_dim=8)
GEOMETRY = KVGeometry(layers=(LAYER, LAYER), block_size=16, element_bytes=2)
BLOCK_BYTES = 2048
"""Two layers of 16 tokens with 32 elements of 2 bytes each."""


def gpu(device_blocks: int, host_blocks: int = 1000) -> FreeMemory:
    return FreeMemory(device_bytes=device_blocks * BLOCK_BYTES, host_bytes=host_blocks * BLOCK_BYTES, is_shared=False)


def cpu(num_blocks: int) -> FreeMemory:
    num_bytes = num_blocks * BLOCK_BYTES
    return FreeMemory(device_bytes=num_bytes, host_bytes=num_bytes, is_shared=True)


def test_a_plan_says_what_it_takes_and_what_it_is_enough_for() -> None:
    plan = plan_memory(EngineConfig(num_kv_blocks=40, block_size=16), GEOMETRY, 100, gpu(50))
    assert GEOMETRY.bytes_per_block == BLOCK_BYTES
    assert (plan.num_kv_blocks, plan.num_kv_tokens, plan.kv_bytes) == (40, 640, 40 * BLOCK_BYTES)
    assert (plan.bytes_per_token, plan.bytes_per_block) == (128, BLOCK_BYTES)
    assert plan.num_full_length_requests == 5  # 100 tokens take 7 blocks
    assert plan.reason == "num_kv_blocks"


@pytest.mark.parametrize(("free", "share"), [(gpu(1000), CUDA_KV_SHARE), (cpu(1000), CPU_KV_SHARE)])
def test_without_a_wish_kv_takes_a_share_of_what_the_weights_leave(free: FreeMemory, share: float) -> None:
    plan = plan_memory(EngineConfig(), GEOMETRY, 100_000, free, weights_bytes=400 * BLOCK_BYTES)
    assert plan.num_kv_blocks == int(600 * share)
    assert plan.reason == "free memory"


def test_without_a_wish_kv_takes_no_more_than_all_requests_can_use() -> None:
    plan = plan_memory(EngineConfig(max_batch_size=4), GEOMETRY, 100, gpu(1000))
    assert (plan.num_kv_blocks, plan.num_full_length_requests) == (28, 4)
    assert plan.reason == "all requests at full length"


def test_bytes_are_rounded_down_to_blocks() -> None:
    plan = plan_memory(EngineConfig(kv_cache_bytes=10 * BLOCK_BYTES - 1), GEOMETRY, 100, gpu(1000))
    assert (plan.num_kv_blocks, plan.reason) == (9, "kv_cache_bytes")


@pytest.mark.parametrize(
    ("settings", "free", "weights_blocks", "message"),
    [
        ({"num_kv_blocks": 11}, gpu(10), 0, r"^11 KV blocks take 22528 bytes but 20480 bytes are free; lower --num-kv"),
        ({"num_kv_blocks": 6}, gpu(10), 5, r"weights take 10240 bytes and 6 KV blocks take 12288 bytes but 20480"),
        ({"kv_cache_bytes": 11 * BLOCK_BYTES}, gpu(10), 0, r"22528 bytes but 20480 .* lower --kv-cache-bytes"),
        ({"kv_cache_bytes": 5}, gpu(10), 0, r"5 bytes of KV memory hold no block of 2048 bytes"),
        ({}, gpu(10), 11, r"the weights take 22528 bytes but 20480 bytes are free"),
        ({}, gpu(10), 10, r"0 bytes of KV memory hold no block"),
        ({"swap_space_bytes": 4096}, gpu(10, 1), 0, r"swap_space_bytes is 4096 bytes but 2048 bytes of host memory"),
        ({"num_kv_blocks": 6, "swap_space_bytes": 4096}, cpu(10), 3, r"is 4096 bytes but 2048 bytes of host"),
    ],
)
def test_what_cannot_fit_is_refused_with_both_numbers(
    settings: dict[str, Any], free: FreeMemory, weights_blocks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_memory(EngineConfig(**settings), GEOMETRY, 100, free, weights_bytes=weights_blocks * BLOCK_BYTES)


def test_the_gpus_kv_does_not_count_against_the_host() -> None:
    plan_memory(EngineConfig(num_kv_blocks=10, swap_space_bytes=2 * BLOCK_BYTES), GEOMETRY, 100, gpu(10, 2))


def test_the_plan_of_a_directory_is_the_plan_of_the_engine(tiny_dir: Path) -> None:
    config = EngineConfig(num_kv_blocks=37, block_size=8, max_model_len=64, device="cpu")
    plan = plan_model(tiny_dir, config).memory
    core = EngineCore.from_path(tiny_dir, config)
    for name in ("num_kv_blocks", "kv_bytes", "bytes_per_token", "max_model_len", "num_full_length_requests"):
        assert getattr(plan, name) == getattr(core.memory, name)
    stats = core.stats()
    assert stats["num_kv_blocks"] == stats["kv_blocks_total"] == core.scheduler.kv.pool.num_blocks == 37


def test_num_kv_blocks_in_the_stats_can_really_be_used(tiny_dir: Path) -> None:
    """The largest request that the stats promise is served, and one token more is refused."""
    core = EngineCore.from_path(
        tiny_dir, EngineConfig(num_kv_blocks=6, block_size=4, max_batch_size=2, max_tokens_per_step=6, device="cpu")
    )
    num_tokens = core.stats()["num_kv_blocks"] * core.stats()["kv_block_size_tokens"]
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    longest = num_tokens - 4
    assert blocks_needed(longest, 5, 4) == 6
    with pytest.raises(RequestTooLargeError, match="7 KV blocks"):
        core.add_request("too long", [5] * (longest + 1), params)
    core.add_request("longest", [5] * longest, params)
    lowest, num_outputs = 6, 0
    while core.has_pending_requests():
        num_outputs += len(core.step())
        lowest = min(lowest, core.stats()["kv_blocks_free"])
    assert (lowest, num_outputs) == (0, 5)


def _loaded_bytes(path: Path, dtype: torch.dtype) -> int:
    tensors = {t.data_ptr(): t for t in load_model(path, dtype=dtype).hf_model.state_dict().values()}
    return sum(t.numel() * t.element_size() for t in tensors.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_planned_weights_are_the_loaded_weights(tiny_dir: Path, dtype: Any, load_format: Any) -> None:
    plan = plan_model(tiny_dir, EngineConfig(dtype=dtype, load_format=load_format, num_kv_blocks=1, device="cpu"))
    assert plan.weights_source == {"auto": "checkpoint", "dummy": "configuration"}[load_format]
    assert plan.memory.weights_bytes == _loaded_bytes(tiny_dir, getattr(torch, dtype))
    assert plan.dtype == dtype


def test_a_directory_with_a_configuration_only_can_be_planned(tiny_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_dir / "config.json").read_bytes())
    plan = plan_model(tmp_path, EngineConfig(num_kv_blocks=1, device="cpu"))
    assert plan.weights_source == "configuration"
    assert plan.memory.weights_bytes == _loaded_bytes(tiny_dir, torch.float32)


def test_a_plan_shows_every_number(tiny_dir: Path) -> None:
    config = EngineConfig(num_kv_blocks=64, block_size=4, max_model_len=100, dtype="bfloat16", device="cpu")
    lines = dict(line.split("  ", 1) for line in plan_block("tiny", plan_model(tiny_dir, config)).splitlines())
    shown = {name: text.strip() for name, text in lines.items()}
    assert shown["model"] == "tiny, bfloat16 on cpu, context 100 tokens"
    assert shown["KV"] == "64 blocks of 4 tokens = 256 tokens, 0 MiB (num_kv_blocks)"
    assert shown["KV per token"] == "256 bytes, 1024 per block"
    assert shown["room for"] == "2 requests of 100 tokens"
    assert shown["swap space"].startswith("0 MiB of ")
    assert "(from the checkpoint)" in shown["weights"]


def test_sizes_are_shown_in_mib() -> None:
    assert kv_text(100, 16, 3 * 2**20) == "100 blocks of 16 tokens = 1600 tokens, 3 MiB"
