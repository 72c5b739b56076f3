"""Tuned tables: what is written is read, the right one is found, a broken one is named."""

import json
from pathlib import Path

import pytest

from moesaic.errors import ConfigError
from moesaic.experts.tuning import PACKAGED, ExpertShape, TuningTable, default_table, find_table, read_table
from moesaic.kernels.tiles import ExpertTiles, Tile

SHAPE = ExpertShape(num_experts=128, num_experts_per_token=8, width=2048, inner=768, dtype="bfloat16")
TILE = {"block_n": 32, "block_k": 64, "group_m": 1, "num_warps": 4, "num_stages": 3}


def _write(path: Path, *num_tokens: int, max_tokens: int = 4, **changes: object) -> Path:
    tiles = {"block_m": 16, "is_pairwise": False, "sums_in_down": False, "gate_up": TILE, "down": TILE} | changes
    fields = {"max_tokens": max_tokens, "entries": [{"num_tokens": n, "tiles": tiles} for n in num_tokens]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields))
    return path


def _tiles(block_m: int) -> ExpertTiles:
    return ExpertTiles(block_m=block_m, gate_up=Tile(**TILE), down=Tile(**TILE))


def test_an_entry_serves_the_tokens_above_the_entry_before_it() -> None:
    table = TuningTable(by_tokens=((1, _tiles(16)), (8, _tiles(32)), (64, _tiles(64))), max_tokens=64, source="test")
    assert [table.tiles(n).block_m for n in (1, 2, 8, 9, 64)] == [16, 32, 32, 64, 64]


def test_a_table_is_named_after_shape_and_device() -> None:
    assert SHAPE.file_name("NVIDIA H200") == "E128-A8-C2048-I768-bfloat16-NVIDIA_H200.json"


def test_a_table_in_the_cache_goes_before_the_defaults(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path))
    assert find_table(SHAPE, "No GPU") == default_table(SHAPE)
    path = _write(tmp_path / "tuned" / SHAPE.file_name("No GPU"), 1, 4)
    table = find_table(SHAPE, "No GPU")
    assert (table.source, table.max_tokens, table.tiles(3)) == (path.name, 4, _tiles(16))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"entries": [{"num_tokens": 1}], "max_tokens": 1}'])
def test_a_file_that_is_no_table_is_named_with_the_remedy(tmp_path, text) -> None:
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.json is no tuning table .*moesaic tune"):
        read_table(tmp_path / "broken.json")


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [((4, 1), 1), ((1, 4), 8), ((1, 4), 0), ((), 1)])
def test_a_table_whose_tokens_make_no_sense_is_refused(tmp_path, num_tokens, max_tokens) -> None:
    with pytest.raises(ConfigError, match="must ascend and reach max_tokens"):
        read_table(_write(tmp_path / "odd.json", *num_tokens, max_tokens=max_tokens))


def test_a_tile_that_no_kernel_takes_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="block_m is 10"):
        read_table(_write(tmp_path / "odd.json", 4, block_m=10))


@pytest.mark.parametrize("path", sorted(PACKAGED.glob("*.json")), ids=lambda path: path.name)
def test_every_packaged_table_can_be_read_and_is_named_after_what_it_holds(path) -> None:
    table, fields = read_table(path), json.loads(path.read_text())
    assert path.name == ExpertShape(**fields["shape"]).file_name(fields["device"])
    assert table.max_tokens >= 64


@pytest.mark.parametrize(("num_experts", "chosen"), [(128, 8), (8, 2), (64, 6), (2, 2), (4, 4), (256, 8)])
def test_defaults_exist_for_every_shape_and_never_read_an_expert_twice_for_many_tokens(num_experts, chosen) -> None:
    table = default_table(
        ExpertShape(num_experts=num_experts, num_experts_per_token=chosen, width=64, inner=64, dtype="bfloat16")
    )
    assert all(not t.is_pairwise or n == 1 or n * chosen <= num_experts / 4 for n, t in table.by_tokens)
