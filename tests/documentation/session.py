# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Convert a recorded terminal session to an SVG of plain text, readable without scripts or fonts."""

from __future__ import annotations

import re
from typing import Mapping, Sequence
from xml.sax.saxutils import escape

CHARACTER = 7.8
LINE = 17
MARGIN = 16
WIDTH = 110


def _colour(line: str) -> str:
    """Return a line's colour by its kind: headings, commands, additions and removals of a diff, recaps."""
    if line.startswith("==="):
        return "heading"
    if line.startswith("$ "):
        return "command"
    if re.match(r"\+(?!\+\+ )", line):
        return "added"
    if re.match(r"-(?!-- )", line):
        return "removed"
    if re.match(r"\S+ +: ok=\d+ +changed=0 .*failed=0", line):
        return "good"
    return "text"


def fold(lines: Sequence[str], width: int = WIDTH) -> list[str]:
    """Cut lines to at most ``width`` characters, ending in an ellipsis."""
    return [line if len(line) <= width else line[: width - 1] + "\u2026" for line in lines]


def picture(text: str, title: str) -> str:
    """Return the text as an SVG document."""
    lines = fold(text.rstrip("\n").split("\n"))
    width = round(2 * MARGIN + CHARACTER * max(map(len, lines)))
    top = MARGIN + 24
    height = top + LINE * len(lines) + MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        f' role="img" aria-label="{escape(title)}">',
        "<style>text{font:13px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;fill:#d8dee9}"
        ".heading{fill:#88c0d0;font-weight:bold}.command{fill:#ebcb8b}.added,.good{fill:#a3be8c}"
        ".removed{fill:#d08770}.title{fill:#8f9bb3}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#1f2530"/>',
        f'<text class="title" x="{MARGIN}" y="{MARGIN + 8}">{escape(title)}</text>',
    ]
    for number, line in enumerate(lines):
        if line:
            y = top + LINE * number + 12
            out.append(f'<text class="{_colour(line)}" x="{MARGIN}" y="{y}" xml:space="preserve">{escape(line)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def shorten(lines: Sequence[str]) -> list[str]:
    """Remove what says nothing about nodes: blank lines, messages about included files, how long the machine took."""
    kept: list[str] = []
    for line in lines:
        if line.startswith("included: "):
            if kept and kept[-1].startswith("TASK ["):
                kept.pop()
        elif line.strip() and not line.startswith("prepared in "):
            kept.append(line.rstrip())
    return kept


def excerpt(text: str, headings: Mapping[str, int]) -> str:
    """Return the sections of a recording whose heading begins with one of ``headings``, cut to a number of lines."""
    kept: list[str] = []
    for section in re.split(r"\n(?==== )", "\n" + text.strip("\n")):
        lines = shorten(section.split("\n"))
        if not lines:
            continue
        for heading, most in headings.items():
            if lines[0].startswith(f"=== {heading}"):
                more = [f"[{len(lines) - most} more lines]"] if len(lines) > most else []
                kept += [*lines[:most], *more, ""]
    if not kept:
        raise ValueError(f"the recording has none of the sections {', '.join(headings)}")
    return "\n".join(kept).rstrip() + "\n"
