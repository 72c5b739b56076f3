"""The free list, reference counts and fences of KV blocks. No torch, no sequences."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NewType

from moesaic.errors import CapacityError, InvariantError

BlockId = NewType("BlockId", int)


class BlockPool:
    """``num_blocks`` block ids, each free, referenced or fenced; nobody else counts them.

    A *fenced* block has no owner any more but a step in flight may still write it, so it is not free yet.
    Free ids are a stack: releasing what was just reserved restores the exact state.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: list[BlockId] = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._references: list[int] = [0] * num_blocks
        self._fenced: dict[int, list[BlockId]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_fenced(self) -> int:
        return sum(map(len, self._fenced.values()))

    def reserve(self, num_blocks: int) -> list[BlockId]:
        """Take ``num_blocks`` blocks, each referenced once: all of them or none.

        Raises: ``CapacityError`` if fewer are free.
        """
        if num_blocks > len(self._free):
            raise CapacityError(
                f"{num_blocks} KV blocks are needed but {len(self._free)} of {self.num_blocks} are free; "
                "raise --num-kv-blocks or send fewer tokens at once"
            )
        if num_blocks <= 0:
            return []
        taken = self._free[: -num_blocks - 1 : -1]
        del self._free[-num_blocks:]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add a reference to each of ``blocks`` (read-only from now on).

        Raises: ``InvariantError`` if one has no owner.
        """
        blocks = self._owned(blocks)
        for block in blocks:
            self._references[block] += 1

    def release(self, blocks: Iterable[BlockId]) -> None:
        """Drop a reference to each of ``blocks``; those without any become free.

        Raises: ``InvariantError`` if one has no owner; then nothing is released.
        """
        for block in reversed(self._owned(blocks)):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def fence(self, blocks: Iterable[BlockId], fence_id: int) -> None:
        """Drop a reference to each of ``blocks``; those without any stay fenced until ``lift(fence_id)``."""
        fenced = self._fenced.setdefault(fence_id, [])
        for block in self._owned(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                fenced.append(block)

    def lift(self, fence_id: int) -> None:
        """Free the blocks behind a fence; a fence that does not exist is a no-op."""
        self._free.extend(reversed(self._fenced.pop(fence_id, [])))

    def pass_on(self, fence_id: int, later_fence_id: int) -> None:
        """Put what is behind a fence behind another; one that does not exist is a no-op."""
        if blocks := self._fenced.pop(fence_id, None):
            self._fenced.setdefault(later_fence_id, []).extend(blocks)

    def num_behind(self, fence_id: int) -> int:
        """Return how many blocks ``lift(fence_id)`` would free."""
        return len(self._fenced.get(fence_id, ()))

    def num_references(self, block: BlockId) -> int:
        return self._references[block]

    def is_shared(self, block: BlockId) -> bool:
        return self._references[block] > 1

    def fingerprint(self) -> tuple[list[BlockId], list[int], dict[int, list[BlockId]]]:
        """Return a copy of the state, equal exactly when the pools are."""
        return list(self._free), list(self._references), {k: list(v) for k, v in self._fenced.items()}

    def check(self) -> None:
        """Return if free + referenced + fenced = total and no block is in two places.

        Raises: ``InvariantError`` with the counts.
        """
        fenced = [b for blocks in self._fenced.values() for b in blocks]
        idle = set(self._free) | set(fenced)
        referenced = {b for b, n in enumerate(self._references) if n > 0}
        is_split = len(idle) == len(self._free) + len(fenced) and not (idle & referenced)
        if not is_split or len(idle) + len(referenced) != self.num_blocks or min(self._references, default=0) < 0:
            raise InvariantError(
                f"KV blocks: {len(self._free)} free + {len(referenced)} referenced + {len(fenced)} fenced "
                f"is not {self.num_blocks}"
            )

    def _owned(self, blocks: Iterable[BlockId]) -> Sequence[BlockId]:
        blocks = list(blocks)
        if any(self._references[b] < n for b, n in Counter(blocks).items()):
            raise InvariantError(f"KV blocks {blocks} are not all the caller's as often as given")
        return blocks
