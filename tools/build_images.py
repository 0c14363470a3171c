"""Builds the two container images with docker or podman. Run by `make images`; standard library only.

make images IMAGES="--registry registry.example/team --tag 1.2.3 --cuda --push"
"""

from __future__ import annotations

import argparse
import datetime
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("slim", "model")
ENGINES = ("docker", "podman")
BUILD = {"docker": ("buildx", "build", "--load"), "podman": ("build",)}
ASKED_S = 20


def commands(arguments: argparse.Namespace, engine: str) -> list[list[str]]:
    found = []
    for target in arguments.only or TARGETS:
        cuda = arguments.cuda and target == "model"
        name = f"{arguments.registry.rstrip('/')}/specdec-{target}:{arguments.tag}{'-cuda' if cuda else ''}"
        values = {
            "VERSION": arguments.tag,
            "REVISION": _said("git", "rev-parse", "HEAD"),
            "CREATED": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        if arguments.digest:
            values["PYTHON_DIGEST"] = f"@{arguments.digest}"
        if cuda:
            values["TORCH_INDEX"] = ""
        command = [engine, *BUILD[engine], "--target", target, "--tag", name]
        command += [word for key, value in values.items() for word in ("--build-arg", f"{key}={value}")]
        found.append([*command, "."])
        if arguments.push:
            found.append([engine, "push", name])
    return found


def engine_at_hand() -> str:
    """Raises SystemExit where none answers, with what to do."""
    there = [name for name in ENGINES if shutil.which(name)]
    if not there:
        sys.exit("images: neither docker nor podman is installed; `--print` shows what they would be asked to do")
    reasons = []
    for name in there:
        try:
            done = subprocess.run([name, "info"], capture_output=True, text=True, timeout=ASKED_S)
        except subprocess.TimeoutExpired:
            reasons.append(f"{name} is installed and does not answer within {ASKED_S} s")
            continue
        if done.returncode == 0:
            return name
        reasons.append(f"{name} is installed and does not answer: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}")
    sys.exit("images: " + "; ".join(reasons))


def _said(*words: str) -> str:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True) if shutil.which(words[0]) else None
    return done.stdout.strip() if done and done.returncode == 0 else ""


def _digest(text: str) -> str:
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", text):
        sys.exit(f"images: --digest {text}: must be sha256: and 64 hexadecimal digits")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    parser = argparse.ArgumentParser(prog="images", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registry", default="ghcr.io/specdec", metavar="HOST/PATH", help="default: %(default)s")
    parser.add_argument("--tag", default=version, metavar="TAG", help="default: the package's version, %(default)s")
    parser.add_argument("--only", action="append", choices=TARGETS, help="one of the images; may be given twice")
    parser.add_argument("--cuda", action="store_true", help="torch with CUDA in the model image, whose tag then ends in -cuda")
    parser.add_argument("--digest", type=_digest, metavar="sha256:…", help="of the base image, see docs/kubernetes.md")
    parser.add_argument("--push", action="store_true", help="push what was built")
    parser.add_argument("--print", action="store_true", dest="show", help="say what would be run, and run nothing")
    arguments = parser.parse_args(argv)
    if arguments.show:
        print("\n".join(shlex.join(command) for command in commands(arguments, ENGINES[0])))
        return 0
    engine = engine_at_hand()
    for command in commands(arguments, engine):
        print(shlex.join(command), flush=True)
        if (code := subprocess.run(command, cwd=ROOT).returncode) != 0:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
