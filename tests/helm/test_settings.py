"""Every setting of every service can be set through the chart, and arrives as it was written."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any

import pytest

from specdec.runtime import names
from specdec.runtime.settings import PREFIX, load
from tests.helm.checks.environment import SETTINGS
from tests.helm.drawing import resolved, schema
from tests.helm.objects import Pod, render
from tests.helm.programs import Values
from tests.helm.scenes import SCENES, scene

NOT_IN_A_POD = {"PARENT_PIPE", "DIE_WITH_PARENT"}
# What only fits together with others, at either end of its range.
FITTING: dict[str, dict[str, Any]] = {
    "orchestrator": {"draftSampleMethod": "greedy"},
    "target": {"maxStepRows": 2048, "maxNumSpeculativeTokens": 512},
    "draft": {},
}


@functools.cache
def config_schema(component: str) -> dict[str, Any]:
    properties: dict[str, Any] = resolved(resolved(schema()["properties"][component])["properties"]["config"])["properties"]
    return properties


def setting_of(component: str, key: str) -> str:
    """Name of the field behind a key of config."""
    fields = {field.name.replace("_", ""): field.name for field in dataclasses.fields(SETTINGS[component])}
    return fields[key.lower()]


def extreme(node: dict[str, Any], last: bool) -> Any:
    """One end of what a key may be; other than its default where it can."""
    if "enum" in node:
        return node["enum"][-1 if last else 0]
    match node["type"]:
        case "boolean":
            return last
        case "integer" | "number":
            return node.get("maximum", 1 << 30) if last else node.get("minimum", 0)
        case "array":
            return [extreme(node["items"], False), extreme(node["items"], True)] if last else []
    return "step_ms=1" if last else ""


@pytest.mark.parametrize("last", [False, True], ids=["least", "most"])
@pytest.mark.parametrize("component", sorted(SETTINGS))
def test_every_key_of_config_arrives(component: str, last: bool) -> None:
    """All of them at once, at either end of their ranges: numbers without an exponent, lists, texts, words; none is dropped."""
    config = {key: extreme(node, last) for key, node in config_schema(component).items()} | FITTING[component]
    found = render({component: {"config": config}})
    (pod,) = found.of(component)
    settings = load(SETTINGS[component], pod.env)
    for key, value in config.items():
        got = getattr(settings, setting_of(component, key))
        got = got.value if isinstance(got, enum.Enum) else list(got) if isinstance(got, tuple) else got
        assert got == value, key


def test_a_pool_lays_its_config_over_that_of_its_component() -> None:
    values: Values = {"target": {"config": {"kvTokens": 4096, "leaseMs": 1}, "pools": {"a": {}, "b": {"config": {"kvTokens": 1 << 20}}}}}
    found = {pod.labels["specdec.io/pool"]: pod.env for pod in render(values).of("target")}
    assert (found["a"]["SPECDEC_KV_TOKENS"], found["b"]["SPECDEC_KV_TOKENS"]) == ("4096", "1048576")
    assert found["a"]["SPECDEC_LEASE_MS"] == found["b"]["SPECDEC_LEASE_MS"] == "1"


def test_every_setting_can_be_reached() -> None:
    """As a key of config, or set by the chart in at least one scene."""
    pods: list[Pod] = [pod for name in SCENES for pod in scene(name).services]
    for component, known in names.SETTINGS.items():
        by_config = {setting_of(component, key).upper() for key in config_schema(component)}
        by_chart = {name.removeprefix(PREFIX) for pod in pods if pod.component == component for name in pod.env}
        assert known - by_config - by_chart == NOT_IN_A_POD, component
