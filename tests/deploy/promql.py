"""Evaluates the queries that dashboard and alerts consist of, over a few time series."""

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import promql_parser

Labels: TypeAlias = frozenset[tuple[str, str]]
Values: TypeAlias = dict[Labels, float]
OPERATORS: dict[str, Callable[[float, float], float]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
COMPARED: dict[str, Callable[[float, float], bool]] = {"<": operator.lt, ">": operator.gt}
SETS: dict[str, Callable[[Values, Values], Values]] = {
    "and": lambda left, right: {labels: value for labels, value in left.items() if labels in right},
    "or": lambda left, right: right | left,
}


class Database:
    """series: name, labels, and all samples of a query's range, in order."""

    def __init__(self, *series: tuple[str, Mapping[str, str], Sequence[float]]) -> None:
        self._series = series

    def ask(self, query: str) -> Values:
        return self._vector(promql_parser.parse(query))

    def _vector(self, node: Any) -> Values:
        found = self._value(node)
        assert isinstance(found, dict), node
        return found

    def _value(self, node: Any) -> Values | float:
        match type(node).__name__:
            case "ParenExpr":
                return self._value(node.expr)
            case "NumberLiteral":
                return float(node.val)
            case "AggregateExpr":
                return self._sum(node)
            case "Call":
                assert node.func.name in ("rate", "increase")
                return {labels: _increase(samples) for labels, samples in self._samples(node.args[0].vector_selector)}
            case "VectorSelector":
                return {labels: samples[-1] for labels, samples in self._samples(node)}
        return _combined(str(node.op), self._value(node.lhs), self._value(node.rhs))

    def _samples(self, selector: Any) -> list[tuple[Labels, Sequence[float]]]:
        return [
            (frozenset(labels.items()), samples)
            for name, labels, samples in self._series
            if name == selector.name and all(_fits(labels.get(m.name, ""), m) for m in selector.matchers.matchers)
        ]

    def _sum(self, node: Any) -> Values:
        assert str(node.op) == "sum"
        kept, sums = node.modifier.labels if node.modifier else [], Values()
        for labels, value in self._vector(node.expr).items():
            group = frozenset((name, text) for name, text in labels if name in kept)
            sums[group] = sums.get(group, 0.0) + value
        return sums


def _fits(value: str, matcher: Any) -> bool:
    equal = {"MatchOp.Equal": True, "MatchOp.NotEqual": False}[str(matcher.op)]
    return (value == matcher.value) is equal


def _increase(samples: Sequence[float]) -> float:
    """Between samples only: what a series has when it appears counts as nothing, as with Prometheus."""
    pairs = pairwise(samples)
    return sum(after - before if after >= before else after for before, after in pairs)


def _combined(sign: str, left: Values | float, right: Values | float) -> Values:
    if isinstance(left, dict) and isinstance(right, dict):
        if sign in SETS:
            return SETS[sign](left, right)
        pairs = {labels: (value, right[labels]) for labels, value in left.items() if labels in right}
    elif isinstance(left, dict):
        pairs = {labels: (value, right) for labels, value in left.items() if not isinstance(right, dict)}
    else:
        assert isinstance(right, dict)
        pairs = {labels: (left, value) for labels, value in right.items()}
    if sign in COMPARED:
        return {labels: a for labels, (a, b) in pairs.items() if COMPARED[sign](a, b)}
    if sign == "/":
        return {labels: a / b if b else float("nan") for labels, (a, b) in pairs.items()}
    return {labels: OPERATORS[sign](a, b) for labels, (a, b) in pairs.items()}
