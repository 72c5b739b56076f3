"""The random choice: one uniform per row from a counter, then the inverse of an exact integer distribution.

A token's weight is its probability relative to the likeliest token, as an integer number of ``2**-WEIGHT_BITS``.
Integer sums do not depend on the order of addition, so the choice is a function of (seed, position, logits of the
row) bit for bit: the other rows, their number and the scan kernel of the device cannot move it. Floating-point
scans can: torch lists CUDA ``cumsum`` among its nondeterministic operations.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from numpy.typing import NDArray

WEIGHT_BITS = 40
"""Tokens less likely than ``2**-41`` of the likeliest are never drawn; the sum over 2**22 tokens fits int64."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = 0xFFFF_FFFF_FFFF_FFFF
_SLAB_ELEMENTS = 2**23
"""Most logits worked on at once: bounds an int64 temporary to 64 MiB whatever the batch."""


def uniforms(seeds: SequenceOf[int], positions: SequenceOf[int]) -> NDArray[np.float64]:
    """Return one number in [0, 1) per (seed, position), each a function of its own pair alone.

    ``seeds`` are taken modulo 2**64. Source: SplitMix64 (Steele, Lea, Flood; OOPSLA 2014), its output number
    ``position`` from the hashed seed, top 53 bits. The seed is hashed first because sequences of plain SplitMix64
    whose seeds differ by a multiple of its increment overlap.
    """
    state = _mix(np.array([seed & _MASK for seed in seeds], dtype=np.uint64) + _GOLDEN)
    bits = _mix(state + (np.array(positions, dtype=np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def weights(scores: torch.Tensor) -> torch.Tensor:
    """Return int64 weights [S, V] of ``scores`` [S, V], whose largest value in each row is 0."""
    return (scores.exp() * 2.0**WEIGHT_BITS).to(torch.int64)


def draw_tokens(scores: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the int64 token [S] at which the cumulative weight passes ``uniform`` of the whole.

    ``scores`` fp32 [S, V] have 0 as the largest value of each row; ``uniform`` fp64 [S] is in [0, 1).
    A token of weight zero is never returned: the cumulative weight does not move there, and the target is
    kept below the whole however the product rounds.
    """
    cumulative = weights(scores).cumsum(dim=-1)
    whole = cumulative[:, -1]
    target = torch.minimum((uniform * whole).to(torch.int64), whole - 1)
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def slabs(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Yield slices of rows that cover ``num_rows`` and hold a bounded number of logits each."""
    size = max(1, _SLAB_ELEMENTS // vocab_size)
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
