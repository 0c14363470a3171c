"""The chart through the real helm, two versions of it: lint, template, package, install without a cluster."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.helm.objects import NotRendered, Object, ci_files, parse, render
from tests.helm.programs import CHART, HELM_3, HELM_4, helm, template
from tests.helm.scenes import SCENES, scene
from tests.helm.test_kubernetes_schemas import CORE, SUPPORTED, problem

VERSIONS = [HELM_3, HELM_4]
MODEL_OF_ODD_NAMES = {"source": "pvc", "pvc": {"claimName": "1"}}


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    return {(found["kind"], found["metadata"]["name"]): found for found in objects}


@pytest.mark.parametrize("version", VERSIONS)
def test_lint_finds_nothing(version: str) -> None:
    """With the defaults, with each example, strictly: a warning is an error."""
    for file in ("", *ci_files()):
        words = ["-f", str(CHART / "ci" / file)] if file else []
        done = helm("lint", str(CHART), "--strict", *words, version=version)
        assert done.returncode == 0, f"{file}: {done.stdout}{done.stderr}"
        assert "[WARNING]" not in done.stdout and "[ERROR]" not in done.stdout


def test_there_are_examples() -> None:
    assert len(ci_files()) >= 3


@pytest.mark.parametrize("name", SCENES)
def test_both_helms_render_the_same(name: str) -> None:
    chosen = SCENES[name]
    older = render(chosen.values, *chosen.files, version=HELM_3, release=chosen.release, kubernetes=chosen.kubernetes)
    assert by_name(older.objects) == by_name(scene(name).objects)
    assert len(older.objects) == len(scene(name).objects)


def test_a_package_renders_as_its_folder(tmp_path: Path) -> None:
    """What is published is what was tested, and holds nothing that only the repository needs."""
    done = helm("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("specdec-*.tgz")
    with tarfile.open(archive) as packed:
        names = packed.getnames()
    for name in ("specdec/README.md", "specdec/values.schema.json", "specdec/templates/NOTES.txt"):
        assert name in names
    assert not [name for name in names if "/ci/" in name or name.endswith((".py", ".log", "~"))]
    from_archive = template(chart=archive)
    assert from_archive.returncode == 0, from_archive.stderr
    assert parse(from_archive.stdout).objects == scene("defaults").objects


def test_install_without_a_cluster() -> None:
    """Hooks and notes are rendered, too; the notes tell how to reach this very release. Helm 3 asks a cluster for its version first."""
    done = helm("install", "demo", str(CHART), "--dry-run=client")
    assert done.returncode == 0, done.stderr
    _, _, notes = done.stdout.partition("NOTES:")
    assert "demo-specdec-orchestrator" in notes and "50051" in notes
    assert "  specdec top --endpoint 127.0.0.1:50051\n" in notes and "showMetrics" not in notes
    assert "<no value>" not in done.stdout and "%!" not in done.stdout
    assert any(hook["metadata"].get("annotations", {}).get("helm.sh/hook") == "test" for hook in scene("defaults").objects)


def test_a_release_can_be_installed_twice() -> None:
    """Two releases of one namespace share no name and select no pod of each other."""
    one, two = render(release="one"), render(release="two")
    assert not set(by_name(one.objects)) & set(by_name(two.objects))
    for service in (*one.kind("Service"), *one.kind("PodDisruptionBudget")):
        selector = service["spec"]["selector"]
        assert not two.selected(selector.get("matchLabels", selector))


def test_everything_is_in_the_namespace_of_the_release() -> None:
    """Rights are where they are needed."""
    for name in SCENES:
        for found in scene(name).objects:
            ours = found["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by")
            if ours and not found["kind"].startswith(("Cluster", "Role")):
                assert found["metadata"].get("namespace") == "models", f"{name}: {found['kind']}/{found['metadata']['name']}"


def test_names_that_look_like_numbers_stay_texts() -> None:
    """YAML reads 123 and true as something else; Kubernetes refuses a label or a name that is no text."""
    odd = {"priorityClassName": "0", "serviceAccount": {"create": False, "name": "1"}, "tokenizer": MODEL_OF_ODD_NAMES}
    values = {
        "nameOverride": "1e3",
        "fullnameOverride": "front",
        "orchestrator": odd,
        "target": {"model": MODEL_OF_ODD_NAMES, "pools": {"true": {}, "null": {"runtimeClassName": "0"}}},
        "auth": {"existingSecret": "0", "existingSecretKey": "0", "allowInsecure": True},
        "discovery": {"type": "kubernetes"},
        "imagePullSecrets": ["1"],
    }
    done = template(values, release="123", more=["--namespace", "456"])
    assert done.returncode == 0, done.stderr
    found = parse(done.stdout).objects
    assert [told for owner in found if owner["apiVersion"] in CORE and (told := problem(owner, SUPPORTED[-1]))] == []


def test_an_upgrade_changes_no_selector() -> None:
    """Kubernetes refuses another selector of a Deployment: the next version of the chart must have the same ones."""
    for owner in scene("pools").kind("Deployment"):
        assert not [label for label in owner["spec"]["selector"]["matchLabels"] if "version" in label or "chart" in label]


def test_old_clusters_are_refused() -> None:
    with pytest.raises(NotRendered, match="1.29"):
        render(kubernetes="1.28")


def test_versions_agree() -> None:
    """Chart, application and package are released together."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (package,) = re.findall(r'^version = "(.+)"$', (CHART.parents[1] / "pyproject.toml").read_text(), re.M)
    assert chart["appVersion"] == package
