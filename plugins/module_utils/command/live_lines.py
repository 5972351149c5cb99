# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``explain --live``: follow the packets of a flow for some seconds, and show the rules that decided about them."""

from __future__ import annotations

from typing import Any, Dict, List

from ..base.errors import KernelError
from .connection_lines import wrapped


def follow_flows(document: Dict[str, Any], seconds: float) -> None:
    """Follow the first flow of an explanation, and add the packets seen to the document, as ``traced``."""
    from ..kernel.nftables.traffic.tracing import Tracer
    from ..rendering.decision import Arrival, Client

    for flow in document.get("flows", ())[:1]:
        client = Client(str(flow["source"]), int(flow["sourcePort"]))
        arrival = Arrival(str(flow["protocol"]), str(flow["destination"]), int(flow["port"]))
        try:
            with Tracer(str(flow["family"]), client, arrival) as tracer:
                document["traced"] = [hit._asdict() for hit in tracer.follow(seconds)]
        except KernelError as error:
            document["traced"] = []
            document.setdefault("problems", []).append(str(error))


def traced_lines(document: Dict[str, Any], seconds: float) -> List[str]:
    """Return the packets seen as text."""
    if "traced" not in document:
        return []
    lines = [f"  followed for at most {seconds:g} s:"]
    if not document["traced"]:
        return [*lines, "    no packet met a rule of nf_tables"]
    packet = 0
    for hit in document["traced"]:
        if hit["packet"] != packet:
            packet = hit["packet"]
            lines.append(f"    packet {packet}")
        lines += wrapped(6, f"{hit['table']} {hit['chain']}: {hit['verdict']} ({hit['rule']})")
    return lines
