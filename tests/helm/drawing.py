"""Values that the chart's schema lets pass, drawn at random: a few keys anywhere, each with any value of its own rules."""

from __future__ import annotations

import functools
import json
from typing import Any

import yaml
from hypothesis import strategies as st

from tests.helm.programs import CHART, Values

Schema = dict[str, Any]
Path = tuple[str, ...]
POOL = "near"
SELECTOR = {"podSelector": {"matchLabels": {"a": "b"}}}
CONTAINER = {
    "name": "more",
    "image": "registry.example.com/more:1",
    "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "16Mi"}},
    "securityContext": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}},
}
# Kubernetes' own objects, which the schema passes on as they are: one that is right, by the last part of the key.
SAMPLES: dict[str, Any] = {
    "affinity": {"podAntiAffinity": {}},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
    "clients": [SELECTOR],
    "metrics": [SELECTOR],
    "scaler": [SELECTOR],
    "orchestrators": [SELECTOR],
    "health": [SELECTOR],
    "dns": [SELECTOR],
    "hub": [SELECTOR],
    "apiServer": [SELECTOR],
    "allow": [{"ports": [{"port": 443}]}],
    "parentRefs": [{"name": "gateway"}],
    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
    "extraContainers": [CONTAINER],
    "initContainers": [{**CONTAINER, "name": "before"}],
    "extraEnv": [{"name": "GRPC_VERBOSITY", "value": "error"}],
    "requests": {"cpu": "2", "memory": "3Gi"},
    "limits": {"memory": "8Gi"},
    "sizeLimit": "512Mi",
    "resourceName": "amd.com/gpu",
    "volume": {"persistentVolumeClaim": {"claimName": "cache"}},
    "commonLabels": {"team": "a"},
    "labels": {"release": "prometheus"},
    "annotations": {"a": "b"},
    "podAnnotations": {"a": "b"},
    "podLabels": {"tier": "b"},
    "nodeSelector": {"disk": "ssd"},
}
# Left alone: what only fits together with others, the user's own security, what would take the checks their ground.
LEFT = {"podSecurityContext", "containerSecurityContext", "extraObjects", "extraVolumes", "extraVolumeMounts", "updateStrategy", "claims"}
LEFT |= {"nameOverride", "fullnameOverride", "global"}


@functools.cache
def schema() -> Schema:
    found: Schema = json.loads((CHART / "values.schema.json").read_text())
    return found


def resolved(node: Schema) -> Schema:
    while "$ref" in node:
        found: Schema = schema()
        for part in node["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        node = found
    return node


@functools.cache
def leaves() -> dict[Path, Schema]:
    """Every key that takes a value of its own, those of one pool included."""
    found: dict[Path, Schema] = {}

    def walk(path: Path, node: Schema) -> None:
        node = resolved(node)
        if path and (path[-1] in LEFT or path.count("pools") > 1):
            return
        if path and path[-1] in SAMPLES:
            found[path] = {"const": SAMPLES[path[-1]]}
        elif path and path[-1] == "pools":
            walk((*path, POOL), schema()["definitions"][path[-2]])
        elif node.get("properties"):
            for name, child in node["properties"].items():
                if not (POOL in path and name in ("pools", "serviceAccount")):
                    walk((*path, name), child)
        elif not (node.get("type") == "object" and "const" not in node):
            found[path] = node

    walk((), schema())
    return found


def value(node: Schema) -> st.SearchStrategy[Any]:
    """Anything that the rules of one key let pass."""
    node = resolved(node)
    kind = node.get("type")
    if "const" in node:
        return st.just(node["const"])
    if "enum" in node:
        return st.sampled_from(node["enum"])
    if "allOf" in node:
        return value({name: told for part in node["allOf"] for name, told in resolved(part).items()})
    if isinstance(kind, list):
        return st.one_of([value({**node, "type": one}) for one in kind if one != "null"])
    if kind == "boolean":
        return st.booleans()
    if kind == "integer":
        return st.integers(node.get("minimum", 0), node.get("maximum", 1 << 22))
    if kind == "number":
        low = node.get("minimum", node.get("exclusiveMinimum", 0))
        return st.floats(low, node.get("maximum", 1e6), exclude_min="exclusiveMinimum" in node, allow_nan=False, width=32)
    if kind == "array":
        return st.lists(value(node["items"]), min_size=node.get("minItems", 0), max_size=2, unique=True)
    assert kind == "string", node
    if "pattern" in node:
        ascii_ = st.characters(min_codepoint=32, max_codepoint=126)
        drawn = st.from_regex(node["pattern"], fullmatch=True, alphabet=ascii_).filter(lambda text: len(text) < 40)
        return drawn.filter(lambda text: len(text) >= node.get("minLength", 0))
    return st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=node.get("minLength", 0), max_size=20)


def placed(path: Path, what: Any) -> Values:
    """Values with one key."""
    for part in reversed(path):
        what = {part: what}
    found: Values = what
    return found


@functools.cache
def keys() -> list[Path]:
    """Every key of values.yaml, those that hold others included."""
    found: list[Path] = []

    def walk(path: Path, node: Any) -> None:
        for name, child in node.items() if isinstance(node, dict) else ():
            if name not in ("podSecurityContext", "containerSecurityContext"):  # the user's own to weaken
                found.append((*path, name))
                walk((*path, name), child)

    walk((), yaml.safe_load((CHART / "values.yaml").read_text()))
    return found


@st.composite
def drawn_values(draw: st.DrawFn) -> Values:
    """Between one and six keys."""
    found: Values = {}
    for path in draw(st.lists(st.sampled_from(sorted(leaves())), min_size=1, max_size=6, unique=True)):
        place = found
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = draw(value(leaves()[path]))
    return found
