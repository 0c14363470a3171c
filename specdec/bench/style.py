"""How a report looks: colours as variables, so that plots and tables follow the reader's theme and print well. Text without logic."""

from __future__ import annotations

CSS = """
:root { color-scheme: light dark;
  --paper: #ffffff; --panel: #f6f7f9; --ink: #16191d; --muted: #5b6470; --line: #d8dde3;
  --none: #6b7280; --fixed: #1d5fd1; --auto: #b45309;
  --pays: #12703a; --pays-soft: #dff3e6; --neutral: #4b5563; --neutral-soft: #eceef1; --costs: #b3261e; --costs-soft: #fbe3e1;
  --c1: #1d5fd1; --c2: #b45309; --c3: #12703a; --c4: #7c3aed; --c5: #be185d; --c6: #0e7490; --c7: #8a8f98; }
@media (prefers-color-scheme: dark) { :root:not([data-theme="light"]) { DARK } }
@media screen { :root[data-theme="dark"] { DARK } }
:root[data-theme="light"] { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
header { display: flex; justify-content: space-between; align-items: baseline; gap: 1rem; }
h1 { font-size: 1rem; font-weight: 600; color: var(--muted); margin: 0; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; } h3 { font-size: 1rem; margin: 1.25rem 0 .35rem; }
p, ul { margin: .4rem 0; max-width: 50rem; } ul { padding-left: 1.2rem; } small, .muted { color: var(--muted); }
button { font: inherit; font-size: .85rem; padding: .25rem .7rem; border: 1px solid var(--line); border-radius: 6px;
  background: var(--panel); color: var(--ink); cursor: pointer; white-space: nowrap; }
.verdict { margin: 1rem 0 0; padding: 1.1rem 1.3rem; border-radius: 10px; border-left: 6px solid; background: var(--panel); }
.verdict strong { display: block; font-size: 1.7rem; line-height: 1.25; }
.verdict.pays { border-color: var(--pays); background: var(--pays-soft); } .verdict.pays strong { color: var(--pays); }
.verdict.costs { border-color: var(--costs); background: var(--costs-soft); } .verdict.costs strong { color: var(--costs); }
.verdict.neutral { border-color: var(--neutral); background: var(--neutral-soft); }
.verdict.defect { border-color: var(--costs); background: var(--costs-soft); margin-top: .7rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: .7rem; margin: .9rem 0; }
.fact { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
.fact b { display: block; font-size: 1.3rem; } .fact span { color: var(--muted); font-size: .85rem; display: block; line-height: 1.35; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--muted); } th:first-child, td:first-child, .left { text-align: left; }
td.pays { background: var(--pays-soft); color: var(--pays); } td.costs { background: var(--costs-soft); color: var(--costs); }
td.neutral { background: var(--neutral-soft); color: var(--neutral); }
td.pays b, td.neutral b, td.costs b { white-space: nowrap; } td small { white-space: nowrap; }
.matrix td { text-align: center; } .matrix th { text-align: center; } .matrix th:first-child { text-align: left; }
figure { margin: .8rem 0; } figure svg { width: 100%; height: auto; max-width: 62rem; display: block; }
figcaption { color: var(--muted); font-size: .875rem; max-width: 50rem; }
svg text { font-family: system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
details { border: 1px solid var(--line); border-radius: 8px; margin: .5rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; font-weight: 600; }
code, pre { font: .85rem/1.45 ui-monospace, "SF Mono", Consolas, "DejaVu Sans Mono", monospace; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .7rem .9rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .4rem 0; font-size: .9rem; }
dt { color: var(--muted); } dd { margin: 0; }
@media print { :root, :root[data-theme] { color-scheme: light; LIGHT } button { display: none; }
  body { font-size: 10.5pt; } main { max-width: none; padding: 0; } table { font-size: 8pt; } th, td { padding: .15rem .3rem; }
  .verdict, .fact, td, th { print-color-adjust: exact; -webkit-print-color-adjust: exact; } .verdict strong { font-size: 16pt; }
  figure, tr, .fact, .verdict { break-inside: avoid; } h2, h3, summary, tr:first-child { break-after: avoid; }
  .scroll { overflow: visible; }
  details { border: none; padding: 0; } details::details-content { content-visibility: visible; block-size: auto; } }
"""

DARK = """color-scheme: dark; --paper: #14171b; --panel: #1d2127; --ink: #e6e9ed; --muted: #9aa4b0; --line: #343b44;
  --none: #9aa4b0; --fixed: #74a9ff; --auto: #f2a65a;
  --pays: #6fdc97; --pays-soft: #173524; --neutral: #c3cad3; --neutral-soft: #2a3038; --costs: #ff8f87; --costs-soft: #43211f;
  --c1: #74a9ff; --c2: #f2a65a; --c3: #6fdc97; --c4: #b79cff; --c5: #ff8fbe; --c6: #5fd0e0; --c7: #7d8793;"""

# A dark screen prints on white paper all the same.
LIGHT = """--paper: #ffffff; --panel: #f6f7f9; --ink: #16191d; --muted: #5b6470; --line: #d8dde3; --none: #6b7280; --fixed: #1d5fd1;
  --auto: #b45309; --pays: #12703a; --pays-soft: #dff3e6; --neutral: #4b5563; --neutral-soft: #eceef1; --costs: #b3261e;
  --costs-soft: #fbe3e1; --c1: #1d5fd1; --c2: #b45309; --c3: #12703a; --c4: #7c3aed; --c5: #be185d; --c6: #0e7490; --c7: #8a8f98;"""

SCRIPT = """
(() => {
  const root = document.documentElement, button = document.getElementById("theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => { button.textContent = dark() ? "Light theme" : "Dark theme"; };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  button.hidden = false; name();
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach(d => d.open = true);
  });
  addEventListener("afterprint", () => closed.forEach(d => d.open = false));
})();
"""


def css() -> str:
    return CSS.replace("DARK", DARK).replace("LIGHT", LIGHT)
