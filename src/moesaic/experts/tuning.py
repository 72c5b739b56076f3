"""Tuned tables of the expert kernels: which tiles for which number of tokens, read from JSON, else defaults."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.builtin.cache import cache_root
from moesaic.errors import ConfigError
from moesaic.kernels.tiles import ExpertTiles, Tile

logger = logging.getLogger(__name__)

PACKAGED = Path(__file__).parent / "tuned"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """What a table was tuned for, beside the device."""

    num_experts: int
    num_experts_per_token: int
    width: int
    inner: int
    """Width of one expert."""
    dtype: str

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights: gate, up and down of two-byte numbers."""
        return 3 * self.width * self.inner * 2

    def file_name(self, device_name: str) -> str:
        """Return the name of the table of this shape on a device, as torch names it."""
        sizes = f"E{self.num_experts}-A{self.num_experts_per_token}-C{self.width}-I{self.inner}"
        return f"{sizes}-{self.dtype}-{device_name.replace(' ', '_')}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTable:
    """Tiles by number of tokens, for one shape on one device."""

    by_tokens: tuple[tuple[int, ExpertTiles], ...]
    """Ascending; an entry serves the tokens above the entry before it."""
    max_tokens: int
    """Most tokens for which the fused kernels are the faster ones; more go through grouped products."""
    source: str
    """The file, or that the tiles are defaults."""

    def __post_init__(self) -> None:
        tokens = [num_tokens for num_tokens, _ in self.by_tokens]
        if not tokens or tokens != sorted(set(tokens)) or not 1 <= self.max_tokens <= tokens[-1]:
            raise ConfigError(
                f"{self.source}: tokens {tokens} must ascend and reach max_tokens ({self.max_tokens}); "
                "write the table again with moesaic tune, or remove it"
            )

    def tiles(self, num_tokens: int) -> ExpertTiles:
        """Return the tiles for ``num_tokens``: those of the first entry that is no smaller, else the last."""
        return next((tiles for most, tiles in self.by_tokens if num_tokens <= most), self.by_tokens[-1][1])


def find_table(shape: ExpertShape, device_name: str) -> TuningTable:
    """Return the table that ``moesaic tune`` wrote for this shape and device, else the packaged one, else defaults.

    Raises: ``ConfigError`` naming a table that cannot be read.
    """
    name = shape.file_name(device_name)
    for folder in (tuned_folder(), PACKAGED):
        if (folder / name).exists():
            return read_table(folder / name)
    return default_table(shape)


def default_table(shape: ExpertShape) -> TuningTable:
    """Return tiles for a shape that was never tuned, good for Qwen3-30B-A3B's on one H200 (2026-12-01).

    Tiles of 16 rows while experts have 8 tokens or fewer on average; small enough for 99 KiB of shared memory.
    """
    most_pairwise = max(1, min(16, shape.num_experts // 4) // shape.num_experts_per_token)
    most_small = max(most_pairwise + 1, 8 * shape.num_experts // shape.num_experts_per_token)
    pairwise = ExpertTiles(
        block_m=16,
        is_pairwise=True,
        gate_up=Tile(block_n=32, block_k=64, num_stages=6),
        down=Tile(block_n=64, block_k=128),
    )
    small = ExpertTiles(
        block_m=16, gate_up=Tile(block_n=32, block_k=128, num_stages=4), down=Tile(block_n=64, block_k=128)
    )
    large = ExpertTiles(
        block_m=64,
        gate_up=Tile(block_n=64, block_k=64, num_stages=4),
        down=Tile(block_n=128, block_k=64, num_stages=4),
    )
    rows = ((most_pairwise, pairwise), (most_small, small), (4 * most_small, large))
    return TuningTable(by_tokens=rows, max_tokens=4 * most_small, source="defaults, not tuned for this device")


def tuned_folder() -> Path:
    """Return where ``moesaic tune`` writes tables."""
    return cache_root() / "tuned"


def read_table(path: Path) -> TuningTable:
    """Return the table in ``path``. Raises: ``ConfigError`` with the remedy."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple((int(row["num_tokens"]), _tiles(row["tiles"])) for row in fields["entries"])
        max_tokens = int(fields["max_tokens"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} is no tuning table ({error!r}); remove it or write it with moesaic tune") from error
    return TuningTable(by_tokens=rows, max_tokens=max_tokens, source=path.name)


def _tiles(fields: Mapping[str, Any]) -> ExpertTiles:  # Any: JSON values, judged by the classes
    return ExpertTiles(
        block_m=fields["block_m"],
        is_pairwise=fields["is_pairwise"],
        sums_in_down=fields["sums_in_down"],
        gate_up=Tile(**fields["gate_up"]),
        down=Tile(**fields["down"]),
    )


def tiles_fields(tiles: ExpertTiles) -> dict[str, Any]:
    """Return ``tiles`` as a table holds them (Any: numbers, booleans and nested tiles)."""
    return dataclasses.asdict(tiles)
