"""Every object of every render is one that Kubernetes, from the oldest supported version to the newest, and the operators know."""

from __future__ import annotations

import functools
import json
import re

import kubernetes_validate
import pytest

from tests.helm.node_tools import custom_problems
from tests.helm.objects import Object
from tests.helm.programs import CHART
from tests.helm.scenes import SCENES, scene

SUPPORTED = [f"1.{minor}" for minor in range(29, 38)]
ALWAYS = (SUPPORTED[0], SUPPORTED[4], SUPPORTED[-1])
BRANCH = re.compile(r'semverCompare "[<>=]+1\.(\d+)')
BRANCHES_BELOW = 31  # what templates ask the cluster's version for is the same from here on
CORE = {"v1", "apps/v1", "batch/v1", "policy/v1", "autoscaling/v2", "networking.k8s.io/v1", "rbac.authorization.k8s.io/v1"}


# The schemas of one version are read once, not for each object.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


def problem(found: Object, version: str) -> str:
    """Why an API server of that version would refuse the object; empty = it would not. Strict: unknown fields are refused."""
    try:
        kubernetes_validate.validate(found, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{found['kind']}/{found['metadata']['name']}, {'.'.join(map(str, error.path))}: {error.message}"
    return ""


@functools.cache
def objects(version: str, core: bool) -> list[Object]:
    """Each object of all renders for a version of Kubernetes once: Kubernetes' own kinds, or those of operators."""
    minor = int(version.split(".")[1])
    asked = version if minor < BRANCHES_BELOW else ""
    every = (found for name in SCENES if SCENES[name].since <= minor for found in scene(name, asked).objects)
    texts = {json.dumps(found, sort_keys=True) for found in every if (found["apiVersion"] in CORE) == core}
    return [json.loads(text) for text in sorted(texts)]


@pytest.mark.parametrize("version", [v if v in ALWAYS else pytest.param(v, marks=pytest.mark.long) for v in SUPPORTED])
def test_kubernetes_knows_every_object(version: str) -> None:
    assert [told for found in objects(version, core=True) if (told := problem(found, version))] == []


def test_a_misspelt_field_is_seen() -> None:
    """The broken twin: a field of a container and of a spec, and a value of the wrong type."""
    deployment = json.dumps(next(found for found in objects(ALWAYS[0], core=True) if found["kind"] == "Deployment"))
    for old, new in (
        ('"livenessProbe"', '"livenesProbe"'),
        ('"containerPort": ', '"containerPort": "grpc", "hostPort": '),
        ('"selector"', '"select"'),
    ):
        assert old in deployment
        for version in ALWAYS:
            assert problem(json.loads(deployment.replace(old, new)), version)


def test_operators_know_every_custom_resource() -> None:
    """cert-manager, KEDA, Prometheus' operator and the Gateway API, by the types that they publish; with a broken twin of each."""
    custom = objects(ALWAYS[-1], core=False)
    kinds = {found["kind"] for found in custom}
    assert kinds >= {"ScaledObject", "Certificate", "PodMonitor", "GRPCRoute"}
    twins = [json.loads(json.dumps(next(found for found in custom if found["kind"] == kind))) for kind in sorted(kinds)]
    for twin in twins:
        twin["spec"]["unheardOf"] = 1
    told = custom_problems([*custom, *twins])
    assert [
        f"{found['kind']}/{found['metadata']['name']}: {problems}" for found, problems in zip(custom, told, strict=False) if problems
    ] == []
    for twin, problems in zip(twins, told[len(custom) :], strict=True):
        assert any("unheardOf" in problem for problem in problems), twin["kind"]


def test_templates_branch_on_no_later_version() -> None:
    asked = {int(minor) for file in (CHART / "templates").rglob("*") if file.is_file() for minor in BRANCH.findall(file.read_text())}
    assert asked and max(asked) <= BRANCHES_BELOW
