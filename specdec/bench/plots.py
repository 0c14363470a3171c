"""Figures of a report, as SVG that lives inside a page: colours are the page's variables, ids are the figure's own, nothing is fetched.

matplotlib (extra `tools`) draws with stand-in colours, which are replaced by `var(--…)` afterwards.
"""

from __future__ import annotations

import html
import io
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = ("ink", "muted", "line", "paper", "none", "fixed", "auto", "pays", "costs", "c1", "c2", "c3", "c4", "c5", "c6", "c7")
COLOURS = {name: f"#0102{number + 3:02x}" for number, name in enumerate(NAMES)}
MARKERS = {"none": "s", "fixed": "o", "auto": "D"}
SERIES = ("c1", "c2", "c3", "c4", "c5", "c6")
MOST_ROWS = 24  # cells of a figure; the tables have them all
MOST_LINES = 6
LEAST_ROUNDS = 20
WIDTH = 9.0  # inches
LABEL = 36  # characters of a line of a row's name
PHASES = {
    "forward": ("target computes", "c1"),
    "sample": ("tokens are chosen", "c4"),
    "queue": ("queue at the target", "c5"),
    "wire": ("on the wire", "c6"),
    "wait": ("wait for a proposal, and the orchestrator", "c2"),
    "text": ("text", "c3"),
    "draft": ("the draft, beside the others", "c7"),
}
RC: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "specdec",
    "text.parse_math": False,  # names are from others: a $ in one is a $
    "font.size": 10,
    "text.color": COLOURS["ink"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.titlecolor": COLOURS["ink"],
    "axes.edgecolor": COLOURS["line"],
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "xtick.labelcolor": COLOURS["ink"],
    "ytick.labelcolor": COLOURS["ink"],
    "grid.color": COLOURS["line"],
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 9,
}
Drawn = tuple[str, str]  # svg, caption


def there() -> bool:
    """Whether they can be drawn here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def _svg(name: str, label: str, size: tuple[float, float], draw: Callable[[Figure], None]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the reader's fonts draw the text, not those that are here
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return inlined(out.getvalue(), name, label)


def inlined(svg: str, name: str, label: str) -> str:
    """The `svg` element alone, with ids that begin with `name`, the page's colours and fonts, and a title for those who hear it."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\1{name}-", svg)
    svg = re.sub(r"font: (?:(\d{3}|bold) )?([\d.]+)px [^;\"]*", lambda m: f"font-size: {m[2]}px; font-weight: {m[1] or 400}", svg)
    for colour, stand_in in COLOURS.items():
        svg = svg.replace(stand_in, f"var(--{colour})")
    svg = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", svg, count=1)
    head, _, rest = svg.partition(">")
    return f'{head} role="img" aria-labelledby="{name}-title">\n<title id="{name}-title">{html.escape(label)}</title>{rest.strip()}'


# ---------------------------------------------------------------- what a manager looks at


def ratios(cells: Sequence[Mapping[str, Any]], margin: float, baseline: str = "none") -> Drawn | None:
    """A row a cell: the ratio of each way with its interval, beside the line at 1."""
    against = "without speculation" if baseline == "none" else f"with {baseline}"
    compared = [cell for cell in cells if any(f["ratio"] for f in cell["ways"].values())]
    rows = compared[:MOST_ROWS]
    ways = [way for way in dict.fromkeys(w for cell in rows for w in cell["ways"]) if way != baseline]
    if not rows or not ways:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.axvspan(1 - margin, 1 + margin, color=COLOURS["line"], alpha=0.5, lw=0)
        axes.axvline(1.0, color=COLOURS["muted"], lw=1)
        for number, way in enumerate(ways):
            shift = 0.22 * (number - (len(ways) - 1) / 2)
            held = [(i + shift, cell["ways"][way]["ratio"]) for i, cell in enumerate(rows) if cell["ways"].get(way, {}).get("ratio")]
            mean = [ratio["mean"] for _, ratio in held]
            axes.hlines(
                [y for y, _ in held], [_low(r) for _, r in held], [_high(r) for _, r in held], color=COLOURS.get(way, COLOURS["c4"]), lw=2.2
            )
            axes.plot(
                mean, [y for y, _ in held], MARKERS.get(way, "o"), color=COLOURS.get(way, COLOURS["c4"]), ms=6.5, label=way,
                mec=COLOURS["paper"], mew=1,
            )  # fmt: skip
        _rows(axes, [cell["name"] for cell in rows])
        axes.set_xlabel(f"times as fast as {against}")
        _legend(figure, len(ways))

    caption = (
        f"Points: how many times as fast as {against}; bars: 95 % intervals. Right of the line it pays, "
        f"within the shaded band (± {margin:.0%}) it makes no difference.{_left_out(compared)}"
    )
    return _svg("ratios", f"Times as fast as {against}, by cell", (WIDTH, 1.2 + _row_height(rows) * len(rows)), draw), caption


def times(cells: Sequence[Mapping[str, Any]]) -> Drawn | None:
    """First token and gaps between arrivals: p50 as a point, up to p95 and p99 as bars."""
    rows = list(cells)[:MOST_ROWS]
    ways = list(dict.fromkeys(w for cell in rows for w in cell["ways"]))
    if not rows:
        return None
    panels = (
        ("first token, ms", "first_token_ms_p50", "first_token_ms_p95"),
        ("per token, ms", "time_per_token_ms_p50", "time_per_token_ms_p95"),
        ("between arrivals, ms", "between_arrivals_ms_p50", "between_arrivals_ms_p99"),
    )

    def draw(figure: Figure) -> None:
        for number, (axes, (title, point, bar)) in enumerate(zip(figure.subplots(1, 3), panels, strict=True)):
            for index, way in enumerate(ways):
                shift = 0.22 * (index - (len(ways) - 1) / 2)
                held = [(i + shift, cell["ways"][way]) for i, cell in enumerate(rows) if way in cell["ways"]]
                held = [one for one in held if one[1][point] is not None]
                colour = COLOURS.get(way, COLOURS["c4"])
                ys = [y for y, _ in held]
                axes.hlines(ys, [f[point] for _, f in held], [f[bar] for _, f in held], color=colour, lw=1.6)
                axes.plot([f[point] for _, f in held], ys, MARKERS.get(way, "o"), color=colour, ms=5.5, label=way, mec=COLOURS["paper"])
            _rows(axes, [cell["name"] for cell in rows] if number == 0 else None, len(rows))
            axes.set_xlim(left=0)
            axes.set_title(title)
        _legend(figure, len(ways))

    caption = (
        "Points: p50; bars: up to p95, between arrivals up to p99. Left is better. With speculation several tokens arrive at once, "
        f"so the gap between two arrivals may grow while the time per token falls.{_left_out(cells)}"
    )
    return _svg(
        "times", "First token, time per token, and time between arrivals", (WIDTH, 1.3 + _row_height(rows) * len(rows)), draw
    ), caption


# ---------------------------------------------------------------- what an engineer looks at


def acceptance(cells: Sequence[Mapping[str, Any]]) -> Drawn | None:
    """Share kept by slot, a line a kind, with what it needs to pay."""
    cell, way = _telling(cells)
    if cell is None:
        return None
    figure_of = cell["ways"][way]
    lines = _kinds(cells, cell, way)
    even = (figure_of["economics"] or {}).get("break_even_acceptance")
    from matplotlib.ticker import MaxNLocator

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for (kind, shares), colour in zip(lines.items(), SERIES, strict=False):
            axes.plot(range(1, len(shares) + 1), shares, "o-", color=COLOURS[colour], lw=1.6, ms=4.5, label=kind)
        shares = figure_of["alpha"]
        if not lines or len(figure_of["alpha_by_kind"]) > 1:
            axes.plot(range(1, len(shares) + 1), shares, "s-", color=COLOURS["ink"], lw=2.2, ms=5.5, label="all")
        if even is not None:
            axes.axhline(even, color=COLOURS["costs"], lw=1.2, ls=(0, (5, 3)), label=f"pays above {even:.2f}")
        axes.set_ylim(0, 1.02)
        axes.set_xlim(0.7, max(len(shares), *(len(s) for s in lines.values()), 1) + 0.3 if lines else len(shares) + 0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", lw=0.6)
        axes.set_xlabel("slot of the block")
        axes.set_ylabel("kept, of the rounds that judged it")
        figure.legend(loc="outside right center")

    caption = (
        f"{cell['name']}, {way}. A slot is judged when all before it were kept. "
        "The dashed line: where the same acceptance in every slot begins to pay."
    )
    return _svg("acceptance", "Share of proposals kept, by slot", (WIDTH, 3.0), draw), caption


def _kinds(cells: Sequence[Mapping[str, Any]], cell: Mapping[str, Any], way: str) -> dict[str, Sequence[float]]:
    """Shares by kind, of this cell and of those that differ from it in their kind alone."""
    alike = [
        one for one in cells if all(one.get(name) == cell.get(name) for name in ("load", "temperature", "prompt_tokens", "max_tokens"))
    ]
    told = [one["ways"][way]["alpha_by_kind"] for one in alike if way in one["ways"]]
    found = {kind: shares for by_kind in told for kind, shares in by_kind.items() if shares}
    return dict(list(found.items())[:MOST_LINES]) if len(found) > 1 else {}


def gain(cells: Sequence[Mapping[str, Any]]) -> Drawn | None:
    """Ratio by block length: the formula with measured costs, and the measured point."""
    cell, way = _telling(cells)
    if cell is None:
        return None
    figure_of = cell["ways"][way]
    curve, best = figure_of["economics"]["curve"], figure_of["economics"]["best_k"]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.axhline(1.0, color=COLOURS["muted"], lw=1)
        axes.plot(
            [k for k, _ in curve], [r for _, r in curve], "-", color=COLOURS["c1"], lw=2, label="modelled, with a block in every round"
        )
        axes.plot(
            [best], [dict(map(tuple, curve))[best]], "o", color=COLOURS["pays"], ms=8, label=f"K = {best} gains most", mec=COLOURS["paper"]
        )
        ratio = figure_of["ratio"]
        axes.plot([figure_of["mean_block"]], [ratio["mean"]], MARKERS.get(way, "o"), color=COLOURS["auto"], ms=7, label=f"measured, {way}",
                  mec=COLOURS["paper"])  # fmt: skip
        axes.vlines([figure_of["mean_block"]], [_low(ratio)], [_high(ratio)], color=COLOURS["auto"], lw=2)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", lw=0.6)
        axes.set_xlabel("proposals of a block, K")
        axes.set_ylabel("times as fast")
        figure.legend(loc="outside right center")

    caption = f"{cell['name']}, {way}. Modelled from the measured acceptance by slot and the measured cost of a slot: E · t(1) / t(K + 1)."
    return _svg("gain", "Gain by block length", (WIDTH, 3.0), draw), caption


def phases(cells: Sequence[Mapping[str, Any]]) -> Drawn | None:
    """Stacked bars of one cell's ways."""
    cell = next((one for one in cells if sum(bool(f["phases"]) for f in one["ways"].values()) > 1), None)
    if cell is None:
        return None
    ways = {way: figure["phases"] for way, figure in cell["ways"].items() if figure["phases"]}

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row, told in enumerate(ways.values()):
            left = 0.0
            for name, (label, colour) in PHASES.items():
                value = told.get(name, 0.0)
                beside = name == "draft"
                axes.barh(
                    row + (0.34 if beside else 0.0), value, 0.2 if beside else 0.4, left=0.0 if beside else left, color=COLOURS[colour],
                    label=label if row == 0 else None,
                )  # fmt: skip
                left += 0.0 if beside else value
        _rows(axes, list(ways))
        axes.set_xlabel("milliseconds a round")
        figure.legend(loc="outside lower center", ncols=3)

    caption = (
        f"{cell['name']}: where a round spends its time, prompts included, by the services' own metrics. The draft works beside the target."
    )
    return _svg("phases", "Where a round's time goes", (WIDTH, 1.7 + 0.5 * len(ways)), draw), caption


def _telling(cells: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any] | None, str]:
    """The first cell and way with blocks; a fixed block length if there is one, since it judges the same slots every round."""
    held = [
        (cell, way)
        for cell in cells
        for way, figure in cell["ways"].items()
        if figure["economics"] and figure["ratio"] and figure["rounds"] >= LEAST_ROUNDS
    ]
    return min(held, key=lambda one: one[1] != "fixed", default=(None, ""))


def _rows(axes: Axes, names: Sequence[str] | None, count: int = 0) -> None:
    told = [_folded(name) for name in names] if names is not None else [""] * count
    axes.set_yticks(range(len(told)), told, fontsize=8 if any("\n" in name for name in told) else None)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.invert_yaxis()
    axes.grid(axis="x", lw=0.6)
    axes.set_axisbelow(True)


def _left_out(cells: Sequence[Mapping[str, Any]]) -> str:
    return f" The first {MOST_ROWS} of {len(cells)} cells; the tables have all of them." if len(cells) > MOST_ROWS else ""


def _folded(name: str) -> str:
    """In two lines at most, so that long names leave room for what they name."""
    return "\n".join(textwrap.wrap(name, LABEL, max_lines=2, placeholder=" …")) if len(name) > LABEL else name


def _row_height(rows: Sequence[Any]) -> float:
    return 0.45 if len(rows) <= 8 else 0.32


def _legend(figure: Figure, columns: int) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=columns)


def _low(ratio: Mapping[str, Any]) -> float:
    return float(ratio["mean"] if ratio["low"] is None else ratio["low"])


def _high(ratio: Mapping[str, Any]) -> float:
    return float(ratio["mean"] if ratio["high"] is None else ratio["high"])
