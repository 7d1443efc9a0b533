"""A chart as an SVG file: bars stacked by region, one for each window, and a mark for each thing that was killed."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 900, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 60, 50
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2")
LINES = 5


def write_chart(
    path: Path,
    title: str,
    cells: Mapping[tuple[datetime, str], float],
    marks: Sequence[tuple[datetime, str]],
    width_s: float,
) -> None:
    """Write the values of (window, region) as stacked bars."""
    windows = sorted({window for window, _ in cells})
    regions = sorted({region for _, region in cells})
    tops = {window: sum(cells.get((window, region), 0.0) for region in regions) for window in windows}
    highest = max(tops.values(), default=1.0) or 1.0
    first, span_s = windows[0], max(width_s, (windows[-1] - windows[0]).total_seconds() + width_s)
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(at: datetime) -> float:
        return LEFT + wide * (at - first).total_seconds() / span_s

    def y(value: float) -> float:
        return TOP + high * (1 - value / highest)

    bar = wide * width_s / span_s
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        "<style>text { font-size: 12px } .title { font-size: 16px; font-weight: bold }</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" class="title">{escape(title)}</text>',
    ]
    for line in range(LINES + 1):
        value = highest * line / LINES
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:,.0f}</text>'
        )
    for window in windows:
        below = 0.0
        for number, region in enumerate(regions):
            value = cells.get((window, region), 0.0)
            parts.append(
                f'<rect x="{x(window) + 1:.1f}" y="{y(below + value):.1f}" width="{max(1.0, bar - 2):.1f}" '
                f'height="{y(below) - y(below + value):.1f}" fill="{COLOURS[number % len(COLOURS)]}"/>'
            )
            below += value
    every = max(1, len(windows) // 8)
    parts += [
        f'<text x="{x(window) + bar / 2:.1f}" y="{HEIGHT - 30}" text-anchor="middle">{window:%H:%M:%S}</text>'
        for window in windows[::every]
    ]
    for number, (at, text) in enumerate(marks):
        parts.append(
            f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{TOP - 6}" y2="{TOP + high}" stroke="#c00" '
            f'stroke-dasharray="4 3"/><text x="{x(at) + 4:.1f}" y="{TOP - 8 - 12 * (number % 2)}" '
            f'fill="#c00">{escape(text)}</text>'
        )
    for number, region in enumerate(regions):
        at = LEFT + 110 * number
        parts.append(
            f'<rect x="{at}" y="{HEIGHT - 18}" width="12" height="12" fill="{COLOURS[number % len(COLOURS)]}"/>'
            f'<text x="{at + 18}" y="{HEIGHT - 8}">{escape(region)}</text>'
        )
    path.write_text("\n".join([*parts, "</svg>\n"]))
