"""How long a step with decode rows and chunks takes: a model fitted to the steps that were seen."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesaic.sched.plan import StepPlan

FORGETTING = 0.98
"""Weight of a step for each later one: a change of the law is learnt in about 50 steps (our choice)."""
_TRUST = 1e-3
"""Weight of the coefficients known so far, as a share of what the steps say of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """What the time of a step depends on."""

    num_decode_rows: int
    num_decode_kv_tokens: int
    """KV length of all decode rows together."""
    num_chunk_tokens: int
    num_chunk_pairs: float
    """Sum over chunks of their tokens times their mean context: what attention must look at."""

    @classmethod
    def of(cls, plan: StepPlan) -> "StepSizes":
        """Return the sizes of a planned step."""
        return cls(
            num_decode_rows=len(plan.decode_rows),
            num_decode_kv_tokens=sum(row.start for row in plan.decode_rows),
            num_chunk_tokens=sum(c.num_tokens for c in plan.chunks),
            num_chunk_pairs=sum(c.num_tokens * (c.start + c.num_tokens / 2) for c in plan.chunks),
        )

    def as_row(self) -> tuple[float, ...]:
        """Return one value per coefficient of the model, in its order."""
        return 1.0, self.num_decode_rows, self.num_decode_kv_tokens, self.num_chunk_tokens, self.num_chunk_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Coefficients of the model, in seconds, none negative: of a step and of one more of each size."""

    step_s: float = 0.0
    decode_row_s: float = 0.0
    decode_kv_token_s: float = 0.0
    chunk_token_s: float = 0.0
    chunk_pair_s: float = 0.0

    @classmethod
    def of_row(cls, row: Iterable[float]) -> "StepCosts":
        """Return the costs with these coefficients, in the order of ``StepSizes.as_row``."""
        step_s, decode_row_s, decode_kv_token_s, chunk_token_s, chunk_pair_s = row
        return cls(
            step_s=step_s,
            decode_row_s=decode_row_s,
            decode_kv_token_s=decode_kv_token_s,
            chunk_token_s=chunk_token_s,
            chunk_pair_s=chunk_pair_s,
        )

    def as_row(self) -> tuple[float, ...]:
        """Return the coefficients in the order of ``StepSizes.as_row``."""
        return self.step_s, self.decode_row_s, self.decode_kv_token_s, self.chunk_token_s, self.chunk_pair_s

    def seconds(self, sizes: StepSizes) -> float:
        """Return how long a step takes."""
        return sum(cost * size for cost, size in zip(self.as_row(), sizes.as_row(), strict=True))

    def most_chunk_tokens(self, spare_s: float, context_tokens: int) -> float:
        """Return how many tokens one chunk may have that starts at ``context_tokens`` and takes ``spare_s``.

        Solves ``chunk_token_s * n + chunk_pair_s * n * (context + n / 2) = spare_s``; infinity where both cost nothing.
        """
        if spare_s <= 0:
            return 0.0
        first_s = self.chunk_token_s + self.chunk_pair_s * context_tokens
        root = first_s + math.sqrt(first_s**2 + 2 * self.chunk_pair_s * spare_s)
        return 2 * spare_s / root if root > 0 else math.inf


class StepTimeModel:
    """Nonnegative least squares over past steps, the latest weighing most.

    Recursive least squares keeps the inverse of the sums below, which grows without limit for sizes that stay as they
    are (covariance wind-up: Astrom and Wittenmark, "Adaptive Control", chapter 11). Here the sums are kept, and each
    fit is drawn a little to the one before: what the steps do not tell apart stays as it was.
    """

    def __init__(self) -> None:
        size = len(StepCosts().as_row())
        self.costs = StepCosts()
        self._gram: NDArray[np.float64] = np.zeros((size, size))
        self._target: NDArray[np.float64] = np.zeros(size)
        self._trust: NDArray[np.float64] = _TRUST * np.eye(size)

    def observe(self, sizes: StepSizes, seconds: float) -> None:
        """Take one step into the fit; some tens of microseconds."""
        row = np.array(sizes.as_row())
        self._gram = FORGETTING * self._gram + np.outer(row, row)
        self._target = FORGETTING * self._target + seconds * row
        self.costs = StepCosts.of_row(self._fitted().tolist())

    def _fitted(self) -> NDArray[np.float64]:
        """Return the coefficients; those that would be negative are 0, and the others are fitted without them.

        One that became 0 on the way does not come back within this fit: the next step fits all anew.
        """
        scale = np.sqrt(self._gram.diagonal())
        scale[scale == 0] = 1.0  # a size that was 0 in every step says nothing: its coefficient stays
        gram = self._gram / np.outer(scale, scale) + self._trust
        target = self._target / scale + _TRUST * scale * np.array(self.costs.as_row())
        fitted, free = np.linalg.solve(gram, target), np.ones(len(scale), dtype=bool)
        while fitted.min() < 0:
            free &= fitted >= 0
            fitted = np.zeros(len(scale))
            fitted[free] = np.linalg.solve(gram[np.ix_(free, free)], target[free])
        return fitted / scale
