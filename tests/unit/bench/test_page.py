"""The report as a page: one file, nothing from elsewhere, figures that follow the theme, and what it says first."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from specdec.bench import page, plots, style, tables
from specdec.bench.report import Asked
from specdec.bench.timings import Limits
from tests.tools import missing
from tests.unit.bench.made_up import GRID, made_up, runs

pytestmark = pytest.mark.unit
VOID = {"meta", "link", "br", "input", "img", "hr"}
NAMESPACES = ("http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink")


class Outline(HTMLParser):
    """Tags that are open, ids, and everything an element may fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        self.ids += [told["id"] or ""] if "id" in told else []
        self.fetched += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return made_up(asked=Asked(Limits(150.0, 60.0)))


@pytest.fixture(scope="module")
def written(told: dict[str, Any]) -> str:
    text, notes = page.page(told)
    assert notes == []
    return text


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    found.close()
    return found


def test_it_is_whole_and_fetches_nothing(written: str) -> None:
    found = outline(written)
    assert not found.wrong and not found.open
    assert len(found.ids) == len(set(found.ids)) > 20
    assert {address for address in found.fetched if not address.startswith("#")} == {"data:,"}
    inside = written
    for name in NAMESPACES:
        inside = inside.replace(name, "")
    assert "://" not in inside and "@import" not in inside and "//" not in re.sub(r"<svg.*?</svg>", "", inside, flags=re.DOTALL)
    assert set(re.findall(r"url\((?!#)", inside)) == set()
    assert all(f'id="{name}"' in written for name in re.findall(r"url\(#([^)]+)\)", written))


def test_its_figures_are_valid_and_wear_the_pages_colours(written: str) -> None:
    figures = re.findall(r"<svg.*?</svg>", written, flags=re.DOTALL)
    assert len(figures) == 5
    for one in figures:
        root = ET.fromstring(one)
        assert root.get("viewBox") and root.get("width") is None and root.get("role") == "img"
        assert root.find("{http://www.w3.org/2000/svg}title") is not None
        assert set(re.findall(r"#[0-9a-f]{6}\b", one)) <= {"#000000"}, "a colour that no theme can change"
        used = set(re.findall(r"var\(--([\w-]+)\)", one))
        assert {"ink", "line"} <= used and all(f"--{name}:" in style.css() for name in used)
    for block in (style.DARK, style.LIGHT):
        assert all(f"--{name}:" in block for name in plots.NAMES), "a theme lacks a colour"


def test_the_verdict_comes_first_and_the_raw_figures_are_there(written: str, told: Mapping[str, Any]) -> None:
    text = " ".join(outline(written).text)
    order = [
        text.index(part) for part in (told["summary"]["headline"], "Set:", "texts that differ", "Speed", "Memory", "Every cell", "Methods")
    ]
    assert order == sorted(order)
    assert "▲ pays" in text and "▼ costs" in text and "● neutral" in text
    assert "compared with no speculation" in text and "auto: the service chooses the length" in text, (
        "its words are told beside the first table"
    )
    assert "one <of> many" in text and "one <of> many" not in written, "what others wrote is escaped"
    for cell in told["cells"]:
        assert cell["name"] in text
        assert all(f"{figure['tokens_per_s']:.1f}" in text for figure in cell["ways"].values())
    (row,) = re.findall(r"<tr><td>target-0</td>.*?</tr>", written)
    shown = ["target-0", "400", "80", "378", "640", "160", "500", "600", "200", "21.2%"]  # weights, KV, its room, peak, rest …
    assert re.findall(r"<td>(.*?)</td>", row) == shown


def test_defects_parts_and_simulations_are_said_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = runs()[:-3]
    kept[1] = replace(kept[1], said=(replace(kept[1].said[0], token_ids=(7,)), *kept[1].said[1:]))
    found = made_up(kept) | {"complete": False, "simulated": True, "errors": 4}
    monkeypatch.setattr(plots, "there", lambda: False)
    text, notes = page.page(found)
    assert notes == [page.NO_PLOTS] and "<svg" not in text
    for words in ("1 texts differ", "4 answers failed", "interrupted", "Simulated"):
        assert words in text
    json.dumps(found)


def test_names_of_others_are_text_and_nothing_else(recwarn: pytest.WarningsRecorder) -> None:
    """As mark-up, as mathematics, as a formula of a spreadsheet, in letters that no font here has."""
    kinds = ("=cmd|'/c calc'!a0", "$x_{1^$", "<img src=x onerror=alert(1)>", '"></svg><script>alert(2)</script>', "日本語", "-1+1")
    grid = replace(GRID, kinds=kinds, prompts=[(kind, "a") for kind in kinds], concurrencies=(1,), repeats=2)
    found = made_up(runs(grid, dict.fromkeys(kinds, 0.7)), grid)
    text, _ = page.page(found)
    assert not recwarn.list and not outline(text).wrong
    assert text.count("<script") == 1 and "<img" not in text and all(kind in "".join(outline(text).text) for kind in kinds)
    lines = list(csv.DictReader(io.StringIO(tables.as_csv(found["cells"]))))
    assert {line["kind"] for line in lines} == {"'" + kind if kind[0] in "=-" else kind for kind in kinds}
    assert all(line["ratio"] == "" or float(line["ratio"]) > 0 for line in lines) and lines[1]["together"] in ("True", "False")


def test_many_cells_with_long_names_leave_room_for_their_figures() -> None:
    grid = replace(GRID, prompt_lengths=(128, 2048), output_lengths=(64, 512), temperatures=(0.0, 0.7), repeats=2)
    text, _ = page.page(made_up(runs(grid), grid))
    assert len(grid.cells) == 32 and text.count("The first 24 of 32 cells") == 2
    labels = [label for label in re.findall(r"<text[^>]*>([^<]+)</text>", text) if "stream" in label]
    assert labels and max(map(len, labels)) <= plots.LABEL


def test_a_sweep_of_one_turn_makes_a_page() -> None:
    for kept in (runs()[:1], runs()[:2]):
        text, _ = page.page(made_up(kept))
        assert not outline(text).wrong
    assert re.search(r"<summary>1 stream[^/]*● neutral\? ", text) and "Until it is decided, set:" in text, "one repeat decides nothing"


@pytest.mark.long
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_shows_it_without_a_network_and_without_complaints(written: str, tmp_path: Path, theme: str) -> None:
    """In a network namespace of its own, so that whatever it asked for would fail and be told on the console."""
    browser = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
    if browser is None:
        missing("the program chromium", "on Debian: apt-get install chromium")
    told = (
        "<script>addEventListener('error', e => document.title = 'error ' + e.message, true);</script>",
        "<script>document.getElementById('theme').click(); const ink = getComputedStyle(document.querySelector('svg text')).fill;"
        "const fetched = performance.getEntriesByType('resource').length;"
        "document.title += ` | ${document.documentElement.dataset.theme} ${ink} ${fetched}`;</script>",
    )
    file = tmp_path / "report.html"
    file.write_text(written.replace("<style>", told[0] + "<style>", 1).replace("</body>", told[1] + "</body>"))
    words = [
        browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr",
        "--virtual-time-budget=1000", f"--blink-settings=preferredColorScheme={0 if theme == 'dark' else 1}", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(
        [*_alone(), *words], capture_output=True, text=True, timeout=100, env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    other = "light" if theme == "dark" else "dark"
    ink = "rgb(22, 25, 29)" if other == "light" else "rgb(230, 233, 237)"
    assert title is not None and title[1] == f"Does speculation pay? | {other} {ink} 0"


def _alone() -> list[str]:
    """Without a network, where one may say so."""
    words = ["unshare", "--net"]
    return words if shutil.which("unshare") and subprocess.run([*words, "true"], capture_output=True).returncode == 0 else []
