"""Two arms measured in turns, and ratios of neighbours: what slows the machine slows both."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeVar

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The middle of some samples, their range and how many they are."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, samples: Iterable[float]) -> "Spread":
        """Raises: ``ValueError`` without samples."""
        values = sorted(samples)
        if not values:
            raise ValueError("a spread needs at least 1 sample but there are 0")
        return cls(median=median(values), low=values[0], high=values[-1], n=len(values))

    def text(self, digits: int = 2) -> str:
        """Return ``median (low to high)`` for tables, without the range if there is only one sample."""
        middle = f"{self.median:.{digits}f}"
        return middle if self.n == 1 else f"{middle} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(Generic[A, B]):
    """What both arms gave, one right after the other."""

    first: A
    second: B


def alternate(first: Callable[[int], A], second: Callable[[int], B], num_pairs: int) -> tuple[Pair[A, B], ...]:
    """Return ``num_pairs`` pairs measured as A B A B; each arm is called with the number of its pair, from 0."""
    return tuple(Pair(first=first(i), second=second(i)) for i in range(num_pairs))


def ratios(numerators: Iterable[float], denominators: Iterable[float]) -> Spread:
    """Return the spread of the quotients pair by pair (not the quotient of the medians)."""
    return Spread.of(above / below for above, below in zip(numerators, denominators, strict=True))
