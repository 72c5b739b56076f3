"""Tile sizes of the expert kernels: what a tuned table holds. Plain values, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How one product is cut: output columns and depth of a tile, order of blocks, warps and pipeline stages."""

    block_n: int
    block_k: int
    group_m: int = 1
    """Row blocks that share a column of weight tiles before the next column; 1 reads each weight once, in order."""
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        for name, least in (("block_n", 16), ("block_k", 16), ("group_m", 1), ("num_warps", 1), ("num_stages", 1)):
            value = getattr(self, name)
            is_power = name in ("group_m", "num_stages") or value & (value - 1) == 0
            if value < least or not is_power:
                raise ConfigError(f"{name} is {value}; a tile takes a power of two of at least {least}; tune again")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTiles:
    """How the experts of one number of tokens are computed."""

    block_m: int
    """Rows of one expert in a tile, at least 16 (the tensor cores' least)."""
    is_pairwise: bool = False
    """Every token-expert pair is a block of its own: nothing is sorted, experts that tokens share are read again."""
    sums_in_down: bool = False
    """Down and the weighted sum are one kernel (pairwise only)."""
    gate_up: Tile
    down: Tile

    def __post_init__(self) -> None:
        if self.sums_in_down and not self.is_pairwise:
            raise ConfigError("sums_in_down is set but is_pairwise is not; only pairs can be summed there; tune again")
        if self.block_m < 16 or self.block_m & (self.block_m - 1):
            raise ConfigError(f"block_m is {self.block_m}; it must be a power of two of at least 16; tune again")
