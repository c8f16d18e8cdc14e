"""Charts as inline SVG: lines, stacked areas, bars, intervals. No script, no network, no library.

What it guarantees:

* every chart has axes with round ticks and a title with the unit; every value can be read in a tooltip (`<title>`);
* colours come from the page's style sheet (classes `c0` to `c7`, Okabe and Ito's palette, which colour-blind readers can tell
  apart; light, dark and print have shades of their own); lines differ by dashes too;
* a chart is 360 units wide with text of 11 units, so that it is legible on a phone as it is; the page sets several in a row;
* text is escaped; a value that is not finite is left out; any number of points draws at most `MAX_POINTS` per series.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from collections.abc import Sequence

WIDTH, HEIGHT = 360.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 26.0, 36.0
MAX_POINTS = 120
COLOURS = 8
"""Colours of the page's palette; the last is that of text, for lines over areas."""
INK = 7
DASHES = ("", "6 3", "2 3", "9 3 2 3", "1 2")


@dataclasses.dataclass(frozen=True)
class Axis:
    """`title` with its unit. `low`, `high`: bounds to include, None: those of the data."""

    title: str
    low: float | None = None
    high: float | None = None
    percent: bool = False


@dataclasses.dataclass(frozen=True)
class Series:
    """Points of one name; `colour` is an index of the palette, `band` a (low, high) around every point."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    dash: int = 0
    band: Sequence[tuple[float, float]] | None = None
    dots: bool = False


@dataclasses.dataclass(frozen=True)
class Interval:
    """A box from `low` to `high` with a line at `middle` and a dot at `mean`."""

    low: float
    middle: float
    high: float
    mean: float


class Frame:
    """The plane of a chart: scales, axes, and the pieces drawn on it, bottom first."""

    def __init__(self, x: Axis, y: Axis, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        """Ranges are those of the data; the y axis is widened to whole ticks."""
        self.x, self.y = x, y
        self.x_low, self.x_high = _span(x_range, x)
        low, high = _span(y_range, y)
        self.y_ticks = ticks(low, high, 5)
        step = self.y_ticks[1] - self.y_ticks[0]
        self.y_low = low if y.low is not None and low == y.low else math.floor(low / step + 1e-9) * step
        self.y_high = high if y.high is not None and high == y.high else math.ceil(high / step - 1e-9) * step
        self.y_ticks = [tick for tick in ticks(self.y_low, self.y_high, 5) if self.y_low <= tick <= self.y_high]
        self.height = HEIGHT
        self._pieces: list[str] = []

    def px(self, x: float) -> float:
        """Place of a value of x."""
        return LEFT + (x - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def py(self, y: float) -> float:
        """Place of a value of y."""
        return self.height - BOTTOM - (y - self.y_low) / (self.y_high - self.y_low) * (self.height - TOP - BOTTOM)

    def add(self, piece: str) -> None:
        """Draws a piece over those before it."""
        self._pieces.append(piece)

    def line(self, points: Sequence[tuple[float, float]], colour: int, dash: int = 0) -> None:
        """A line through finite points; it breaks where one is missing."""
        style = f' stroke-dasharray="{DASHES[dash % len(DASHES)]}"' if dash else ""
        for run in _runs(points):
            path = "M" + "L".join(f"{self.px(x):.1f} {self.py(y):.1f}" for x, y in run)
            self.add(f'<path class="line c{colour % COLOURS}" d="{path}"{style}/>')

    def area(self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], css: str) -> None:
        """The area between two lines."""
        rows = [r for r in zip(xs, lows, highs, strict=True) if all(map(math.isfinite, r))]
        if not rows:
            return
        there = "L".join(f"{self.px(x):.1f} {self.py(high):.1f}" for x, _, high in rows)
        back = "L".join(f"{self.px(x):.1f} {self.py(low):.1f}" for x, low, _ in reversed(rows))
        self.add(f'<path class="{css}" d="M{there}L{back}Z"/>')

    def rect(self, left: float, right: float, low: float, high: float, css: str, tip: str = "") -> None:
        """A rectangle in the units of the axes."""
        x, width = self.px(left), self.px(right) - self.px(left)
        y, height = self.py(high), self.py(low) - self.py(high)
        self.add(f'<rect class="{css}" {_box(x, y, width, height)}>{_tip(tip)}</rect>')

    def dot(self, x: float, y: float, colour: int, tip: str = "") -> None:
        """A dot."""
        self.add(
            f'<circle class="dot c{colour % COLOURS}" cx="{self.px(x):.1f}" cy="{self.py(y):.1f}" r="3">{_tip(tip)}</circle>'
        )

    def tips(self, xs: Sequence[float], texts: Sequence[str]) -> None:
        """An invisible column over every x that shows its text: lines and areas have no size to point at."""
        for index, (x, text) in enumerate(zip(xs, texts, strict=True)):
            left = self.px((xs[index - 1] + x) / 2) if index else LEFT
            right = self.px((x + xs[index + 1]) / 2) if index + 1 < len(xs) else WIDTH - RIGHT
            box = _box(left, TOP, right - left, self.height - TOP - BOTTOM)
            self.add(f'<rect class="tip" {box}>{_tip(text)}</rect>')

    def svg(self, label: str, x_names: Sequence[tuple[float, str]] | None = None) -> str:
        """The chart. `x_names`: named ticks in place of numbers."""
        parts = [
            f'<svg viewBox="0 0 {WIDTH:.0f} {self.height:.0f}" role="img" aria-label="{html.escape(label)}">',
            f'<text class="title" x="2" y="12">{html.escape(self.y.title)}</text>',
        ]
        for tick in self.y_ticks:
            place = self.py(tick)
            css = "zero" if tick == 0 and self.y_low < 0 else "grid"
            parts.append(f'<path class="{css}" d="M{LEFT:.0f} {place:.1f}H{WIDTH - RIGHT:.0f}"/>')
            text = number(tick, self.y.percent, self.y_ticks)
            parts.append(f'<text class="tick" x="{LEFT - 5:.0f}" y="{place + 4:.1f}" text-anchor="end">{text}</text>')
        base = self.height - BOTTOM
        if x_names is None:
            marks = ticks(self.x_low, self.x_high, 5)
            inside = [tick for tick in marks if self.x_low <= tick <= self.x_high]
            x_names = [(tick, number(tick, self.x.percent, inside)) for tick in inside]
        for place, text in x_names:
            anchor = "end" if self.px(place) > WIDTH - RIGHT - 8 else "middle"
            at = WIDTH if anchor == "end" else self.px(place)
            parts.append(f'<path class="axis" d="M{self.px(place):.1f} {base:.1f}v3"/>')
            parts.append(f'<text class="tick" x="{at:.1f}" y="{base + 14:.1f}" text-anchor="{anchor}">')
            parts.append(f"{html.escape(text)}</text>")
        parts += self._pieces
        parts.append(f'<path class="axis" d="M{LEFT:.0f} {base:.1f}H{WIDTH - RIGHT:.0f}"/>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text class="title" x="{middle:.0f}" y="{self.height - 6:.0f}" text-anchor="middle">')
        parts.append(f"{html.escape(self.x.title)}</text></svg>")
        return "".join(parts)


# --- charts ------------------------------------------------------------------------------------------------------------------


def line_chart(label: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Lines, with bands and dots where the series have them; empty without a finite point."""
    thinned = [_thin(one) for one in series]
    points = [(px, py) for one in thinned for px, py in zip(one.xs, one.ys, strict=True) if math.isfinite(py)]
    if not points:
        return ""
    edges = [edge for one in thinned for pair in one.band or () for edge in pair if math.isfinite(edge)]
    frame = Frame(x, y, _range([p[0] for p in points]), _range([p[1] for p in points] + edges))
    for one in thinned:
        if one.band is not None:
            lows, highs = zip(*one.band, strict=True)
            frame.area(one.xs, lows, highs, f"band c{one.colour % COLOURS}")
        frame.line(list(zip(one.xs, one.ys, strict=True)), one.colour, one.dash)
    longest = max(thinned, key=lambda one: len(one.xs))
    by_x = [{xv: yv for xv, yv in zip(one.xs, one.ys, strict=True) if math.isfinite(yv)} for one in thinned]
    texts = []
    for place in longest.xs:
        values = [
            f"{one.name}: {number(known[place], y.percent)}"
            for one, known in zip(thinned, by_x, strict=True)
            if place in known
        ]
        texts.append(f"{x.title}: {number(place)}\n" + "\n".join(values))
    frame.tips(longest.xs, texts)
    for one in thinned:
        if one.dots:
            for index, (px, py) in enumerate(zip(one.xs, one.ys, strict=True)):
                band = (
                    f" ({number(one.band[index][0], y.percent)} to {number(one.band[index][1], y.percent)})"
                    if one.band
                    else ""
                )
                if math.isfinite(py):
                    frame.dot(px, py, one.colour, f"{one.name}, {x.title} {number(px)}: {number(py, y.percent)}{band}")
    return frame.svg(label)


def area_chart(label: str, layers: Sequence[Series], x: Axis, y: Axis, lines: Sequence[Series] = ()) -> str:
    """Layers stacked on each other, the first at the bottom, and lines over them; empty without a point.

    All layers share their xs.
    """
    layers, lines = [_thin(one) for one in layers], [_thin(one) for one in lines]
    xs = layers[0].xs if layers else ()
    if not xs:
        return ""
    floor = [0.0] * len(xs)
    tops: list[list[float]] = [floor]
    for one in layers:
        tops.append([a + b for a, b in zip(tops[-1], one.ys, strict=True)])
    values = [v for top in tops for v in top] + [v for one in lines for v in one.ys if math.isfinite(v)]
    frame = Frame(x, y, _range(xs), _range(values))
    for one, low, high in zip(layers, tops[:-1], tops[1:], strict=True):
        frame.area(xs, low, high, f"fill c{one.colour % COLOURS}")
    for one in lines:
        frame.line(list(zip(one.xs, one.ys, strict=True)), one.colour, one.dash)
    named = [*reversed(layers), *lines]
    texts = [
        f"{x.title}: {number(place)}\n"
        + "\n".join(f"{one.name}: {number(one.ys[i], y.percent)}" for one in named if i < len(one.ys))
        for i, place in enumerate(xs)
    ]
    frame.tips(xs, texts)
    return frame.svg(label)


def bar_chart(
    label: str, edges: Sequence[float], layers: Sequence[tuple[str, int, Sequence[float]]], x: Axis, y: Axis
) -> str:
    """A histogram: bar `i` of every layer (name, colour, heights) reaches from `edges[i]` to `edges[i + 1]`; stacked."""
    if len(edges) < 2:
        return ""
    heights = [sum(column) for column in zip(*(values for _, _, values in layers), strict=True)]
    frame = Frame(x, y, (edges[0], edges[-1]), (0.0, max(heights)))
    gap = (edges[-1] - edges[0]) / max(1, len(edges) - 1) * 0.06
    for i, (left, right) in enumerate(itertools.pairwise(edges)):
        base = 0.0
        for name, colour, values in layers:
            if values[i]:
                tip = f"{x.title} {number(left)} to {number(right)}\n{name}: {number(values[i], y.percent)}"
                frame.rect(left + gap, right - gap, base, base + values[i], f"fill c{colour % COLOURS}", tip)
                base += values[i]
    return frame.svg(label)


def column_chart(
    label: str, names: Sequence[str], layers: Sequence[tuple[str, int, Sequence[float]]], x: Axis, y: Axis
) -> str:
    """A stacked column per name."""
    if not names:
        return ""
    heights = [sum(column) for column in zip(*(values for _, _, values in layers), strict=True)]
    frame = Frame(x, y, (-0.5, len(names) - 0.5), (0.0, max(heights)))
    for i, column in enumerate(names):
        base = 0.0
        for name, colour, values in layers:
            tip = f"{x.title} {column}\n{name}: {number(values[i], y.percent)}"
            frame.rect(i - 0.36, i + 0.36, base, base + values[i], f"fill c{colour % COLOURS}", tip)
            base += values[i]
    return frame.svg(label, _names(names))


def interval_chart(
    label: str, names: Sequence[str], intervals: Sequence[Interval], colour: int, x: Axis, y: Axis
) -> str:
    """A box per name, from low to high, with its middle and mean."""
    if not names:
        return ""
    values = [v for one in intervals for v in (one.low, one.high, one.mean) if math.isfinite(v)]
    if not values:
        return ""
    frame = Frame(x, y, (-0.5, len(names) - 0.5), _range(values))
    for i, one in enumerate(intervals):
        if not math.isfinite(one.mean):
            continue
        tip = (
            f"{x.title} {names[i]}\n10th to 90th percentile: {number(one.low)} to {number(one.high)}\n"
            f"median {number(one.middle)}, mean {number(one.mean)}"
        )
        frame.rect(i - 0.25, i + 0.25, one.low, one.high, f"band c{colour % COLOURS}", tip)
        frame.line([(i - 0.25, one.middle), (i + 0.25, one.middle)], colour)
        frame.dot(i, one.mean, colour, tip)
    return frame.svg(label, _names(names))


# --- numbers ------------------------------------------------------------------------------------------------------------


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round values (1, 2 or 5 times a power of ten apart) from below `low` to above `high`."""
    if not high > low:
        high = low + 1.0
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1.0, 2.0, 5.0) if rough <= factor * power * (1 + 1e-9)), 10.0 * power)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float, percent: bool = False, among: Sequence[float] = ()) -> str:
    """A number as a person reads it; `among`: the ticks that it stands with, which share their decimals."""
    if not math.isfinite(value):
        return "-"
    if percent:
        value, among = value * 100, [one * 100 for one in among]
    step = abs(among[1] - among[0]) if len(among) > 1 else 0.0
    size = max([abs(value), *(abs(one) for one in among)])
    unit, scale = next(((u, s) for u, s in (("G", 1e9), ("M", 1e6), ("k", 1e3)) if size >= 10 * s), ("", 1.0))
    if value == 0:
        return "0%" if percent else "0"
    if step:
        decimals = max(0, min(6, -math.floor(math.log10(step / scale) + 1e-9)))
    elif size < 1e-3:
        return f"{value:.1e}" + ("%" if percent else "")
    else:
        decimals = (
            0
            if abs(value / scale) >= 100 or (float(value).is_integer() and scale == 1.0)
            else 1
            if abs(value / scale) >= 10
            else 3
        )
    return f"{value / scale:.{decimals}f}{unit}" + ("%" if percent else "")


def _names(names: Sequence[str]) -> list[tuple[float, str]]:
    every = math.ceil(len(names) / 12)
    return [(float(i), name) for i, name in enumerate(names) if i % every == 0]


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _span(data: tuple[float, float], axis: Axis) -> tuple[float, float]:
    low = data[0] if axis.low is None else min(axis.low, data[0])
    high = data[1] if axis.high is None else max(axis.high, data[1])
    if high - low <= 1e-12 * max(1.0, abs(high)):
        return (low - 0.5, high + 0.5) if low else (0.0, 1.0)
    return low, high


def _thin(one: Series) -> Series:
    """At most `MAX_POINTS` points: means over equal numbers of them; the band covers the least to the greatest mean edge."""
    count = len(one.xs)
    if count <= MAX_POINTS:
        return one
    cuts = [round(i * count / MAX_POINTS) for i in range(MAX_POINTS + 1)]
    spans = list(itertools.pairwise(cuts))
    band = None
    if one.band is not None:
        edges = list(zip(*one.band, strict=True))
        band = [(_mean(edges[0][a:b]), _mean(edges[1][a:b])) for a, b in spans]
    return dataclasses.replace(
        one, xs=[_mean(one.xs[a:b]) for a, b in spans], ys=[_mean(one.ys[a:b]) for a, b in spans], band=band
    )


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _runs(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _box(x: float, y: float, width: float, height: float) -> str:
    return f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}"'


def _tip(text: str) -> str:
    return f"<title>{html.escape(text)}</title>" if text else ""
