"""Curves of quality against cost as SVG, drawn with the colours of the page that they stand in."""

from collections.abc import Mapping, Sequence
from html import escape

from fusionkv.fusion_worker.evaluation.rows import Row

_WIDTH, _HEIGHT = 340, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 34, 8, 8, 26
# Ends that every curve lies between: drawn across the chart.
ENDS = {"full_attention": "top", "full_reuse": "bottom"}


def hue(names: Sequence[str], name: str) -> int:
    """Degrees on the colour wheel; neighbours in the list are far apart."""
    return round(names.index(name) * 137.508) % 360


def curves(lines: Mapping[str, Sequence[tuple[float, Row]]], names: Sequence[str]) -> str:
    """A chart: share of recomputed tokens across, score in percent up, an interval at every point.

    lines: each recipe's ratios and rows. names: all recipes, which say a line's class: s0, s1, ...
    """
    open_ = {name: line for name, line in lines.items() if line and name not in ENDS}
    widest = max((r for line in open_.values() for r, _ in line), default=0.0) or 1.0
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        *(_grid(score) for score in (0, 25, 50, 75, 100)),
        *(_tick(r, widest) for r in sorted({r for line in open_.values() for r, _ in line})),
    ]
    for name, kind in ENDS.items():
        if line := lines.get(name):
            y = _y(line[0][1].score)
            # Below the line at the top, above it at the bottom, and never outside the chart or over each other.
            said = y + 11 if kind == "top" else max(y - 3, _TOP + 24)
            parts.append(
                f'<g class="end"><line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
                f"<title>{_said(name, *line[0])}</title>"
                f'<text x="{_WIDTH - _RIGHT}" y="{said}" text-anchor="end">'
                f"{name.replace('_', ' ')}</text></g>"
            )
    parts += [_line(name, line, names.index(name), widest) for name, line in open_.items()]
    return "".join([*parts, "</svg>"])


def _line(name: str, line: Sequence[tuple[float, Row]], number: int, widest: float) -> str:
    points = [(_x(r, widest), _y(row.score), r, row) for r, row in line]
    path = " ".join(f"{x},{y}" for x, y, _, _ in points)
    dots = "".join(
        f'<g><path class="interval" d="M{x} {_y(row.low)}V{_y(row.high)}"/><circle cx="{x}" cy="{y}" r="3"/>'
        f"<title>{_said(name, r, row)}</title></g>"
        for x, y, r, row in points
    )
    return f'<g class="s{number}"><polyline points="{path}"/>{dots}</g>'


def _grid(score: int) -> str:
    y = _y(score / 100)
    return (
        f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>'
        f'<text x="{_LEFT - 5}" y="{y + 4}" text-anchor="end">{score}</text>'
    )


def _tick(r: float, widest: float) -> str:
    return f'<text x="{_x(r, widest)}" y="{_HEIGHT - 8}" text-anchor="middle">{r:g}</text>'


def _said(name: str, r: float, row: Row) -> str:
    return escape(f"{name}, r = {r:g}: {percent(row)} ({row.model})")


def percent(row: Row) -> str:
    """A score with its interval, as "81.2 (77.6 to 84.4)"."""
    if row.score is None:
        return "none"
    interval = "" if row.low is None or row.high is None else f" ({100 * row.low:.1f} to {100 * row.high:.1f})"
    return f"{100 * row.score:.1f}{interval}"


def _x(r: float, widest: float) -> float:
    return round(_LEFT + 8 + r / widest * (_WIDTH - _LEFT - _RIGHT - 16), 1)


def _y(score: float | None) -> float:
    return round(_TOP + (1 - (score or 0.0)) * (_HEIGHT - _TOP - _BOTTOM), 1)
