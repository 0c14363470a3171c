"""Keywords of a JSON schema. llguidance refuses those it knows and does not implement, and passes over all others: a keyword with a typing
error would constrain nothing. Here a keyword nobody knows is refused by name, unless it is one that only describes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_CONSTRAINING = (
    "type enum const multipleOf maximum exclusiveMaximum minimum exclusiveMinimum maxLength minLength pattern format maxItems minItems"
    " uniqueItems maxContains minContains maxProperties minProperties required dependentRequired"
)
_NAMING = "$ref $dynamicRef $recursiveRef $id $schema $anchor $dynamicAnchor $recursiveAnchor $vocabulary id"
_DESCRIBING = (
    "$comment title description default deprecated readOnly writeOnly example examples contentEncoding contentMediaType x-guidance"
)
_HOLDING_ONE = (
    "items additionalItems unevaluatedItems contains additionalProperties unevaluatedProperties propertyNames not if then else"
    " contentSchema"
)
_HOLDING_A_LIST = "allOf anyOf oneOf prefixItems items"
_HOLDING_NAMED = "properties patternProperties dependentSchemas dependencies $defs definitions"

ONE, LIST, NAMED = frozenset(_HOLDING_ONE.split()), frozenset(_HOLDING_A_LIST.split()), frozenset(_HOLDING_NAMED.split())
KNOWN = ONE | LIST | NAMED | frozenset(f"{_CONSTRAINING} {_NAMING} {_DESCRIBING}".split())


def check_keywords(text: str) -> None:
    """Raises ValueError naming the first keyword that is none, or when `text` is no JSON object."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON object; {} allows every document")
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting.extend(_inside(part))


def _inside(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas in one. Raises ValueError."""
    for name, value in schema.items():
        if name not in KNOWN and not name.startswith("x-"):
            raise ValueError(f"{name!r} is no keyword of JSON Schema")
        if name in NAMED and isinstance(value, dict):
            yield from value.values()
        elif name in LIST and isinstance(value, list):
            yield from value
        elif name in ONE:
            yield value
