"""Pictures of measurements, as SVG. They need matplotlib, which the extra `plot` installs.

Text is grey and colours are of middling brightness on a transparent background: readable on bright and dark
pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#737b85"  # contrast 4.3 to white, 4.4 to GitHub's black
COLOURS = ("#2f81d0", "#d9622b", "#2b9a5b", "#9a6ad6", "#b07d12", "#c2528b", "#1e8f99")

_ONE_MOMENT_MS = 0.02  # an agent notes layers that are computed already within 1 to 2 us of each other

_STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: smaller, and found by a search
    "svg.hashsalt": "kv-connector",  # the same data give the same file
}


class PlotError(RuntimeError):
    """No picture can be made. The message says what to install or name."""


@dataclass(frozen=True)
class Series:
    """One row of a table: a value for each column, or None."""

    name: str
    values: Sequence[float | None]
    spread: Sequence[float] | None = None
    """Distance of the 90th percentile above the value, for bars."""


@dataclass(frozen=True)
class Panel:
    """One diagram."""

    title: str
    columns: Sequence[str]
    series: Sequence[Series]
    unit: str
    columns_are: str = ""
    at: Sequence[float] | None = None
    """Place of each column on a logarithmic axis. None: the columns are neighbours."""


def check(file: Path) -> None:
    """Raises PlotError if no picture can be written to ``file``. Call it before the measurement."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PlotError(f"{error}; install it: pip install 'kv-connector[plot]'") from None
    if file.suffix != ".svg":
        raise PlotError(f"{file}: pictures are SVG. Give a file name that ends in .svg")
    if not file.absolute().parent.is_dir():
        raise PlotError(f"{file}: its directory does not exist")


def lines(file: Path, panels: Sequence[Panel], caption: str = "") -> None:
    """Draws a line for each series over its columns."""
    with _figure(file, len(panels), caption) as (_, axes):
        for one, panel in zip(axes, panels, strict=True):
            for colour, series in zip(_colours(panel), panel.series, strict=False):
                places = panel.columns if panel.at is None else panel.at
                one.plot(places, _gaps(series.values), marker="o", color=colour, label=series.name)
            if panel.at is not None:
                one.set_xscale("log", base=2)
                one.set_xticks(panel.at, panel.columns, rotation=30)
                one.minorticks_off()
            _label(one, panel)


def bars(file: Path, panels: Sequence[Panel], caption: str = "") -> None:
    """Draws bars beside each other in each column."""
    with _figure(file, len(panels), caption) as (_, axes):
        for one, panel in zip(axes, panels, strict=True):
            width = 0.8 / len(panel.series)
            for number, (colour, series) in enumerate(zip(_colours(panel), panel.series, strict=False)):
                places = [column + (number + 0.5) * width - 0.4 for column in range(len(panel.columns))]
                spread = None if series.spread is None else [[0.0] * len(series.spread), list(series.spread)]
                one.bar(
                    places,
                    _gaps(series.values),
                    width * 0.92,
                    yerr=spread,
                    color=colour,
                    ecolor=GREY,
                    label=series.name,
                )
            one.set_xticks(range(len(panel.columns)), panel.columns)
            _label(one, panel)


def timeline(file: Path, trace: Mapping[str, Any], caption: str = "") -> None:
    """Draws one transfer of a trace of `kv-connector trace`.

    It shows when each layer was computed at prefill and had landed at decode, and how many of the pages had
    arrived.
    """
    drawn = _Drawn.of(trace)
    with _figure(file, 1, caption, size=(8.6, 5.0)) as (figure, (rows,)):
        for number, (begin, end) in enumerate(drawn.steps):
            rows.axvspan(begin, end, color=GREY, alpha=0.16 if number % 2 else 0.08, lw=0)
            middle = ((begin + end) / 2, 1.0)
            rows.annotate(
                f"chunk {number + 1}",
                middle,
                xycoords=("data", "axes fraction"),
                ha="center",
                va="bottom",
            )
        computing = rows.barh(
            [bar.row for bar in drawn.computing],
            [bar.end - bar.begin for bar in drawn.computing],
            left=[bar.begin for bar in drawn.computing],
            height=0.5,
            color=COLOURS[0],
        )
        moments, landed_in = zip(*drawn.landed, strict=True)
        (landed,) = rows.plot(moments, landed_in, "D", ms=4.5, color=COLOURS[1])
        rows.set_yticks(range(len(drawn.names)), [f"layer {row}" for row in range(len(drawn.names))])
        rows.invert_yaxis()
        rows.set_xlabel("ms since prefill began")
        share = rows.twinx()
        share.spines["right"].set_visible(True)
        share.grid(visible=False)
        share.set_ylim(0, 105)
        share.set_ylabel("% of the pages")
        (here,) = share.step(*zip(*drawn.counts, strict=True), where="post", color=COLOURS[2])
        figure.legend(
            [computing.patches[0], landed, here],
            ["prefill computes the layer", "its pages are at decode", "of all pages at decode (right)"],
            loc="outside lower center",
            ncols=3,
        )


@dataclass(frozen=True)
class _Bar:
    row: int
    begin: float
    end: float


@dataclass(frozen=True)
class _Drawn:
    """One transfer, in milliseconds since prefill's first step."""

    names: Sequence[str]
    """Names of the layers, in the order in which they are computed. A layer's place is its row."""
    computing: Sequence[_Bar]
    landed: Sequence[tuple[float, int]]
    """Time and row of each landed layer."""
    steps: Sequence[tuple[float, float]]
    counts: Sequence[tuple[float, float]]
    """Time, and percentage of the pages that were at decode."""

    @classmethod
    def of(cls, trace: Mapping[str, Any]) -> _Drawn:
        events = sorted((e for e in trace["traceEvents"] if "ts" in e), key=lambda event: event["ts"])
        threads = {
            (event["pid"], event["tid"]): event["args"]["name"]
            for event in trace["traceEvents"]
            if event["name"] == "thread_name"
        }
        steps = [event for event in events if event["name"] == "step"]
        if not steps:
            raise PlotError(
                "the trace has no step of a prefill engine. Add the prefill engine to the traced engines"
            )
        begin = steps[0]["ts"]

        def ms(microseconds: float) -> float:
            return float(microseconds - begin) / 1e3

        def named(name: str) -> list[tuple[float, str]]:
            found = [event for event in events if event["name"] == name]
            return [(ms(event["ts"]), threads[event["pid"], event["tid"]]) for event in found]

        spans = [(ms(step["ts"]), ms(step["ts"] + step["dur"])) for step in steps]
        computed = named("computed")
        names = list(dict.fromkeys(layer for _, layer in computed))
        bars, last, group = list[_Bar](), 0.0, 0.0
        for when, layer in computed:
            # A layer begins where the layer before it ends, or where its step begins. Layers that were
            # noted at one moment (the agent holds off while a step is launched) share the time before it.
            if when > group + _ONE_MOMENT_MS:
                last, group = group, when
            start = max([last, *(first for first, _ in spans if first <= when)])
            bars.append(_Bar(names.index(layer), start, when))
        counts = [(ms(event["ts"]), event["args"]["pages"]) for event in events if event["ph"] == "C"]
        most = max((pages for _, pages in counts), default=1)
        return cls(
            names=names,
            computing=bars,
            landed=[(when, names.index(layer)) for when, layer in named("landed")],
            steps=spans,
            counts=[(0.0, 0.0), *((when, pages * 100 / most) for when, pages in counts)],
        )


@contextmanager
def _figure(
    file: Path, panels: int, caption: str, size: tuple[float, float] | None = None
) -> Iterator[tuple[Figure, Sequence[Axes]]]:
    """Yields a figure of panels beside each other, and writes it at the end of the block."""
    check(file)
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size or (4.4 * panels + 0.4, 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(1, panels, squeeze=False)[0]
        yield figure, axes
        if caption:
            figure.suptitle(caption, fontsize=9)
        figure.savefig(file, transparent=True, bbox_inches="tight", metadata={"Date": None})


def _colours(panel: Panel) -> Sequence[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(len(panel.series))]


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _label(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title)
    axes.set_ylabel(panel.unit)
    axes.set_xlabel(panel.columns_are)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=9)
