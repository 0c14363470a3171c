"""Which metrics and labels a query names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import promql_parser as promql

ADDED_BY_SCRAPING = frozenset({"namespace", "job", "instance", "pod"})
OTHERS = {"target_info": frozenset({"service_name"}), "ALERTS": frozenset({"alertname"})}


def parsed(query: str) -> Any:
    """Grafana's variables have a value first. Raises ValueError for what is no query."""
    return promql.parse(query.replace("$__rate_interval", "5m").replace("$namespace", ".*").replace("$job", ".*"))


def named(query: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Every selector: its metric and the labels that it is asked for, or grouped by around it."""
    yield from _walk(parsed(query), frozenset())


def _walk(node: Any, around: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    match type(node).__name__:
        case "VectorSelector":
            yield node.name, around | {matcher.name for matcher in node.matchers.matchers}
        case "MatrixSelector":
            yield from _walk(node.vector_selector, around)
        case "AggregateExpr":
            labels = frozenset(node.modifier.labels) if node.modifier is not None else frozenset()
            yield from _walk(node.expr, around | labels)
        case "Call":
            for argument in node.args:
                yield from _walk(argument, around)
        case "BinaryExpr":
            yield from _walk(node.lhs, around)
            chooses = str(node.op) in ("and", "unless")  # what stands right of these gives no labels
            yield from _walk(node.rhs, frozenset() if chooses else around)
        case "ParenExpr" | "UnaryExpr" | "SubqueryExpr":
            yield from _walk(node.expr, around)
        case "NumberLiteral" | "StringLiteral":
            return
        case other:
            raise AssertionError(f"a query with {other}, which this reader does not know")
