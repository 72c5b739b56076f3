"""Tiles that a kernel could not take are refused when a table is read."""

import pytest

from moesaic.errors import ConfigError
from moesaic.kernels.tiles import ExpertTiles, Tile


@pytest.mark.parametrize(
    "wrong", [{"block_n": 48}, {"block_k": 8}, {"num_warps": 3}, {"num_stages": 0}, {"group_m": 0}]
)
def test_a_tile_of_a_wrong_size_is_refused_by_name(wrong) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Tile(**({"block_n": 64, "block_k": 64} | wrong))


@pytest.mark.parametrize("block_m", [8, 24])
def test_rows_of_a_tile_are_a_power_of_two_of_at_least_sixteen(block_m) -> None:
    tile = Tile(block_n=64, block_k=64)
    with pytest.raises(ConfigError, match=f"block_m is {block_m}"):
        ExpertTiles(block_m=block_m, gate_up=tile, down=tile)
