"""Charts as inline SVG: axes with units, no script, no colour without a second sign."""

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 1100, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 20, 45
COLOURS = ("#1f5fa8", "#c2500a", "#2a7f3e", "#7a3e9d", "#555555", "#a8325e", "#0f7f86", "#8a6d00")
DASHES = ("", "6 3", "2 3", "8 3 2 3")

Point = tuple[float, float]


@dataclass(slots=True)
class Chart:
    """Marks over two axes; ``is_log`` is the x axis'. Marks are added in data coordinates."""

    title: str
    x_label: str
    y_label: str
    x_range: Point
    y_range: Point
    is_log: bool = False
    marks: list[str] = field(default_factory=list)

    def x(self, value: float) -> float:
        low, high = self.x_range
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return _LEFT + (value - low) / ((high - low) or 1) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return HEIGHT - _BOTTOM - (value - low) / ((high - low) or 1) * (HEIGHT - _TOP - _BOTTOM)

    def line(self, points: Iterable[Point], colour: str, dash: str = "", name: str = "") -> None:
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self.marks.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dash}">'
            f"<title>{escape(name)}</title></polyline>"
        )

    def stairs(self, points: SequenceOf[Point], colour: str, dash: str = "", name: str = "") -> None:
        """A line that is level between points: nothing came in between."""
        steps = [p for (_, before), (x, y) in pairwise(points) for p in ((x, before), (x, y))]
        self.line([*points[:1], *steps], colour, dash, name)

    def box(self, x: Point, y: Point, colour: str, name: str, opacity: float = 1.0) -> None:
        left, right, top, bottom = self.x(x[0]), self.x(x[1]), self.y(y[1]), self.y(y[0])
        self.marks.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(right - left, 0.5):.1f}" height="{bottom - top:.1f}" '
            f'fill="{colour}" fill-opacity="{opacity}"><title>{escape(name)}</title></rect>'
        )

    def dot(self, at: Point, colour: str, label: str, below: bool = False) -> None:
        x, y = self.x(at[0]), self.y(at[1])
        anchor, shift = ("end", -7) if x > WIDTH - 200 else ("start", 7)
        self.marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/><text x="{x + shift:.1f}" '
            f'y="{y + (15 if below else -6):.1f}" text-anchor="{anchor}" fill="{colour}">{escape(label)}</text>'
        )

    def text(self) -> str:
        """Return the element, with its title for those who do not see it."""
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">'
            f"{self._axes()}{''.join(self.marks)}</svg>"
        )

    def _axes(self) -> str:
        bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
        parts = []
        for value in _log_ticks(*self.x_range) if self.is_log else ticks(*self.x_range):
            x = self.x(value)
            parts.append(f'<path d="M{x:.1f} {_TOP}V{bottom}" class="grid"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
        for value in ticks(*self.y_range):
            y = self.y(value)
            parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" class="grid"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
        middle = (_TOP + bottom) / 2
        parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" class="axis"/>')
        parts.append(
            f'<text x="{(_LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(self.x_label)}</text>'
            f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{escape(self.y_label)}</text>'
        )
        return "".join(parts)


def ticks(low: float, high: float) -> list[float]:
    """Return about six round values in ``[low, high]``."""
    if high <= low:
        return [low]
    raw = (high - low) / 6
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= raw)
    first = math.ceil(low / step)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [v for p in powers for m in (1, 2, 5) if low <= (v := m * 10.0**p) <= high]
