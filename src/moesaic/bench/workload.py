"""Prompts of random token ids: no two share a prefix, and every length is exact."""

from collections.abc import Iterable

import numpy as np


def random_prompts(lengths: Iterable[int], vocab_size: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Return one prompt of ids in ``[0, vocab_size)`` per length."""
    rng = np.random.default_rng(seed)
    return tuple(tuple(rng.integers(0, vocab_size, size=n).tolist()) for n in lengths)


def random_lengths(count: int, longest: int, seed: int) -> tuple[int, ...]:
    """Return ``count`` lengths, uniform in ``[1, longest]``."""
    return tuple(np.random.default_rng(seed).integers(1, longest + 1, size=count).tolist())
