"""What a chart rendered, and the questions that the checks ask of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.helm.programs import CHART, HELM_4, RELEASE, Loader, Values, template

Object = dict[str, Any]
WORKLOADS = ("Deployment", "StatefulSet")
COMPONENTS = ("orchestrator", "target", "draft")
COMPONENT, POOL = "app.kubernetes.io/component", "specdec.io/pool"


class NotRendered(AssertionError):
    """helm refused; the text is what it said."""


@dataclass(frozen=True)
class Pod:
    """A pod as some object would make it."""

    owner: Object
    metadata: Object
    spec: Object

    @property
    def name(self) -> str:
        return f"{self.owner['kind']}/{self.owner['metadata']['name']}"

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.metadata.get("labels") or {}
        return labels

    @property
    def component(self) -> str:
        return self.labels.get(COMPONENT, "")

    @property
    def containers(self) -> list[Object]:
        """All of them, the ones that run before the others included."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def main(self) -> Object:
        """The service's container."""
        container: Object = self.spec["containers"][0]
        return container

    @property
    def env(self) -> dict[str, str]:
        """Variables of the service that have a value of their own."""
        return {entry["name"]: entry["value"] for entry in self.main.get("env", []) if "value" in entry}

    @property
    def ports(self) -> dict[str, int]:
        """Names of the service's ports."""
        return {port["name"]: port["containerPort"] for port in self.main.get("ports", [])}

    @property
    def has_gpu(self) -> bool:
        return any("gpu" in name for c in self.containers for part in c.get("resources", {}).values() for name in part)


@dataclass(frozen=True)
class Render:
    objects: list[Object]

    def kind(self, *kinds: str) -> list[Object]:
        return [found for found in self.objects if found["kind"] in kinds]

    def find(self, kind: str, name: str) -> Object | None:
        return next((found for found in self.kind(kind) if found["metadata"]["name"] == name), None)

    @property
    def pods(self) -> list[Pod]:
        return list(self._pods())

    @property
    def services(self) -> list[Pod]:
        """Pods of our three services."""
        return [pod for pod in self.pods if pod.owner["kind"] in WORKLOADS and pod.component in COMPONENTS]

    def of(self, component: str) -> list[Pod]:
        return [pod for pod in self.services if pod.component == component]

    def selected(self, selector: dict[str, str] | None) -> list[Pod]:
        return [pod for pod in self.services if selector and fits(selector, pod.labels)]

    def _pods(self) -> Iterator[Pod]:
        for owner in self.objects:
            spec = owner.get("spec") or {}
            if owner["kind"] == "Pod":
                yield Pod(owner, owner["metadata"], spec)
            elif owner["kind"] == "CronJob":
                made = spec["jobTemplate"]["spec"]["template"]
                yield Pod(owner, made.get("metadata", {}), made["spec"])
            elif isinstance(spec, dict) and isinstance(spec.get("template"), dict) and "containers" in spec["template"].get("spec", {}):
                yield Pod(owner, spec["template"].get("metadata", {}), spec["template"]["spec"])


def fits(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def parse(text: str) -> Render:
    return Render([found for found in yaml.load_all(text, Loader=Loader) if found])


def render(values: Values | None = None, *files: str, version: str = HELM_4, release: str = RELEASE, kubernetes: str = "") -> Render:
    """The chart under `values`, on top of values files of its ci folder. Raises NotRendered."""
    more = ["--kube-version", kubernetes] if kubernetes else []
    given = [CHART / "ci" / file for file in files]
    done = template(values or None, given, version=version, release=release, more=more)
    if done.returncode:
        raise NotRendered(done.stderr)
    return parse(done.stdout)


def ci_files() -> list[str]:
    """Values files that chart tools render on their own: the product's example installations."""
    return sorted(path.name for path in Path(CHART / "ci").glob("*-values.yaml"))
