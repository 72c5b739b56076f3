"""The bytes of weights are known without loading them, and broken files are named."""

import json
from pathlib import Path

import pytest
import torch

from moesaic.errors import ModelLoadError
from moesaic.models.loader import read_config
from moesaic.models.weights import weights_bytes
from moesaic.testing.models import save_tiny

CHECKPOINT, CONFIGURATION = "checkpoint", "configuration"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    save_tiny("qwen3_moe", path, max_shard_size="40KB")
    return path


def test_shards_and_configuration_give_the_same_number(sharded: Path) -> None:
    config = read_config(sharded)
    num_bytes, source = weights_bytes(sharded, config, torch.float32)
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert source == CHECKPOINT
    assert weights_bytes(sharded, config, torch.float32, load_format="dummy") == (num_bytes, CONFIGURATION)


def test_weights_are_counted_in_the_type_they_are_served_in(sharded: Path) -> None:
    config = read_config(sharded)
    (wide, _), (narrow, _) = (weights_bytes(sharded, config, t) for t in (torch.float32, torch.bfloat16))
    assert wide == 2 * narrow


def test_an_incomplete_checkpoint_is_counted_from_its_configuration(sharded: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes((sharded / name).read_bytes())
    assert weights_bytes(tmp_path, read_config(tmp_path), torch.float32)[1] == CONFIGURATION


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        (2**62).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"null",
        b"\x02" + bytes(7) + b"[]",
    ],
)
def test_a_broken_file_is_named(sharded: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes((sharded / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors .*download it again"):
        weights_bytes(tmp_path, read_config(tmp_path), torch.float32)


def test_a_truncated_file_is_named_with_both_sizes(tiny_dir: Path, tmp_path: Path) -> None:
    whole = (tiny_dir / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(ModelLoadError, match=rf"truncated \({len(whole) - 1} of {len(whole)} bytes\)"):
        weights_bytes(tmp_path, read_config(tiny_dir), torch.float32)


@pytest.mark.parametrize("content", ["{", "[]", "{}", json.dumps({"weight_map": 3})])
def test_a_broken_index_is_named(sharded: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"index\.json cannot be read"):
        weights_bytes(tmp_path, read_config(sharded), torch.float32)
