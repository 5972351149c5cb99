# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pieces of HTML that all sections of the page use."""

from __future__ import annotations

import html
from typing import Any, Dict, Mapping, Sequence

from .document import POLICIES, REFUSED, TITLES
from .nodes import AGENT, DIFFERS, DRIFTED, FAILED, OK, STALE, UNREACHABLE, UNREACHED, WARNED

# A letter beside each colour, for readers who cannot distinguish the colours, and for print.
LETTERS: Dict[str, str] = {
    UNREACHABLE: "U",
    FAILED: "F",
    AGENT: "A",
    DRIFTED: "D",
    UNREACHED: "N",
    STALE: "S",
    REFUSED: "R",
    WARNED: "W",
    POLICIES: "P",
    DIFFERS: "\u2260",
    OK: "\u00b7",
}
WORDS: Dict[str, str] = {**TITLES, OK: "Fine"}
# Names of nodes that are shown at once; the rest is one click away.
_NAMES_SHOWN = 6


def escape(value: Any) -> str:
    """Return a value as text of an element or of a quoted attribute."""
    return html.escape(str(value), quote=True)


def plural(count: int, one: str, many: str) -> str:
    """Return a count with the word in the singular or plural."""
    return f"{count:,} {one if count == 1 else many}"


def badge(kind: str) -> str:
    """Return the letter of a kind of exception, or of a state, in its colour."""
    return f'<span class="badge s-{kind}" aria-hidden="true">{LETTERS[kind]}</span>'


def names(listed: Sequence[str], places: Mapping[str, int]) -> str:
    """Return names of nodes, with links to those on the page. ``places``: the number of each, by its name."""
    links = [
        f'<a href="#n{places[name]}" data-node="{places[name]}">{escape(name)}</a>' if name in places else escape(name)
        for name in listed
    ]
    shown = " ".join(links[:_NAMES_SHOWN])
    if len(links) > _NAMES_SHOWN:
        left = " ".join(links[_NAMES_SHOWN:])
        shown += (
            f' <details class="more"><summary>and {len(links) - _NAMES_SHOWN:,} more</summary> '
            f'<span class="names">{left}</span></details>'
        )
    return f'<span class="names">{shown}</span>'
