"""SVG charts of quality against cost, in the colours of the report's page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from fusionkv.fusion_worker.evaluate.report.rows import Row

_WIDTH, _HEIGHT = 340, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 34, 8, 8, 26
# Metrics in nats; all others are shares, or differences of shares.
IN_NATS = {"answer_kl", "answer_kl_median", "answer_kl_p90", "gold_nll"}
# Recipes that bound all curves: drawn as lines across the chart.
ENDS = {"full_attention": "top", "full_reuse": "bottom"}


@dataclass(frozen=True, slots=True)
class Point:
    """A recipe at a ratio. share: recomputed share of context tokens. scored: rows computed only for scores."""

    row: Row
    share: float
    scored: float


def hue(names: Sequence[str], name: str) -> int:
    """A recipe's hue in degrees; neighbours in the list get distant hues."""
    return round(names.index(name) * 137.508) % 360


def curves(lines: Mapping[str, Sequence[Point]], names: Sequence[str]) -> str:
    """A chart of scores in percent over the share of recomputed tokens, with an interval at every point.

    Ticks are the requested ratios, of which some recipes recompute less. names: all recipes, whose index is a line's
    class: s0, s1, ...
    """
    open_ = {name: line for name, line in lines.items() if line and name not in ENDS}
    ratios = sorted({point.row.r for line in open_.values() for point in line})
    widest = max((*ratios, *(point.share for line in open_.values() for point in line)), default=0.0) or 1.0
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        *(_grid(score) for score in (0, 25, 50, 75, 100)),
        *(f'<text x="{_x(r, widest)}" y="{_HEIGHT - 8}" text-anchor="middle">{r:g}</text>' for r in ratios),
    ]
    for name, kind in ENDS.items():
        if line := lines.get(name):
            y = _y(line[0].row.score)
            # Below the top line, above the bottom line, inside the chart and without overlap.
            label_y = y + 11 if kind == "top" else max(y - 3, _TOP + 24)
            parts.append(
                f'<g class="end"><line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
                f"<title>{_label(line[0])}</title>"
                f'<text x="{_WIDTH - _RIGHT}" y="{label_y}" text-anchor="end">'
                f"{name.replace('_', ' ')}</text></g>"
            )
    parts += [_line(line, names.index(name), widest) for name, line in open_.items()]
    return "".join([*parts, "</svg>"])


def _line(line: Sequence[Point], number: int, widest: float) -> str:
    points = [(_x(point.share, widest), _y(point.row.score), point) for point in line]
    path = " ".join(f"{x},{y}" for x, y, _ in points)
    dots = "".join(
        f'<g><path class="interval" d="M{x} {_y(point.row.low)}V{_y(point.row.high)}"/>'
        f'<circle cx="{x}" cy="{y}" r="3"/><title>{_label(point)}</title></g>'
        for x, y, point in points
    )
    return f'<g class="s{number}"><polyline points="{path}"/>{dots}</g>'


def _grid(score: int) -> str:
    y = _y(score / 100)
    return (
        f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>'
        f'<text x="{_LEFT - 5}" y="{y + 4}" text-anchor="end">{score}</text>'
    )


def _label(point: Point) -> str:
    row, cost = point.row, f"{100 * point.share:.1f}% recomputed, {point.scored:.0f} rows for scores"
    return escape(f"{row.recipe}, r = {row.r:g}: {shown(row)} ({row.model}); {cost}")


def shown(row: Row) -> str:
    """A score in percent or in nats with its interval, as "81.2 (77.6 to 84.4)"."""
    scale, digits = (1, 3) if row.metric in IN_NATS else (100, 1)
    score, low, high = ("" if x is None else f"{scale * x:.{digits}f}" for x in (row.score, row.low, row.high))
    return f"{score} ({low} to {high})" if low and high else score


def _x(share: float, widest: float) -> float:
    return round(_LEFT + 8 + share / widest * (_WIDTH - _LEFT - _RIGHT - 16), 1)


def _y(score: float | None) -> float:
    """A recovered share below 0 is drawn at the edge."""
    return round(_TOP + (1 - min(1.0, max(0.0, score or 0.0))) * (_HEIGHT - _TOP - _BOTTOM), 1)
