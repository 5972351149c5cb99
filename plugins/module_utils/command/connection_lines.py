# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The text of ``explain --from END --to END``, and with ``--live`` the rules that decided about its packets."""

from __future__ import annotations

import textwrap
from typing import Any, Iterator

from ..base.addresses import address_and_port
from ..base.errors import KernelError

#: The verdicts with which packets are neither refused nor dropped.
PASSING = ("forwarded", "unchanged", "left")
_WIDTH = 80
#: The rows of one kind that the text shows; JSON has all.
_ROWS = 40
#: As in every diff: what will be added, and what goes.
_MARKS = {"": " ", "missing": "+", "extra": "-"}


def wrapped(indent: int, text: str) -> list[str]:
    """Return a text in lines of at most 80 columns; words that are longer remain whole."""
    first, more = " " * indent, " " * (indent + 4)
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=more, break_long_words=False, break_on_hyphens=False
    )


def flow_lines(flow: dict[str, Any], read: bool) -> list[str]:
    """Return the explanation of a flow as text. ``read``: the kernel was read."""
    source = address_and_port(flow["source"], flow["sourcePort"]) if flow["sourcePort"] else flow["source"]
    destination = f"{address_and_port(flow['destination'], flow['port'])}/{flow['protocol']}"
    lines = wrapped(2, f"{source} -> {destination}: {flow['verdict']}" + _after(": ", flow["reason"]))
    if flow["service"]:
        lines += wrapped(4, f"Service {flow['service']}, port {flow['servicePort']}, by its {flow['via']}")
        lines += wrapped(4, f"{flow['traffic']} traffic, policy {flow['trafficPolicy']}")
        lines += wrapped(4, f"client: {flow['sourceIs']}")
        if flow["sourceRanges"] is not None:
            lines += wrapped(4, f"only from {', '.join(flow['sourceRanges']) or 'none'}")
        replaced = "replaced by the node's" if flow["masqueraded"] else "kept"
        lines += wrapped(4, f"source address: {replaced} ({flow['masqueradeReason']})")
        if flow["affinitySeconds"]:
            lines += wrapped(4, f"session affinity: {flow['affinitySeconds']} s")
        lines += _endpoint_lines(flow)
    for item in flow["affinity"]:
        lines += wrapped(4, f"affinity: {item['client']} keeps {item['endpoint']}, for {item['seconds']} s more")
    if read and (flow["service"] or flow["kernel"]):
        lines.append("    kernel:" if flow["kernel"] else "    kernel: nothing for this destination")
    lines += _row_lines(flow["kernel"])
    if flow["live"]:
        lines.append("    open:")
    lines += [line for item in flow["live"][:_ROWS] for line in wrapped(6, _live_text(item))]
    if len(flow["live"]) > _ROWS:
        lines.append(f"      and {len(flow['live']) - _ROWS} more")
    return lines + [line for note in flow["notes"] for line in wrapped(4, f"note: {note}")]


def _after(separator: str, text: str) -> str:
    return f"{separator}{text}" if text else ""


def _endpoint_lines(flow: dict[str, Any]) -> Iterator[str]:
    if flow["endpoint"]:
        yield from wrapped(4, f"reaches {flow['endpoint']}: {flow['endpointReason']}")
    elif flow["chosenBy"]:
        yield from wrapped(4, f"reaches one of these, chosen {flow['chosenBy']}:")
    for item in flow["endpoints"]:
        share = item["probability"]
        shown = "no" if not item["chosen"] else "?" if share is None else f"{100 * share:.1f} %"
        yield from wrapped(6, f"{shown:>7} {item['endpoint']}: {item['reason']}")


def _row_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield rows that are missing in the kernel or not desired, and the first of the others."""
    left = _ROWS
    for row in rows:
        left -= not row["state"]
        if row["state"] or left >= 0:
            # Not wrapped, so that it can be pasted.
            yield f"    {_MARKS[row['state']]} {row['line']}"
    if left < 0:
        yield f"      and {-left} more as desired"


def _live_text(item: dict[str, Any]) -> str:
    text = f"{item['by']}: {item['source']} -> {item['destination']}, answered by {item['endpoint']}"
    text += _after(", which sees ", item["seen_as"] if item["seen_as"] != item["source"] else "")
    left = f", {item['seconds']} s left" if item["seconds"] >= 0 else ""
    return f"{text}; {item['state']}{left}"


def connection_lines(document: dict[str, Any], why_not: bool) -> list[str]:
    """Return an explanation as text. ``why_not``: also why each rule of a pod that is isolated does not match."""
    lines = [f"{document['from']} -> {document['to']}: {'allowed' if document['allowed'] else 'denied'}"]
    if document.get("flows"):
        where = f"node {document['node']}" + _after(" in zone ", document["zone"])
        lines[0:1] = wrapped(
            0,
            f"{document['from']} -> {document['to']} on {where}, mode {document['mode']}, behaviour "
            f"{document['behaviour']}: {_summary(document)}",
        )
    for flow in document.get("flows", ()):
        lines += flow_lines(flow, document["kernelRead"])
    if document.get("differences"):
        lines.append("  differs:")
        lines += [line for text in document["differences"] for line in wrapped(4, text)]
    if document.get("flows") and document["connections"]:
        lines.append(f"  network policies: {'allowed' if document['allowed'] else 'denied'}")
    lines += [line for note in document["notes"] for line in wrapped(2, note)]
    for item in document["connections"]:
        place = address_and_port(item["destination"], item["port"]) if item["port"] else item["destination"]
        via = f" (Service {item['service']})" if item["service"] else ""
        state = "allowed" if item["allowed"] else "denied"
        lines.append(f"  {item['source']} -> {place}/{item['protocol']}{via}: {state}")
        for side in item["sides"]:
            lines += _side_lines(side, why_not)
        if item["programmed"]:
            lines.append("    programmed:")
            lines += [f"      {line}" for line in item["programmed"]]
    return lines


def _summary(document: dict[str, Any]) -> str:
    """Return the answer in a few words."""
    verdicts = dict.fromkeys(flow["verdict"] for flow in document["flows"])
    words = list(verdicts)
    if document["connections"]:
        words.append("allowed" if document["allowed"] else "denied by network policies")
    if document["differences"]:
        words.append("differs")
    return ", ".join(words)


def _side_lines(side: dict[str, Any], why_not: bool) -> Iterator[str]:
    of = f" of {side['pod']}" if side["pod"] else ""
    where = "" if side["judgedHere"] or not side["pod"] else f", judged by node {side['node'] or 'not known yet'}"
    yield f"    {side['direction']}{of}: {'allowed' if side['allowed'] else 'denied'}: {side['reason']}{where}"
    if side["isolatedBy"]:
        yield f"      isolated by {', '.join(side['isolatedBy'])}"
    if side["allowedBy"]:
        yield f"      allowed by {side['allowedBy']}"
    if side["deniedBy"]:
        yield f"      denied by {side['deniedBy']}"
    if why_not:
        yield from (f"      {miss}" for miss in side["misses"])


def follow_flows(document: dict[str, Any], seconds: float) -> None:
    """Follow the first flow of an explanation, and add the packets seen to the document, as ``traced``."""
    from ..kernel.nftables.traffic.tracing import Tracer
    from ..rendering.settings import Arrival, Client

    for flow in document.get("flows", ())[:1]:
        client = Client(str(flow["source"]), int(flow["sourcePort"]))
        arrival = Arrival(str(flow["protocol"]), str(flow["destination"]), int(flow["port"]))
        try:
            with Tracer(str(flow["family"]), client, arrival) as tracer:
                document["traced"] = [hit._asdict() for hit in tracer.follow(seconds)]
        except KernelError as error:
            document["traced"] = []
            document.setdefault("problems", []).append(str(error))


def traced_lines(document: dict[str, Any], seconds: float) -> list[str]:
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
