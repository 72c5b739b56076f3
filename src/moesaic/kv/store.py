"""The one set of KV tensors: what attention reads is what is copied, swapped and counted."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from moesaic.errors import ConfigError, InvariantError
from moesaic.kv.geometry import KVGeometry, LayerKVShape


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTensors:
    """A copy of some blocks of all layers: per layer keys ``[n, B, K, D]`` and values ``[n, B, K, Dv]``."""

    num_blocks: int
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in self.keys + self.values)


class LayeredPagedKVStore:
    """Keys and values of all layers in NHD pages ``[N, B, K, D]`` and ``[N, B, K, Dv]``.

    Layers may differ in shape, and keys may differ from values. Pages start as zeros and are never cleared:
    what lies past the committed length of a sequence is stale and must not be read.
    Raises: ``ConfigError`` without blocks; ``InvariantError`` if ``dtype`` is not what the geometry counted.
    """

    def __init__(
        self, geometry: KVGeometry, num_blocks: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"{num_blocks} KV blocks hold nothing; raise --num-kv-blocks to at least 1")
        if dtype.itemsize != geometry.element_bytes:
            raise InvariantError(f"{dtype} takes {dtype.itemsize} bytes but the geometry has {geometry.element_bytes}")
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.device = torch.device(device)
        self._keys = tuple(self._new_pages(layer, layer.key_dim) for layer in geometry.layers)
        self._values = tuple(self._new_pages(layer, layer.value_dim) for layer in geometry.layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages, as the geometry counts them."""
        return self.num_blocks * self.geometry.bytes_per_block

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the key and value pages of one layer: the storage itself, no copy.

        Raises: ``InvariantError`` if there is no such layer.
        """
        if not 0 <= layer < len(self._keys):
            raise InvariantError(f"layer {layer} is not one of the {len(self._keys)} layers of the KV store")
        return self._keys[layer], self._values[layer]

    def write(self, layer: int, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put ``key`` [T, K, D] and ``value`` [T, K, Dv] into the slots ``slot_mapping`` (int64 [T], all different).

        Raises: ``InvariantError`` for wrong shapes, and on a CPU for slots out of range. On a GPU a bad slot is a
        device-side assertion: looking at the slots here would make every layer wait for the device.
        """
        for pages, new in zip(self.pages(layer), (key, value), strict=True):
            if new.shape != (slot_mapping.numel(), *pages.shape[2:]):
                raise InvariantError(
                    f"layer {layer} takes {(slot_mapping.numel(), *pages.shape[2:])} for its "
                    f"{slot_mapping.numel()} slots but got {tuple(new.shape)}"
                )
        try:
            for pages, new in zip(self.pages(layer), (key, value), strict=True):
                pages.flatten(0, 1).index_copy_(0, slot_mapping, new)
        except IndexError as error:
            limit = self.num_blocks * self.geometry.block_size
            raise InvariantError(f"slot mapping {slot_mapping.tolist()} leaves [0, {limit})") from error

    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy block ``source`` onto block ``target`` in all layers, for each ``(source, target)``.

        All sources are read before any target is written.
        Raises: ``InvariantError`` for ids out of range and for targets named twice.
        """
        sources, targets = [s for s, _ in pairs], [t for _, t in pairs]
        self._check_targets(targets)
        self.import_blocks(targets, self.export_blocks(sources))

    def export_blocks(self, block_ids: SequenceOf[int]) -> BlockTensors:
        """Return a copy of the blocks, in this order, on the store's device.

        Raises: ``InvariantError`` for ids out of range.
        """
        index = self._index(block_ids)
        return BlockTensors(
            num_blocks=len(block_ids),
            keys=tuple(pages.index_select(0, index) for pages in self._keys),
            values=tuple(pages.index_select(0, index) for pages in self._values),
        )

    def import_blocks(self, block_ids: SequenceOf[int], exported: BlockTensors) -> None:
        """Overwrite the blocks, in this order, with what was exported; no other block changes.

        Raises: ``InvariantError`` for ids out of range or named twice, and for tensors of another store's shape.
        """
        self._check_targets(block_ids)
        self._check_exported(len(block_ids), exported)
        index = self._index(block_ids)
        for pages, new in zip(self._keys + self._values, exported.keys + exported.values, strict=True):
            pages.index_copy_(0, index, new)

    def checkpoint(self, block_ids: SequenceOf[int]) -> BlockTensors:
        """Return a copy of the blocks in host memory (pinned if the store is on a GPU); waits for the copy.

        Raises: ``InvariantError`` for ids out of range.
        """
        exported = self.export_blocks(block_ids)
        host = BlockTensors(
            num_blocks=exported.num_blocks,
            keys=tuple(map(_to_host, exported.keys)),
            values=tuple(map(_to_host, exported.values)),
        )
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return host

    def restore(self, block_ids: SequenceOf[int], host: BlockTensors) -> None:
        """Overwrite the blocks with a ``checkpoint``, perhaps of other block ids; no other block changes.

        Does not wait for the device: ``host`` must stay alive until the current stream has passed.
        Raises: as ``import_blocks``.
        """
        self._check_exported(len(block_ids), host)
        on_device = BlockTensors(
            num_blocks=host.num_blocks,
            keys=tuple(t.to(self.device, non_blocking=True) for t in host.keys),
            values=tuple(t.to(self.device, non_blocking=True) for t in host.values),
        )
        self.import_blocks(block_ids, on_device)

    def _new_pages(self, layer: LayerKVShape, dim: int) -> torch.Tensor:
        shape = (self.num_blocks, self.geometry.block_size, layer.num_kv_heads, dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _index(self, block_ids: SequenceOf[int]) -> torch.Tensor:
        if block_ids and not (min(block_ids) >= 0 and max(block_ids) < self.num_blocks):
            raise InvariantError(f"block ids {list(block_ids)} leave [0, {self.num_blocks})")
        return torch.tensor(block_ids, dtype=torch.int64, device=self.device)

    def _check_targets(self, block_ids: SequenceOf[int]) -> None:
        if len(set(block_ids)) != len(block_ids):
            raise InvariantError(f"block ids {list(block_ids)} name a block to overwrite twice")

    def _check_exported(self, num_blocks: int, exported: BlockTensors) -> None:
        ours = [(num_blocks, *pages.shape[1:]) for pages in self._keys + self._values]
        theirs = [tuple(t.shape) for t in exported.keys + exported.values]
        if ours != theirs or any(t.dtype != self.dtype for t in exported.keys + exported.values):
            raise InvariantError(
                f"{exported.num_blocks} exported blocks of {theirs} do not fit {num_blocks} blocks of {ours}"
            )


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
