"""Charts as HTML: SVG for what is drawn, text beside it, so that letters keep their size at every width of the page."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from html import escape
from statistics import median
from typing import NamedTuple

MOST_POINTS = 600
"""Points of a line that are drawn; of more, the lowest and the highest of each stretch."""
COLOURS = 10
"""Colours of lines, `--c0` to `--c9` in the page's style sheet."""
LEVELS = 9
"""Shades of a heat map, `--h0` to `--h8`; the middle one is an even share."""


class Line(NamedTuple):
    """A line of a chart.

    Args:
        name: in the legend.
        points: (x, y) by rising x; a y that is not finite leaves a gap.
        is_smoothed: draws a running median, and the points themselves faintly behind it.
    """

    name: str
    points: Sequence[tuple[float, float]]
    is_smoothed: bool = False


class Level(NamedTuple):
    """A horizontal line to compare with."""

    name: str
    value: float


class Axis(NamedTuple):
    """A range of values and its ticks, on a logarithmic scale or a linear one."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def at(self, value: float) -> float:
        """Where a value is, from 0 to 1."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    until: float,
    unit: str = "",
    levels: Sequence[Level] = (),
    band: tuple[Line, Line] | None = None,
    is_log: bool = False,
    from_zero: bool = False,
    note: str = "",
) -> str:
    """A figure of lines over training steps; one that says so if there is nothing to draw.

    Args:
        until: the last step of the run, where the chart ends.
        levels: drawn dashed across the chart, with their names.
        band: two lines between which the chart is filled.
        is_log: a logarithmic scale of y; what is not positive leaves a gap.
        from_zero: the scale of y begins at 0.
    """
    lines = [line for line in lines if _finite(line.points)]
    known = [point for line in (*lines, *(band or ())) for point in _finite(line.points)]
    if is_log:
        known = [(x, y) for x, y in known if y > 0]
    head = f"<figcaption>{escape(title)}{f'<small>{escape(unit)}</small>' if unit else ''}</figcaption>"
    if not known:
        return f"<figure>{head}<p class='none'>nothing recorded</p></figure>"
    x = _linear(0.0, max(until, *(x for x, _ in known)), exact=True, finest=1.0)
    heights = [y for _, y in known] + [level.value for level in levels]
    top = min(max(heights), _usual_top(known, levels))
    low = min(heights)
    # Less than a factor of three has no round numbers to show on a logarithmic scale.
    y = _logarithmic(low, top) if is_log and top > 3 * low else _linear(0.0 if from_zero else low, top)

    drawn = "".join(_grid(y)) + "".join(f"<path class='level' d='{_level(level, y)}'/>" for level in levels)
    if band:
        drawn += f"<path class='band' d='{_band(*band, x, y)}'/>"
    for index, line in enumerate(lines):
        colour = f"style='stroke:var(--c{index % COLOURS})'"
        if line.is_smoothed and len(line.points) > 60:
            drawn += f"<path class='faint' {colour} d='{_path(line.points, x, y)}'/>"
            drawn += f"<path {colour} d='{_path(running_median(line.points), x, y)}'/>"
        else:
            drawn += f"<path {colour} d='{_path(line.points, x, y)}'/>"
    below = f"<p class='note'>{escape(note)}</p>" if note else ""
    labels = "".join(_labels(x, y, levels))
    legend = "".join(_legend(lines)) if lines else ""
    return (
        f"<figure>{head}<ul class='legend'>{legend}</ul>"
        f"<div class='plot'><svg viewBox='0 0 1000 1000' preserveAspectRatio='none' role='img' "
        f"aria-label='{escape(title)}'>{drawn}</svg>{_dots(lines, x, y)}{labels}</div>{below}</figure>"
    )


def heat_map(name: str, columns: Sequence[Sequence[float]], *, note: str = "") -> str:
    """A strip of cells, one column a moment and one row an expert, shaded by load over even share (1 is even, 2 full).

    Args:
        columns: at each moment the load of each expert, as fractions that sum to 1; a column may be NaN.
    """
    rows = max((len(column) for column in columns), default=0)
    by_shade: dict[int, list[str]] = {}
    for x, column in enumerate(columns):
        for row, fraction in enumerate(column):
            if math.isfinite(fraction):
                shade = min(LEVELS - 1, max(0, round(fraction * rows * (LEVELS - 1) / 2)))
                by_shade.setdefault(shade, []).append(f"M{x} {row}h1v1h-1z")
    cells = "".join(f"<path style='fill:var(--h{s})' d='{''.join(d)}'/>" for s, d in sorted(by_shade.items()))
    return (
        f"<div class='strip'><b>{escape(name)}</b><svg viewBox='0 0 {max(1, len(columns))} {max(1, rows)}' "
        f"preserveAspectRatio='none' role='img' aria-label='{escape(name)}' style='height:{max(28, 7 * rows)}px'>"
        f"{cells}</svg><small>{escape(note)}</small></div>"
    )


def short(value: float) -> str:
    """A number in a few characters: 1.93, 12.3k, 3e-4."""
    size = abs(value)
    if size >= 1000:
        for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
            if size >= scale:
                return f"{value / scale:.3g}{letter}"
    if value == 0 or 0.0001 <= size < 1000:
        return f"{value:.3g}"
    return f"{value:.2g}".replace("e-0", "e-")


def running_median(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The median over a fiftieth of the points, centred, which single spikes do not bend; gaps stay gaps."""
    reach = max(1, len(points) // 100)
    window: list[float] = []
    low = high = 0
    smooth = []
    for i, (x, y) in enumerate(points):
        # Narrower towards both ends, so that the line begins and ends where the points do.
        room = min(reach, i, len(points) - 1 - i)
        for _, entering in points[high : i + room + 1]:
            if math.isfinite(entering):
                insort(window, entering)
        for _, leaving in points[low : i - room]:
            if math.isfinite(leaving):
                window.pop(bisect_left(window, leaving))
        low, high = i - room, i + room + 1
        smooth.append((x, median(window) if math.isfinite(y) else math.nan))
    return smooth


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most about `most` of the points: first and last, and the lowest and highest of each stretch; gaps stay."""
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(len(points) / (most // 2))
    kept: list[tuple[float, float]] = [points[0]]
    for start in range(0, len(points), stretch):
        part = list(enumerate(points[start : start + stretch], start))
        finite = [(i, p) for i, p in part if math.isfinite(p[1])]
        chosen = {min(finite, key=lambda e: e[1][1]), max(finite, key=lambda e: e[1][1])} if finite else set()
        gap = [part[0]] if len(finite) < len(part) // 2 else []
        kept += [p for _, p in sorted({*chosen, *gap})]
    return [*kept, points[-1]]


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _usual_top(points: Sequence[tuple[float, float]], levels: Sequence[Level]) -> float:
    """A height that single spikes do not raise: they leave the chart."""
    heights = sorted(y for _, y in points)
    usual = heights[min(len(heights) - 1, int(0.98 * len(heights)))]
    return max([usual + 3 * abs(usual - heights[0]), points[0][1], *(level.value for level in levels)])


def _linear(low: float, high: float, *, exact: bool = False, finest: float = 0.0) -> Axis:
    """An axis with about five round ticks, no closer than `finest`; it ends at the data (`exact`) or at a tick."""
    if high <= low:
        low, high = (low, low + 1) if exact else (low - (abs(low) or 1) / 10, high + (abs(high) or 1) / 10)
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(finest, next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(step * i for i in range(first, last + 1))
    if exact:
        return Axis(low, high, tuple(tick for tick in ticks if low <= tick <= high))
    return Axis(ticks[0], ticks[-1], ticks)


def _logarithmic(low: float, high: float) -> Axis:
    """An axis with ticks at 1, 2 and 5 of each power of ten, or at powers alone if they span many."""
    low, high = low / 1.15, high * 1.15
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    sparse = math.log10(high / low) > 2.5
    every = max(1, len(powers) // 5) if sparse else 1
    ticks = [digit * 10.0**p for p in powers[::every] for digit in ((1,) if sparse else (1, 2, 5))]
    return Axis(low, high, tuple(tick for tick in ticks if low <= tick <= high), is_log=True)


def _place(value: float, axis: Axis) -> float:
    return round(1000 * axis.at(value), 1)


def _path(points: Sequence[tuple[float, float]], x: Axis, y: Axis) -> str:
    """The `d` of a path; a lone point is a short stroke, which round caps make a dot."""
    parts, pen_is_down = [], False
    for px, py in thinned(points):
        if not math.isfinite(py) or (y.is_log and py <= 0):
            pen_is_down = False
            continue
        parts.append(f"{'L' if pen_is_down else 'M'}{_place(px, x):g} {1000 - _place(py, y):g}")
        pen_is_down = True
    return "".join(parts)


def _band(low: Line, high: Line, x: Axis, y: Axis) -> str:
    over, under = _finite(thinned(high.points)), _finite(thinned(low.points))
    corners = [f"{_place(px, x):g} {1000 - _place(py, y):g}" for px, py in [*over, *reversed(under)]]
    return f"M{'L'.join(corners)}z"


def _level(level: Level, y: Axis) -> str:
    return f"M0 {1000 - _place(level.value, y):g}H1000"


def _grid(y: Axis) -> Iterator[str]:
    for tick in y.ticks:
        yield f"<path class='grid' d='M0 {1000 - _place(tick, y):g}H1000'/>"


def _labels(x: Axis, y: Axis, levels: Sequence[Level]) -> Iterator[str]:
    for tick in y.ticks:
        yield f"<span class='y' style='bottom:{_place(tick, y) / 10:g}%'>{short(tick)}</span>"
    for tick in x.ticks:
        yield f"<span class='x' style='left:{_place(tick, x) / 10:g}%'>{short(tick)}</span>"
    for level in levels:
        text = f"{escape(level.name)} {short(level.value)}"
        # Curves fall: low on the left and high on the right there is room.
        side = "left" if y.at(level.value) < 0.5 else "right"
        yield f"<span class='named' style='{side}:4px;bottom:{_place(level.value, y) / 10:g}%'>{text}</span>"


def _dots(lines: Sequence[Line], x: Axis, y: Axis) -> str:
    """Points of short lines as dots, which a stretched SVG would deform."""
    return "".join(
        f"<i style='left:{_place(px, x) / 10:g}%;bottom:{_place(py, y) / 10:g}%;"
        f"background:var(--c{index % COLOURS})'></i>"
        for index, line in enumerate(lines)
        if len(line.points) <= 40
        for px, py in _finite(line.points)
        if (py > 0 or not y.is_log) and y.low <= py <= y.high
    )


def _legend(lines: Sequence[Line]) -> Iterator[str]:
    for index, line in enumerate(lines):
        last = _finite(line.points)[-1][1]
        yield f"<li><i style='background:var(--c{index % COLOURS})'></i>{escape(line.name)} <b>{short(last)}</b></li>"
