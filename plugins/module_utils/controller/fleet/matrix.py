# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of the page that shows which node reaches which Service."""

from __future__ import annotations

from typing import Dict, List, Mapping, Sequence

from .markup import escape
from .nodes import OK, UNREACHED, Node, ServiceReach

# If more nodes than this reach everything, they are counted and not shown.
_FINE_SHOWN = 40
_ROWS_SHOWN = 400


def _is_fine(node: Node) -> bool:
    return all(item.reached is not False for item in node.traffic)


def _cell(item: ServiceReach) -> str:
    if item.reached is None:
        return f'<td class="soft" title="{escape(item.reason)}">not probed</td>'
    state, word = (OK, "reached") if item.reached else (UNREACHED, "not reached")
    return f'<td title="{escape(item.reason)}"><span class="badge s-{state}">{word}</span></td>'


def _row(node: Node, services: Sequence[str], places: Mapping[str, int]) -> str:
    place = places[node.name]
    own = {item.service: item for item in node.traffic}
    cells = "".join(_cell(own[name]) if name in own else "<td></td>" for name in services)
    link = f'<a href="#n{place}" data-node="{place}">{escape(node.name)}</a>'
    return f'<tr><th scope="row">{link}</th>{cells}</tr>'


def reach_matrix(nodes: Sequence[Node], places: Mapping[str, int]) -> str:
    """Return the section of the page with a row per node and a column per Service; empty if no node has probed any.

    ``places``: the number of each node on the page, by its name.
    """
    probed = [node for node in nodes if node.traffic]
    if not probed:
        return ""
    names: Dict[str, None] = {item.service: None for node in probed for item in node.traffic}
    services: List[str] = list(names)
    failing = [node for node in probed if not _is_fine(node)]
    fine = len(probed) - len(failing)
    shown = (probed if fine <= _FINE_SHOWN else failing)[:_ROWS_SHOWN]
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in services)
    rows = "".join(_row(node, services, places) for node in shown)
    left = len(probed) - len(shown)
    caption = f"{fine:,} of {len(probed):,} nodes reach all of these Services" + (
        f"; {left:,} are not shown" if left else ""
    )
    return (
        '<section class="card" aria-labelledby="h-traffic"><h2 id="h-traffic">Which node reaches which Service</h2>'
        '<div class="wide" tabindex="0" role="region" aria-label="Nodes by Service"><table class="nodes">'
        f'<caption>{caption}.</caption><thead><tr><th scope="col">Node</th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )
