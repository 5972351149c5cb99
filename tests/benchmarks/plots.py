# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Draw what benchmarks print: costs over sizes, as SVG with logarithmic axes.

    .venv/bin/python -m tests.benchmarks.plots NAME FILE DIRECTORY

draws the plots of the benchmark ``NAME`` from a file that ``python -m tests.benchmarks --output`` has written. Needs
matplotlib (requirements-benchmarks.txt).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, str]


class Plot(NamedTuple):
    """A plot: its file and titles, and the columns of the table that it shows.

    ``size`` are columns whose product is the size. ``costs`` maps columns to what the legend calls them, ``by`` is a
    column of which each value has a separate line.
    """

    file: str
    title: str
    size_title: str
    cost_title: str
    size: tuple[str, ...]
    costs: dict[str, str]
    by: str = ""


PLOTS: dict[str, tuple[Plot, ...]] = {
    "nftables": (
        Plot(
            "nftables-from-empty.svg",
            "nftables mode, from empty",
            "endpoints of all Services",
            "seconds",
            ("services", "endpoints"),
            {"from_empty": "rendering to kernel", "from_empty_floor": "the kernel's part (replay)"},
        ),
        Plot(
            "nftables-one-change.svg",
            "nftables mode, one endpoint replaced",
            "endpoints of all Services",
            "milliseconds",
            ("services", "endpoints"),
            {
                "replace_p50_ms": "median",
                "replace_p99_ms": "99th percentile",
                "replace_floor_ms": "the kernel's part (replay)",
            },
        ),
    ),
    "modes": (
        Plot(
            "modes-connection.svg",
            "A new connection, Debian's kernel in an emulator",
            "Services",
            "microseconds, median",
            ("services",),
            {"connect_p50_us": ""},
            "mode",
        ),
        Plot(
            "modes-from-empty.svg",
            "A convergence from empty, Debian's kernel in an emulator",
            "Services",
            "seconds of processor time",
            ("services",),
            {"from_empty_s": ""},
            "mode",
        ),
        Plot(
            "modes-one-change.svg",
            "A convergence after one endpoint changed, Debian's kernel in an emulator",
            "Services",
            "seconds of processor time",
            ("services",),
            {"one_change_s": ""},
            "mode",
        ),
    ),
}


def table(text: str) -> list[Row]:
    """Return the rows of the table in a text: lines with cells between ``|``, of which the first names the columns."""
    lines = [[cell.strip() for cell in line.split(" | ")] for line in text.splitlines() if " | " in line]
    if not lines:
        return []
    return [dict(zip(lines[0], cells)) for cells in lines[1:] if len(cells) == len(lines[0])]


def curves(plot: Plot, rows: list[Row]) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each line of a plot by its legend; a row without a size has none."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        size = 1.0
        for column in plot.size:
            size *= float(row[column])
        for column, legend in plot.costs.items():
            label = ", ".join(filter(None, (row[plot.by] if plot.by else "", legend)))
            if size > 0:
                found.setdefault(label, []).append((size, float(row[column])))
    return {label: sorted(points) for label, points in found.items()}


def save(plot: Plot, lines: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """Write a plot as SVG, in which text is text."""
    import matplotlib  # here, since only plots need it

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": plot.file, "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    drawn: Any
    for label, points in lines.items():
        (drawn,) = axes.plot(*zip(*points), marker="o", markersize=3, linewidth=1.2)
        drawn.set_label(label)
    axes.set(xscale="log", yscale="log", xlabel=plot.size_title, ylabel=plot.cost_title, title=plot.title)
    axes.grid(True, which="major", linewidth=0.4)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def draw(name: str, text: str, directory: Path) -> None:
    """Draw the plots of a benchmark from what it has printed."""
    rows = table(text)
    for plot in PLOTS.get(name, ()):
        lines = curves(plot, rows)
        if not lines:
            raise ValueError(f"{name} has printed no row for {plot.file}")
        save(plot, lines, directory / plot.file)


if __name__ == "__main__":
    draw(sys.argv[1], Path(sys.argv[2]).read_text(encoding="utf-8"), Path(sys.argv[3]))
