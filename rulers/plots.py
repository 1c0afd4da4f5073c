"""Plots of a report as SVG text: no library, no script, nothing fetched. Colour says nothing alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
WIDTH, BAR, GAP, LEFT, RIGHT = 640, 14, 10, 150, 70
BINS = 20
REACH = 36  # of a tick's text: two that are closer run into each other


@dataclass(frozen=True)
class Row:
    """A value with its standard error (None: unknown) under a label."""

    label: str
    value: float
    se: float | None


def histogram(values: F64, label: str, color: str = "#2b6cb0") -> str:
    """Share of positions a bin of Sigma-min from 0 to 1; a line at the median, a dashed one at p5."""
    height, base, left, width = 120, 92, 44, 250
    counts, _ = np.histogram(np.clip(values, 0, 1), bins=BINS, range=(0, 1))
    shares = counts / max(1, len(values))
    top = max(float(shares.max()), 1e-9)
    step = width / BINS
    parts = [_text(left, 12, label, "start", bold=True)]
    for i, share in enumerate(shares):
        h = 72 * float(share) / top
        parts.append(
            f'<rect x="{left + i * step:.1f}" y="{base - h:.1f}" width="{step - 1:.1f}" height="{h:.1f}" '
            f'fill="{color}"><title>{i / BINS:.2f} to {(i + 1) / BINS:.2f}: {share:.1%}</title></rect>'
        )
    median, p5 = (float(x) for x in np.percentile(np.clip(values, 0, 1), (50, 5)))
    for x, dash in ((median, ""), (p5, ' stroke-dasharray="3 2"')):
        at = left + width * x
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="18" y2="{base}" stroke="#1a202c"{dash}/>')
    parts.append(f'<line x1="{left}" x2="{left + width}" y1="{base}" y2="{base}" stroke="#718096"/>')
    for tick in (0.0, 0.5, 1.0):
        parts.append(_text(left + width * tick, base + 14, f"{tick:g}", "middle"))
    parts.append(_text(left - 4, base - 68, f"{top:.0%}", "end"))
    parts.append(_text(left + width / 2, height - 2, "Sigma-min of a position", "middle"))
    return _svg(left + width + 16, height, label, parts)


def intervals(rows: Sequence[Row], title: str, *, zero: bool = False) -> str:
    """A point a row with two standard errors to both sides, all on one axis. `zero`: the axis holds 0, which is
    marked, and told instead of what is close to it.
    """
    ends = [r.value + k * 2 * (r.se or 0.0) for r in rows for k in (-1, 1)]
    low, high = _span([*ends, 0.0] if zero else ends)
    inner = WIDTH - LEFT - RIGHT

    def x(value: float) -> float:
        return LEFT + inner * (value - low) / (high - low)

    parts = [_text(LEFT, 14, title, "start", bold=True)]
    bottom = 28 + len(rows) * (BAR + GAP)
    if zero:
        parts.append(f'<line x1="{x(0):.1f}" x2="{x(0):.1f}" y1="22" y2="{bottom}" stroke="#a0aec0"/>')
    for i, row in enumerate(rows):
        y = 28 + i * (BAR + GAP) + BAR / 2
        parts.append(_text(LEFT - 8, y + 4, row.label, "end"))
        if row.se is not None:
            a, b = x(row.value - 2 * row.se), x(row.value + 2 * row.se)
            parts.append(f'<line x1="{a:.1f}" x2="{b:.1f}" y1="{y}" y2="{y}" stroke="#2b6cb0" stroke-width="3"/>')
        parts.append(f'<circle cx="{x(row.value):.1f}" cy="{y}" r="4" fill="#1a365d"/>')
        parts.append(_text(WIDTH - RIGHT + 8, y + 4, f"{row.value:.4f}", "start"))
    parts.append(f'<line x1="{LEFT}" x2="{LEFT + inner}" y1="{bottom}" y2="{bottom}" stroke="#718096"/>')
    ticks = [(v, f"{v:.3f}") for v in (low, (low + high) / 2, high)]
    if zero:
        ticks = [(v, t) for v, t in ticks if abs(x(v) - x(0)) > REACH] + [(0.0, "0")]
    parts += [_text(x(v), bottom + 14, t, "middle") for v, t in ticks]
    return _svg(WIDTH, bottom + 20, title, parts)


def bars(labels: Sequence[str], values: Sequence[float], notes: Sequence[str], title: str) -> str:
    """A bar a label, from 0; notes stand behind the bars."""
    top = max(1e-9, *values)
    inner = WIDTH - LEFT - RIGHT
    parts = [_text(LEFT, 14, title, "start", bold=True)]
    for i, (label, value, note) in enumerate(zip(labels, values, notes)):
        y = 28 + i * (BAR + GAP)
        w = inner * max(0.0, value) / top
        parts.append(_text(LEFT - 8, y + BAR - 3, label, "end"))
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{w:.1f}" height="{BAR}" fill="#2b6cb0"/>')
        parts.append(_text(LEFT + w + 6, y + BAR - 3, note, "start"))
    return _svg(WIDTH + 120, 30 + len(labels) * (BAR + GAP), title, parts)


def _span(values: Sequence[float]) -> tuple[float, float]:
    """An axis that holds all values with a little room."""
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or max(1e-3, 0.05 * abs(high))
    return low - room, high + room


def _text(x: float, y: float, text: str, anchor: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="11" role="img">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"])
